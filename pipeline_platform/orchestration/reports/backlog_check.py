"""The check `backlog`, which needs no run, and the sensor that evaluates it."""

from typing import Any

import dagster as dg

from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.orchestration.resources.source_resources import source_of
from pipeline_platform.orchestration.sensors.producer_state import backlog_name, state_of


def backlog_check(producer: BoundProducer) -> dg.AssetChecksDefinition:
    """Build the check `backlog`, which warns while the oldest message waits longer than `oldest_allowed`."""

    @dg.asset_check(
        asset=dg.AssetKey([producer.pipeline.name, "messages"]),
        name=backlog_name(producer),
        description="Backlog, messages in flight and free capacity. Warns while a message waits longer than "
        "`oldest_allowed`, while the pipeline is paused, and while the source does not answer. Reported by each run "
        "after its acknowledgement, and by the producer's sensor at most once a minute, if it changed.",
        required_resource_keys={producer.source, "control"},
    )
    def backlog(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        found = look_at_backlog(context, producer)
        return dg.AssetCheckResult(
            passed=found.passed, severity=found.severity, description=found.description, metadata=found.metadata
        )

    return backlog


def look_at_backlog(context: Any, producer: BoundProducer, *, is_tick: bool = False) -> dg.AssetCheckEvaluation:
    """Ask a producer's source for its backlog and return the evaluation of its check. See `state_of` for `is_tick`.

    Raises:
        ControlStoreError: The control store does not answer.
    """
    source = source_of(context.resources, producer.source)
    return state_of(producer, source, context.resources.control, context.instance, is_tick=is_tick).evaluation(producer)


def backlog_sensor(producer: BoundProducer) -> dg.SensorDefinition:
    """Build the sensor that evaluates the check `backlog`."""

    @dg.sensor(
        name=f"{producer.prefix}_backlog",
        minimum_interval_seconds=300,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Reports how long messages wait at the source, as the check "
        f"`{backlog_name(producer)}` of `{producer.pipeline.name}/messages`.",
        required_resource_keys={producer.source, "control"},
    )
    def backlog(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        shown = look_at_backlog(context, producer, is_tick=True)
        return dg.SensorResult(asset_events=[shown], skip_reason=shown.description)

    return backlog
