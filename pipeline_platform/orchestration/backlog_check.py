"""The check `backlog`, which needs no run, and the sensor that evaluates it."""

from typing import Any

import dagster as dg

from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.jobs import named
from pipeline_platform.orchestration.resources.source_resources import source_of
from pipeline_platform.orchestration.sensors.producer_state import ProducerState, state_of


def backlog_check(pipeline: type[Pipeline], producer: str = "") -> dg.AssetChecksDefinition:
    """Build the check `backlog`, which warns while the oldest message waits longer than `oldest_allowed`.

    Each of several producers has its own check, `backlog_<producer>`.
    """
    options = pipeline.producers_of(producer)[producer]

    @dg.asset_check(
        asset=dg.AssetKey([pipeline.name, "messages"]),
        name=backlog_name(producer),
        description="Backlog, messages in flight and free capacity. Warns while a message waits longer than "
        "`oldest_allowed`, while the pipeline is paused, and while the source does not answer. Reported by each run "
        "after its acknowledgement, and by the producer's sensor at most once a minute, if it changed.",
        required_resource_keys={options.source, "control"},
    )
    def backlog(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        found = look_at_backlog(context, pipeline, producer)
        return dg.AssetCheckResult(
            passed=found.passed, severity=found.severity, description=found.description, metadata=found.metadata
        )

    return backlog


def look_at_backlog(context: Any, pipeline: type[Pipeline], producer: str) -> dg.AssetCheckEvaluation:
    """Ask a producer's source for its backlog and return the evaluation of its check.

    Raises:
        ControlStoreError: The control store does not answer.
    """
    source = source_of(context.resources, pipeline.producers_of(producer)[producer].source)
    state = state_of(pipeline, producer, source, context.resources.control, context.instance)
    return evaluation_of(pipeline, producer, state)


def backlog_name(producer: str) -> str:
    """Return the name of a producer's check."""
    return f"backlog_{producer}" if producer else "backlog"


def evaluation_of(pipeline: type[Pipeline], producer: str, state: ProducerState) -> dg.AssetCheckEvaluation:
    """Return the check's result as a sensor reports it. A pause and an unavailable source are warnings."""
    passed, description, metadata = state.evaluation()
    return dg.AssetCheckEvaluation(
        asset_key=dg.AssetKey([pipeline.name, "messages"]),
        check_name=backlog_name(producer),
        passed=passed,
        severity=dg.AssetCheckSeverity.WARN,
        description=description,
        metadata=metadata,
    )


def backlog_sensor(pipeline: type[Pipeline], producer: str = "") -> dg.SensorDefinition:
    """Build the sensor that evaluates the check `backlog`."""
    options = pipeline.producers_of(producer)[producer]

    @dg.sensor(
        name=f"{named(pipeline, producer)}_backlog",
        minimum_interval_seconds=300,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Reports how long messages wait at the source, as the check "
        f"`{backlog_name(producer)}` of `{pipeline.name}/messages`.",
        required_resource_keys={options.source, "control"},
    )
    def backlog(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        shown = look_at_backlog(context, pipeline, producer)
        return dg.SensorResult(asset_events=[shown], skip_reason=shown.description)

    return backlog
