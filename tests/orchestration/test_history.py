"""The history of a pipeline: an observation every two hours, for plots."""

from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg

from pipeline_platform.control.store import ControlStore
from pipeline_platform.orchestration.reports.stage_figures import StageFigures, metadata_of_stages
from pipeline_platform.orchestration.sensors.history import history_key
from tests.fixtures.sensor import Asked, Place, definitions_of

MESSAGES = dg.AssetKey([Asked.name, "messages"])


def tick(place: Place, cursor: str | None = None) -> tuple[dict[str, Any], str | None]:
    """Return the figures that a tick observes, and its cursor."""
    definitions = definitions_of(Asked)
    resources = {"queue": place.queue, "control": place.control}
    context = dg.build_sensor_context(
        instance=place.instance, resources=resources, definitions=definitions, cursor=cursor
    )
    result = definitions.resolve_sensor_def(f"{Asked.name}_history").evaluate_tick(context)
    (event,) = result.asset_events
    assert event.asset_key == history_key(Asked)
    return {name: value.value for name, value in event.metadata.items()}, result.cursor


def reported(place: Place, receive_id: str, received: int, failed: int, latency: float) -> None:
    """Report a receive, as its run does."""
    batches = StageFigures(receives=1, messages=received, batches=2, seconds=4.0, task_seconds=6.0)
    stages = {"handle": StageFigures(1, received, 0, 1.0, 1.0), "batch-letters": batches}
    stages |= {"type-Order": StageFigures(1, 4, task_seconds=0.1), "type-Refund": StageFigures(1, 2, task_seconds=0.5)}
    metadata = metadata_of_stages(stages, {latency: received})
    metadata |= {"received": received, "failed": failed, "receive_id": receive_id}
    event = dg.AssetMaterialization(MESSAGES, partition="2025-03-01T0000", metadata=metadata)
    place.instance.report_runless_asset_event(event)


def acknowledged(control: ControlStore, receive_id: str, messages: int) -> None:
    control.claim(Asked.name, receive_id, "run", wanted=messages, capacity=10_000, lease_s=60)
    control.finish(receive_id)


def test_a_tick_observes_throughput_failures_latency_lag_and_the_slowest_batcher(place):
    at_rest, _ = tick(place)
    assert at_rest == {"messages": 0, "messages per second": 0.0, "failed": 0, "backlog": 0, "oldest, seconds": 0.0}

    for receive_id, messages, failed, latency in (("first", 7_000, 70, 2.0), ("second", 200, 2, 9.0)):
        acknowledged(place.control, receive_id, messages)
        reported(place, receive_id, messages, failed, latency)
    place.queue.send([b"one", b"two"])

    figures, cursor = tick(place)

    assert figures.pop("oldest, seconds") >= 0
    assert figures == {
        "messages": 7_200,
        "messages per second": 1.0,
        "failed": 72,
        "failure share": 0.01,
        "highest latency p50, seconds": 9.0,
        "highest latency p95, seconds": 9.0,
        "highest latency p99, seconds": 9.0,
        "backlog": 2,
        "slowest batcher": "letters: 3 s a batch",
        "slowest message type": "Refund: 0.25 s a message",
    }
    assert cursor

    missed_a_tick, _ = tick(place, (datetime.now(UTC) - timedelta(hours=4, minutes=5)).isoformat())
    assert missed_a_tick["messages per second"] == 0.49
