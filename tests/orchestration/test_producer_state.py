"""State of a producer: the same sentence in the sensor's tick, the check `backlog` and `status`."""

import re
from datetime import timedelta

import dagster as dg
import pytest
from dagster._core.events import DagsterEvent

from pipeline_platform import Backoff, Breaker
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.breaker import BreakerState
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.orchestration.sensors.producer_state import state_of
from pipeline_platform.source.backlog import ENDLESS, Backlog
from pipeline_platform.source.contract import SourceAwayError, SourceError
from tests.fixtures.sensor import TAGS, Asked, Place, tags


def sentence(place: Place, source: TableQueue | None = None) -> str:
    return state_of(BoundProducer(Asked), source or place.queue, place.control, place.instance).sentence


def evaluations(place: Place, told) -> list[dg.AssetCheckEvaluation]:
    return [event for event in told.asset_events if isinstance(event, dg.AssetCheckEvaluation)]


def test_it_counts_what_waits_and_what_is_held_by_which_run_in_which_step(place):
    place.enqueue(70)
    run = place.queued(tags(30, **{TAGS.received: "60"}), dg.DagsterRunStatus.STARTED)
    place.control.claim("asked", "r", run.run_id, wanted=60, capacity=200, lease_s=60)
    begun = DagsterEvent(
        dg.DagsterEventType.STEP_START.value, "any", step_key="asked.handle_messages", event_specific_data=None
    )
    place.instance.report_dagster_event(begun, run.run_id)

    said = sentence(place)

    step = rf"60 in flight in run {run.run_id[:8]} \(step handle_messages, \d+ s\)"
    assert re.fullmatch(f"70 waiting; {step}; 1 more run can start", said)


def test_what_runs_may_take_is_part_of_what_waits(place):
    """A scheduled run that starts may lease 200,000 messages, but only four wait."""
    place.enqueue(4)
    starting = place.queued(tags(200_000))
    leasing = place.queued(tags(60), dg.DagsterRunStatus.STARTED)
    place.control.claim("asked", "r", leasing.run_id, wanted=60, capacity=200, lease_s=60)

    said = sentence(place)

    runs = f"runs {starting.run_id[:8]} (not started), {leasing.run_id[:8]} (started)"
    assert said.startswith(f"4 waiting, up to 4 of them to be leased by {runs}; none in flight; ")


@pytest.mark.parametrize(
    ("waiting", "said"),
    [
        (Backlog(ENDLESS), "the source never ends"),
        (Backlog(None), "the source does not report its backlog"),
        (Backlog(1), "1 waiting"),
        (Backlog(1_000, at_least=True), "at least 1,000 waiting"),
        (SourceAwayError("no route"), "queue does not answer (no route)"),
        (SourceError("no such queue"), "queue cannot be used (no such queue)"),
    ],
)
def test_it_says_what_a_source_can_tell(place, waiting, said):
    class Telling(TableQueue):
        def backlog(self) -> Backlog:
            if isinstance(waiting, SourceError):
                raise waiting
            return waiting

    assert sentence(place, Telling(name="queue", url=place.queue.url)).startswith(f"{said}; none in flight; ")


def test_a_tick_and_the_check_that_it_reports_say_the_same_and_link_the_runs(place):
    place.enqueue(3)
    run = place.queued(tags(1))

    told = place.tick()

    (shown,) = evaluations(place, told)
    leasing = f"up to 1 of them to be leased by run {run.run_id[:8]} (not started)"
    now = f"3 waiting, {leasing}; none in flight; 1 more run can start"
    assert told.skip_message.endswith(f". Now: {now}")
    assert shown.description.endswith(f" Now: {now}.")
    assert {name: value.value for name, value in shown.metadata.items() if name != "oldest, seconds"} == {
        "backlog": 3,
        "in flight": 0,
        "messages per second": 0.0,
        "run": run.run_id,
    }


def test_a_tick_reports_the_check_once_a_minute_and_only_what_is_new(place, at):
    first, at_once = place.tick(), place.tick()
    at(timedelta(seconds=61))
    unchanged = place.tick()
    place.enqueue(1)
    at(timedelta(seconds=122))
    changed = place.tick()

    told = [len(evaluations(place, tick)) for tick in (first, at_once, unchanged, changed)]
    assert told == [1, 0, 0, 1]


def test_a_skip_reason_names_the_limit_and_the_runs_once(place):
    place.enqueue(300)
    assert place.asked() == [100, 100]

    reason = str(place.tick().skip_message)

    for run in place.instance.get_runs():
        assert reason.count(run.run_id[:8]) == 1
    assert reason.count("max_runs allows 2") == 1
    assert "no run can start" not in reason


def test_the_rate_is_of_what_was_acknowledged_of_late(place):
    place.control.claim("asked", "r", "run", wanted=60, capacity=200, lease_s=60)
    place.control.finish("r")

    assert state_of(BoundProducer(Asked), place.queue, place.control, None).rate == 0.2


def test_another_deployment_on_the_source_is_named_and_warned_of(place, monkeypatch):
    others = "deployment other, last seen 10:00 UTC, also reads this source"
    monkeypatch.setattr(TableQueue, "backlog_up_to", lambda *_: Backlog(0, others=others))

    told = place.tick()

    (shown,) = evaluations(place, told)
    assert others in told.skip_message
    assert not shown.passed
    assert others in shown.description


def test_the_pause_of_a_breaker_shows_in_the_tick_and_on_the_asset_and_an_attempt_is_small(place, monkeypatch):
    breaker = Breaker(of_last=10, pause=Backoff(first=timedelta(seconds=60)))
    monkeypatch.setattr(Asked, "producer", Asked.producer.model_copy(update={"breaker": breaker}))
    place.enqueue(300)
    place.control.judge("asked", breaker, 40, 30)

    told = place.tick()

    reason = r"30 of the last 40 messages failed; next attempt at \d\d:\d\d:\d\d UTC"
    assert re.match(f"paused: {reason}", told.skip_message)
    assert re.match(f"Paused: {reason}", evaluations(place, told)[0].description)
    monkeypatch.setattr(BreakerState, "paused", lambda *_: None)
    assert place.asked() == [10, 10]
