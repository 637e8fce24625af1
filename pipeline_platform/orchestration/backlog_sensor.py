"""The sensor that evaluates the check `backlog` without a run."""

import dagster as dg

from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.backlog_check import backlog_name, look_at_backlog
from pipeline_platform.orchestration.jobs import named
from pipeline_platform.orchestration.source_resources import source_of


def backlog_sensor(pipeline: type[Pipeline], producer: str = "") -> dg.SensorDefinition:
    """Build the sensor that looks how long messages wait, and reports it as the check's evaluation.

    On by itself if `oldest_allowed` sets a limit, whether the producer sensor or the clock pulls.
    """
    options = pipeline.producers_of(producer)[producer]
    watched = options.oldest_allowed is not None

    @dg.sensor(
        name=f"{named(pipeline, producer)}_backlog",
        minimum_interval_seconds=300,
        default_status=dg.DefaultSensorStatus.RUNNING if watched else dg.DefaultSensorStatus.STOPPED,
        description="Looks how long messages wait at the source, and reports it as the check "
        f"`{backlog_name(producer)}` of `{pipeline.name}/messages`.",
        required_resource_keys={options.source, "control"},
    )
    def backlog(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        result = look_at_backlog(options, source_of(context.resources, options.source))
        evaluation = dg.AssetCheckEvaluation(
            asset_key=dg.AssetKey([pipeline.name, "messages"]),
            check_name=backlog_name(producer),
            passed=result.passed,
            severity=result.severity,
            description=result.description,
            metadata=result.metadata,
        )
        return dg.SensorResult(asset_events=[evaluation], skip_reason=result.description)

    return backlog
