"""Promises about crashes, outages, and several processes at the same time."""

from collections.abc import Callable
from functools import partial

from pipeline_platform.model.safe_text import secrets_in
from pipeline_platform.sinks.contract import SinkAwayError
from pipeline_platform.testing.promises import error_of, text_of
from pipeline_platform.testing.sinks.sink_publisher import NEVER
from pipeline_platform.testing.sinks.sink_storing import MANY
from pipeline_platform.testing.sinks.sink_trial import COLUMNS, PIPELINE, TABLE, SinkTrial, at_once, promise

PUBLISHERS = 4
POINTS = (0, 1, 3)
"""Batches before which a publisher is killed: the first, the second, and after the last."""
DELAYS_S = (0.0, 0.02, 0.1)
"""Times after the last batch at which a publisher is killed: before, during or after its commit."""
LATE_S = 3.0
"""Seconds after which a publisher that answers has committed."""


@promise("publishing_again_stores_nothing")
def failed_reads_store_nothing(trial: SinkTrial) -> None:
    """If the rows cannot be read to their end, nothing is stored, and a later `publish` stores them."""
    trial.ensure()
    whole = trial.publication("a", *MANY)

    def rows():  # type: ignore[no-untyped-def]
        yield next(whole.rows())
        raise ReadError

    try:
        answer: object = trial.sink.publish(trial.publication("a", rows=rows))
    except ReadError as error:
        answer = error
    trial.expect(isinstance(answer, ReadError), "the error of the rows from publish()", answer)
    trial.expect_published("a", False, "after an error of the rows")
    trial.expect_stored({}, "after an error of the rows")
    trial.sink.publish(whole)
    trial.expect_stored({"a": MANY}, "after a second publish()")


@promise("publishing_again_stores_nothing", "failed_reads_store_nothing")
def killed_publishers_store_once(trial: SinkTrial) -> None:
    """If a process is killed while it publishes, its receive is stored completely or not at all, and later once."""
    trial.ensure()
    wanted = {}
    for point in POINTS:
        receive_id = f"killed-{point}"
        numbers = range(point * len(MANY), (point + 1) * len(MANY))
        with trial.interrupted(trial.publication(receive_id, *numbers), point):
            trial.expect_published(receive_id, False, f"before batch {point}")
        trial.another().publish(trial.publication(receive_id, *numbers))
        wanted[receive_id] = numbers
        trial.expect_stored(wanted, f"after a kill before batch {point} and a second publish()")


@promise("killed_publishers_store_once")
def killed_commits_store_once(trial: SinkTrial) -> None:
    """If a process is killed around its commit, its receive is stored once, and replaces rows once."""
    trial.ensure()
    trial.publish("a", *MANY)
    wanted, replaced = {"a": MANY}, "a"
    for after_s in (*DELAYS_S, LATE_S):
        receive_id = f"killed-{after_s}"
        publication = trial.publication(receive_id, *MANY, replaces=(replaced,))
        with trial.interrupted(publication, NEVER) as publishers:
            publishers.wait(after_s)
        answer = trial.another().publish(publication)
        wanted, replaced = {receive_id: MANY}, receive_id
        trial.expect_stored(wanted, f"after a kill {after_s:g} s after the last batch, and a second publish()")
    trial.expect(answer is False, f"False from publish() after {LATE_S:g} s", answer)


@promise("publishing_again_stores_nothing")
def publishers_at_once_store_once(trial: SinkTrial) -> None:
    """If several processes publish a receive at the same time, one of them stores it. Others are not lost."""
    trial.ensure()
    same = [trial.publication("a", *MANY) for _ in range(PUBLISHERS)]
    calls: list[Callable[[], bool]] = [partial(trial.another().publish, publication) for publication in same]
    answers = at_once(calls)
    trial.expect(sorted(answers) == [False, False, False, True], "True from one of four publish()", answers)
    trial.expect_stored({"a": MANY}, "of four publishers")
    numbers = {f"other-{n}": [10_000 + n] for n in range(PUBLISHERS)}
    different = [trial.publication(receive_id, *own) for receive_id, own in numbers.items()]
    answers = at_once([partial(trial.another().publish, publication) for publication in different])
    trial.expect(all(answers), "True from publish() of different receives at the same time", answers)
    trial.expect_stored({"a": MANY, **numbers}, "of five receives")


@promise("rows_are_stored")
def ensuring_at_once_is_harmless(trial: SinkTrial) -> None:
    """If several processes call `ensure` at the same time, all succeed."""
    at_once([partial(trial.another().ensure, PIPELINE, TABLE, COLUMNS) for _ in range(PUBLISHERS)])
    trial.publish("a", 1)
    trial.expect_stored({"a": [1]}, "after four calls of ensure()")


@promise("publishing_again_stores_nothing")
def lost_answers_store_once(trial: SinkTrial) -> None:
    """If the answer to a commit is lost, `publish` raises a `SinkAwayError` or retries, and stores the rows once."""
    losing = trial.store.losing
    trial.need(losing, "its store cannot lose an answer (losing)")
    assert losing is not None
    trial.ensure()
    publication = trial.publication("a", *MANY)
    with losing(trial.sink):
        try:
            trial.sink.publish(publication)
        except SinkAwayError:
            trial.sink.publish(publication)
    trial.expect_stored({"a": MANY}, "after a lost answer")
    trial.expect_published("a", True, "after a lost answer")


@promise("rows_are_stored")
def closing_is_harmless(trial: SinkTrial) -> None:
    """`close` may be called at any time and again; the next use opens the connections again."""
    trial.sink.close()
    trial.ensure()
    trial.sink.close()
    trial.sink.close()
    trial.publish("a", 1)
    trial.expect_stored({"a": [1]}, "after close()")


@promise("rows_are_stored")
def what_is_away_is_an_error(trial: SinkTrial) -> None:
    """With an unavailable store each method raises a `SinkAwayError`, so that the run waits."""
    for name, call in _calls_of_absent(trial).items():
        error = error_of(call)
        trial.expect(isinstance(error, SinkAwayError), f"a SinkAwayError from {name}()", repr(error))


@promise("rows_are_stored")
def secrets_stay_secret(trial: SinkTrial) -> None:
    """Passwords, tokens and keys in fields with `repr=False` are in no repr and no error."""
    secrets = _secrets(trial.sink) | (_secrets(trial.store.away(trial.sink)) if trial.store.away else set())
    trial.need(secrets, "it has no secrets in fields with repr=False")
    hidden = trial.sink.model_config.get("hide_input_in_errors")
    trial.expect(hidden, "hide_input_in_errors=True in model_config", f"{hidden}, so that errors quote values")
    texts = {"its repr()": repr(trial.sink), "its str()": str(trial.sink)}
    if trial.store.away:
        texts |= {f"the error of {name}()": text_of(error_of(call)) for name, call in _calls_of_absent(trial).items()}
    for where, text in texts.items():
        trial.expect(not any(secret in text for secret in secrets), "no secret", f"one in {where}")


class ReadError(Exception):
    """Rows cannot be read."""


def _calls_of_absent(trial: SinkTrial) -> dict[str, Callable[[], object]]:
    away = trial.store.away
    trial.need(away, "its store cannot be unavailable (away)")
    assert away is not None
    absent = away(trial.sink)
    return {
        "ensure": partial(absent.ensure, PIPELINE, TABLE, COLUMNS),
        "publish": partial(absent.publish, trial.publication("a", 1)),
        "is_published": partial(absent.is_published, PIPELINE, TABLE, "a"),
    }


def _secrets(sink: object) -> set[str]:
    fields = type(sink).model_fields  # type: ignore[attr-defined]
    hidden = {name: getattr(sink, name) for name, field in fields.items() if not field.repr}
    return set(secrets_in(hidden))
