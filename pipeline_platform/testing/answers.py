"""Promises about the backlog, errors and secrets of a source, and about its pickles."""

import io
import pickle
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

from pipeline_platform.source.contract import Source, SourceError
from pipeline_platform.testing.acknowledging import ACKNOWLEDGES
from pipeline_platform.testing.promises import NotAskedError, error_of, text_of
from pipeline_platform.testing.trial import DELIVERS, Trial, promise

NO_ACTION = "not-an-action"
ARRIVES_S = 0.3
"""Seconds that `wait` waits for a message."""


@promise(builds_on=("nothing_is_lost",))
def pickles_without_clients(trial: Trial) -> None:
    """A source that was used is pickled without its clients and connections."""
    before = _classes(pickle.dumps(trial.source))
    received = trial.first()
    trial.acknowledge(received, trial.source.on_success)
    trial.source.backlog()
    more = _classes(pickle.dumps(trial.source)) - before
    trial.expect(not more, "the same classes as in a pickle of a source that was not used", ", ".join(sorted(more)))


@promise(builds_on=("nothing_is_lost", "pickles_without_clients"))
def closing_unused_is_harmless(trial: Trial) -> None:
    """A source may be closed without being used, and closed twice."""
    unused = trial.another()
    unused.close()
    unused.close()


@promise(builds_on=(*ACKNOWLEDGES, "backlogs_take_nothing"), messages=10)
def backlogs_are_right(trial: Trial) -> None:
    """`backlog` counts waiting messages, gaps and leased messages if it declares so, and no acknowledged messages."""
    backlog, all_ = trial.another().backlog(), len(trial.sent)
    trial.need(backlog.messages is not None, "it does not report its backlog")
    gaps = max(0, (backlog.messages or 0) - all_) if backlog.counts_gaps else 0
    oldest = backlog.oldest
    is_time = isinstance(oldest, datetime) and oldest.utcoffset() is not None
    trial.expect(oldest is None or is_time, "a datetime with a zone, or None, for the oldest", repr(oldest))
    _expect_backlog(trial, all_, gaps, "no receive has any")
    received = trial.first(demand=all_ // 2)
    left = all_ - len(received.rows)
    if not backlog.counts_gaps:
        _expect_backlog(trial, all_ if backlog.counts_held else left, 0, f"a receive has {len(received.rows)}")
    trial.acknowledge(received, trial.actions(ending=True)[0])
    _expect_backlog(trial, left, gaps, f"{len(received.rows)} of {all_} are acknowledged")


@promise()
def backlogs_take_nothing(trial: Trial) -> None:
    """`backlog` leases no messages, and is fast."""
    sensor, took = trial.another(), list[float]()
    for _ in range(5):
        started = time.perf_counter()
        sensor.backlog()
        took.append(time.perf_counter() - started)
    trial.figures["backlog"] = statistics.median(took)
    trial.expect_back(trial.sent, trial.soon_s, "after calls of backlog()")


@promise(builds_on=(*DELIVERS, "backlogs_take_nothing"))
def waits_take_nothing(trial: Trial) -> None:
    """`wait` returns True while messages are waiting, and leases none."""
    waiter = trial.another()
    found = trial.becomes(lambda: waiter.wait(0), True)
    trial.expect(found is True, f"True from wait() while {len(trial.sent)} messages are waiting", found)
    trial.expect_back(trial.sent, trial.soon_s, "after calls of wait()")


@promise(builds_on=(*ACKNOWLEDGES, "backlogs_are_right", "waits_take_nothing"), messages=5)
def waits_end_with_a_message(trial: Trial) -> None:
    """`wait` returns False without messages, and True once one arrives."""
    waiter, send = trial.another(), trial.server.sender(trial.another())
    trial.need(waiter.backlog().messages is not None, "it does not report its backlog")
    if send is None:
        raise NotAskedError("it contains its messages from the start")
    for received in trial.come(trial.sent, trial.soon_s, by=trial.source):
        trial.acknowledge(received, trial.actions(ending=True)[0])
    found = trial.becomes(lambda: waiter.wait(0.1), False)
    trial.expect(found is False, "False from wait() when all messages are acknowledged", found)

    def send_later() -> None:
        time.sleep(ARRIVES_S)
        send(trial.server.payloads[len(trial.sent) :])

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send_later)
        found = waiter.wait(ARRIVES_S + trial.patience_s)
        sending.result()
    trial.expect(found is True, f"True from wait() when a message arrives after {ARRIVES_S} s", found)


@promise()
def unknown_actions_are_refused(trial: Trial) -> None:
    """An invalid ack action is refused when the source is built."""
    for option in ("on_success", "on_failure"):
        error = _refusal(trial.source, option)
        trial.expect(error and NO_ACTION in str(error), f"an error for {option}={NO_ACTION!r}", error)


@promise()
def what_is_missing_is_refused_by_name(trial: Trial) -> None:
    """A missing queue raises a `SourceError` with the source's name before anything is received."""
    trial.source.check_ready()
    for call, error in _errors_of_missing(trial).items():
        trial.expect(isinstance(error, SourceError), f"a SourceError from {call}()", repr(error))
        name = trial.source.name
        trial.expect(name in str(error), f"the name {name!r} in the error of {call}()", error)


@promise()
def places_are_by_queue(trial: Trial) -> None:
    """`places`, if not empty, identifies the queue: equal for a renamed source, different for another queue."""
    places = trial.source.places
    trial.need(places, "it has no places")
    given = {name: getattr(trial.source, name) for name in trial.source.model_fields_set}
    renamed = type(trial.source)(**{**given, "name": "another"}).places
    trial.expect(renamed == places, f"{set(places)} for a source of another name", set(renamed))
    if trial.server.missing is not None:
        common = trial.server.missing().places & places
        trial.expect(not common, "no place in common with a source of another queue", set(common))


@promise()
def secrets_stay_secret(trial: Trial) -> None:
    """Values of fields with `repr=False` are in no error, no delivery and no repr."""
    secrets = set(trial.source.secrets)
    said = {"its repr()": repr(trial.source), "its str()": str(trial.source)}
    said["its places"] = str(set(trial.source.places))
    said["the error of an option"] = text_of(_refusal(trial.source, "on_failure"))
    if trial.server.missing is not None:
        secrets |= set(trial.server.missing().secrets)
        said |= {f"the error of {call}()": text_of(error) for call, error in _errors_of_missing(trial).items()}
    trial.need(secrets, "it has no secrets in fields with repr=False")
    hidden = type(trial.source).model_config.get("hide_input_in_errors")
    trial.expect(hidden, "hide_input_in_errors=True in model_config", f"{hidden}, so that errors quote values")
    for row in trial.receive().rows:
        said["its deliveries"] = repr({**row, "data": None})
    for where, text in said.items():
        trial.expect(not any(secret in text for secret in secrets), "no secret", f"one in {where}")


def _expect_backlog(trial: Trial, wanted: int, gaps: int, when: str) -> None:
    sensor, allowed = trial.another(), range(wanted, wanted + gaps + 1)
    trial.becomes(lambda: sensor.backlog().messages in allowed, True)
    found = sensor.backlog().messages
    trial.expect(found in allowed, f"{wanted}{f' to {wanted + gaps}' if gaps else ''} messages while {when}", found)


def _refusal(source: Source, option: str) -> Exception | None:
    given = {name: getattr(source, name) for name in source.model_fields_set}
    return error_of(lambda: type(source)(**{**given, option: NO_ACTION}))


def _errors_of_missing(trial: Trial) -> dict[str, Exception | None]:
    trial.need(trial.server.missing, "its server has no missing queue (missing)")
    assert trial.server.missing is not None
    missing = trial.opened(trial.server.missing())
    return {"check_ready": error_of(missing.check_ready), "backlog": error_of(missing.backlog)}


class _Classes(pickle.Unpickler):
    """Unpickler that collects the names of classes."""

    def __init__(self, pickled: bytes) -> None:
        super().__init__(io.BytesIO(pickled))
        self.named: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.named.add(f"{module}.{name}")
        return super().find_class(module, name)


def _classes(pickled: bytes) -> set[str]:
    unpickler = _Classes(pickled)
    unpickler.load()
    return unpickler.named
