"""Promises about errors: a source reports every refusal, and an unavailable server."""

from collections.abc import Callable

from pipeline_platform.source.connection import ConnectedSource
from pipeline_platform.source.contract import Refused, Source, SourceError
from pipeline_platform.source.log import LogSource
from pipeline_platform.testing.acknowledging import ACKNOWLEDGES, LAPSES, POSITIONS
from pipeline_platform.testing.promises import error_of
from pipeline_platform.testing.trial import MANY, Received, Trial, promise, some

LATE = (
    "acknowledging_late_touches_nothing", "acknowledging_twice_is_harmless", "acknowledging_works_elsewhere",
    "what_is_given_back_comes_at_once",
)  # fmt: skip


@promise(
    builds_on=(*ACKNOWLEDGES, "abandoning_gives_back_at_once", "finishing_twice_is_harmless", POSITIONS), many=True
)
def many_are_delivered_and_acknowledged(trial: Trial) -> None:
    """All messages of a large backlog are delivered, and one call of `acknowledge` accepts all ids."""
    came = trial.come(trial.sent, trial.soon_s, by=trial.source)
    lacking = set(trial.sent) - {payload for received in came for payload in received.data}
    all_ = f"{len(trial.sent)} messages within {trial.soon_s:g} s"
    trial.expect(not lacking, all_, f"{len(trial.sent) - len(lacking)}, without {some(lacking)}")
    for received in came:
        trial.acknowledge(received, trial.actions(ending=True)[0])
    trial.lose(*came)
    if not trial.has_abandon:
        trial.lapse(*came)
    trial.expect_none_of(trial.sent, "that were acknowledged")


@promise(builds_on=(*ACKNOWLEDGES, *LAPSES, *LATE), messages=5)
def acknowledging_late_is_refused(trial: Trial) -> None:
    """Messages that another receive has leased since are returned as `Refused`, with their `ack_id` and `lost`."""
    trial.need(trial.source.acknowledges_by_id, "it acknowledges whole receives")
    trial.need(trial.server.says_lost, "its server does not report lost leases (says_lost)")
    late = trial.first()
    trial.lapse(late)
    held = trial.expect_back(late.data, trial.patience_s, "again")
    for action in _ending_first(trial):
        try:
            refused = trial.acknowledge(late, action)
        except SourceError:
            if trial.source.in_tasks:
                raise
            continue  # its connection is closed
        _expect_refused(trial, late, action, refused, lost=True)
    trial.lose(*held)


@promise(
    builds_on=(*ACKNOWLEDGES, "what_is_missing_is_refused_by_name", "what_is_given_back_comes_at_once", "logs_remember",
               "acknowledging_works_elsewhere", "waits_end_with_a_message"),
    messages=10,
)  # fmt: skip
def what_is_away_is_an_error(trial: Trial) -> None:
    """With an unavailable server each call raises a `SourceError`, and `acknowledge` reports every message."""
    away = trial.server.away
    trial.need(away, "its server cannot be unavailable (away)")
    assert away is not None
    received = trial.first()
    absent = trial.opened(away(trial.another()))
    _expect_error(trial, "backlog()", absent.backlog)
    _expect_error(trial, "wait()", lambda: absent.wait(0))
    _expect_error(trial, "plan() and read()", lambda: _receive(absent))
    if trial.source.extend_every_s:
        _expect_error(trial, "extend()", lambda: absent.extend(received.receive_id, received.held))
    if isinstance(trial.source, LogSource):
        _expect_error(trial, "finish()", lambda: absent.finish(received.receive_id, received.held))
    if not trial.source.acknowledges_by_id:
        return
    for action in _ending_first(trial):
        try:
            refused = [refusal for ref, ids in received.held() for refusal in absent.acknowledge(action, ref, ids)]
        except SourceError:
            continue
        _expect_refused(trial, received, action, refused, lost=isinstance(trial.source, ConnectedSource))


def _receive(source: Source) -> None:
    for share in source.plan(MANY, 1, "while-away"):
        for _ in source.read(share, "while-away"):
            pass


def _expect_error(trial: Trial, what: str, call: Callable[[], object]) -> None:
    error = error_of(call)
    trial.expect(isinstance(error, SourceError), f"a SourceError from {what}", repr(error))


def _expect_refused(trial: Trial, received: Received, action: str, refused: list[Refused], *, lost: bool) -> None:
    wanted = {row["ack_id"] for row in received.rows}
    found = {refusal.ack_id for refusal in refused if refusal.lost is lost}
    expected = f"Refused with lost={lost} from acknowledge({action!r}) for each of {len(wanted)} messages"
    trial.expect(wanted <= found, expected, f"{len(wanted & found)} of these, {len(refused)} refusals in all")


def _ending_first(trial: Trial) -> list[str]:
    """Return the ack actions that call the server; actions that end a message come last."""
    return [action for action in (*trial.actions(ending=False), *trial.actions(ending=True)) if action != "noop"]
