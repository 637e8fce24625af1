"""The retry sensor requests runs for due failures only."""

from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg

from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import FAILED, Table
from pipeline_platform.model.retry import Retry
from pipeline_platform.orchestration.deployment import platform_definitions
from pipeline_platform.orchestration.sensors import schedules as retry
from tests.fixtures.jobs_under_test import resources_at
from tests.fixtures.pipelines_under_test import Told
from tests.fixtures.sensor import Asked, Place, definitions_of, tags
from tests.fixtures.small_lake import put

WINDOWS = [f"2025-03-01T{hour:02}00" for hour in range(24)]
AGO = datetime.now(UTC) - timedelta(hours=1)
AHEAD = datetime.now(UTC) + timedelta(hours=1)


class Again(Told):
    """A pipeline whose failures are retried; a run retries 100."""

    name = "asked"
    retry = Retry(max_attempts=3)


def fail(place: Place, window: str, *due: datetime | None, state: str = "open") -> None:
    """Record failures that are due at these times."""
    table = Table(Lake(root=str(place.folder / "lake")), "asked", "failed", FAILED)
    table.ensure()
    event = {"source": "queue", "attempt": 1, "state": state, "at": AGO, "receive_id": window}
    rows = [{**event, "message_id": f"{window} {number}", "due_at": at} for number, at in enumerate(due)]
    put(table, f"{window}-{state}", *rows, window=window)


def look(place: Place, pipeline: type[Again] = Again) -> Any:
    definitions = definitions_of(pipeline)
    lake = Lake(root=str(place.folder / "lake"))
    resources = {"queue": place.queue, "lake": lake, "control": place.control}
    context = dg.build_sensor_context(instance=place.instance, resources=resources, definitions=definitions)
    return definitions.resolve_sensor_def("asked_retry").evaluate_tick(context)


def config(request: dg.RunRequest) -> dict[str, Any]:
    receive: dict[str, Any] = request.run_config["ops"]["asked"]["ops"]["receive_messages"]["config"]
    return receive


def test_failures_that_are_due_are_driven_by_a_run_per_range_of_windows(place):
    fail(place, WINDOWS[0], AGO, AGO, AHEAD, None)
    fail(place, WINDOWS[1], AGO)
    fail(place, WINDOWS[2], AHEAD)
    fail(place, WINDOWS[3], AGO)
    first, last = look(place).run_requests
    bounds = [first.tags[f"dagster/asset_partition_range_{bound}"] for bound in ("start", "end")]
    assert (bounds, last.partition_key) == (WINDOWS[:2], WINDOWS[3])
    assert [request.tags["asked/demand"] for request in (first, last)] == ["3", "1"]
    assert config(first) == {"origin": "failed", "demand": 100, "failures": {"state": "due"}}


def test_nothing_is_asked_for_while_nothing_is_due(place):
    assert look(place).skip_message == "no failure is due", "there is no table yet"
    fail(place, WINDOWS[0], AHEAD, None)
    fail(place, WINDOWS[1], None, state="dead")
    assert look(place).skip_message == "no failure is due"


def test_a_pause_holds_for_retries_too(place):
    fail(place, WINDOWS[0], AGO)
    place.control.pause("asked", "new schema on Monday")
    assert look(place).skip_message == "paused: new schema on Monday"


def test_while_a_run_drives_failures_no_other_is_asked_for(place):
    fail(place, WINDOWS[0], AGO)
    queued = place.queued(tags(1) | {"asked/origin": "failed"})
    assert look(place).skip_message == f"run {queued.run_id} is already retrying failures"
    place.control.claim("asked", "r1", queued.run_id, wanted=1, capacity=100, lease_s=60)
    assert look(place).skip_message == f"run {queued.run_id} is already retrying failures"
    place.control.claim("asked", "r1", queued.run_id, wanted=1, capacity=100, lease_s=-1)
    assert len(look(place).run_requests) == 1, "a run whose claim is over is dead"


def test_a_pull_under_way_does_not_hold_retries_back(place):
    fail(place, WINDOWS[0], AGO)
    place.queued(tags(50))
    assert len(look(place).run_requests) == 1


def test_runs_that_fail_in_a_row_are_asked_for_less_often(place):
    fail(place, WINDOWS[0], AGO)
    failed = tags(1) | {"asked/origin": "failed"}
    for _ in range(2):
        place.queued(failed, status=dg.DagsterRunStatus.FAILURE)
    assert look(place).skip_message.startswith("the last 2 runs failed; next run at")


def test_a_look_asks_for_no_more_runs_than_it_may(place, monkeypatch):
    monkeypatch.setattr(retry, "_AT_ONCE", 2)
    for window in WINDOWS[::2][:4]:
        fail(place, window, AGO)
    assert [request.partition_key for request in look(place).run_requests] == [WINDOWS[0], WINDOWS[2]]


class InTurn(Again):
    """A pipeline whose runs take turns."""

    partition_by = "source"


def test_runs_that_take_turns_are_requested_one_at_a_time(place):
    for window in WINDOWS[::2][:4]:
        fail(place, window, AGO)
    (request,) = look(place, InTurn).run_requests
    assert request.partition_key == WINDOWS[0]


def test_the_sensor_is_there_and_on_where_the_pipeline_retries():
    def sensors(pipeline: type[Told]) -> dict[str, str]:
        location = platform_definitions([pipeline], resources_at("nowhere", "nowhere")).get_repository_def()
        return {sensor.name: sensor.default_status.value for sensor in location.sensor_defs}

    assert sensors(Again)["asked_retry"] == "RUNNING"
    assert "asked_retry" not in sensors(Asked)
