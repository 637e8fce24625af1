"""The check `backlog`, evaluated by a sensor, without a run, and manually."""

import sqlite3
from datetime import timedelta
from typing import Any

import dagster as dg
import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.options import Producer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.reports.backlog_check import backlog_check
from pipeline_platform.orchestration.sensors.producer_state import state_of
from pipeline_platform.source.backlog import Backlog
from tests.fixtures.pipelines_under_test import Told
from tests.fixtures.sensor import Asked, Place, definitions_of

WARN = dg.AssetCheckSeverity.WARN


class Clocked(Told):
    """Pulled by a schedule; its messages may wait for five minutes."""

    name = "clocked"
    producer = Producer(source="queue", schedule="7 * * * *", oldest_allowed=timedelta(minutes=5))


class Hourly(Told):
    """Pulled by a schedule; its messages may wait for any time."""

    name = "hourly"
    producer = Producer(source="queue", schedule="7 * * * *")


def shown(place: Place, pipeline: type[Pipeline], queue: TableQueue | None = None) -> Any:
    """Return the check's evaluation in the UI after a tick, which this function reports as the daemon does."""
    definitions = definitions_of(pipeline)
    context = dg.build_sensor_context(
        instance=place.instance,
        resources={"queue": queue or place.queue, "control": place.control},
        definitions=definitions,
    )
    told = definitions.resolve_sensor_def(f"{pipeline.name}_backlog").evaluate_tick(context)
    for event in told.asset_events:
        place.instance.report_runless_asset_event(event)
    assert not told.run_requests
    key = dg.AssetCheckKey(dg.AssetKey([pipeline.name, "messages"]), "backlog")
    (newest,) = place.instance.event_log_storage.get_asset_check_execution_history(key, limit=1)
    assert newest.event
    assert newest.event.dagster_event
    evaluation = newest.event.dagster_event.asset_check_evaluation_data
    assert evaluation.description == told.skip_message, "the tick says the same"
    return evaluation


@pytest.mark.parametrize("pipeline", [Asked, Clocked], ids=["by sensor", "by the clock"])
def test_it_warns_while_the_oldest_message_waits_too_long_and_needs_no_run(place, pipeline):
    place.enqueue(1)
    fresh = shown(place, pipeline)
    with sqlite3.connect(place.folder / "queue.sqlite") as database:
        database.execute("UPDATE messages SET created_at = datetime(created_at, '-1 hour')")
    old = shown(place, pipeline)
    away = shown(place, pipeline, TableQueue(name="queue", url=f"sqlite:///{place.folder}/elsewhere.sqlite"))

    assert fresh.passed
    assert (old.passed, old.severity) == (False, WARN)
    assert "oldest_allowed (300 s)" in old.description
    assert old.metadata["backlog"].value == 1
    assert (away.passed, away.severity) == (False, WARN), "a source that is away is a warning, not an error"
    assert place.instance.get_runs_count() == 0


def test_a_pause_of_a_pipeline_that_only_the_clock_starts_shows_on_its_asset(place):
    going = shown(place, Hourly)
    place.control.pause("hourly", "new schema on Monday")
    paused = shown(place, Hourly)

    assert going.passed
    assert (paused.passed, paused.severity) == (False, WARN)
    assert "paused: new schema on Monday" in paused.description


def test_it_warns_of_messages_that_the_source_lost(place):
    class Lossy(TableQueue):
        def backlog(self) -> Backlog:
            return Backlog(0, lost="p has lost its messages from offset 0 up to 5")

    state = state_of(BoundProducer(Asked), Lossy(name="queue", url=place.queue.url), place.control, place.instance)
    shown = state.evaluation(BoundProducer(Asked))

    assert not shown.passed
    assert "from offset 0 up to 5" in shown.description


@pytest.mark.parametrize(
    ("messages", "oldest_allowed", "passed", "said"),
    [
        (1, timedelta(minutes=5), False, "Messages are waiting, and the source does not report their age"),
        (0, timedelta(minutes=5), True, "No messages are waiting."),
        (1, None, True, "Messages may wait for any time"),
    ],
)
def test_of_a_source_that_cannot_tell_how_long_it_passes_only_where_none_waits(
    tmp_path, messages, oldest_allowed, passed, said
):
    class Watched(Told):
        name = "watched"
        producer = Producer(source="queue", oldest_allowed=oldest_allowed)

    queue = TableQueue(name="queue", url=f"sqlite:///{tmp_path}/queue.sqlite")  # has no created_column
    queue.create()
    control = ControlStore(f"sqlite:///{tmp_path}/control.sqlite")
    queue.enqueue([b"one"] * messages)

    result: Any = backlog_check(BoundProducer(Watched))(
        dg.build_asset_check_context(resources={"queue": queue, "control": control})
    )

    assert (result.passed, result.severity) == (passed, WARN)
    assert result.description.startswith(said)
