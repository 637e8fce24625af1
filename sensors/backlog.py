"""The sensor that evaluates the check `backlog` without a run."""

import dagster as dg

from assets.checks import look_at_backlog
from pipeline_platform.model.pipeline import Pipeline
from resources.source import source_of


def backlog_sensor(pipeline: type[Pipeline]) -> dg.SensorDefinition:
    """Build the sensor that looks how long messages wait, and reports it as the check's evaluation.

    On by itself if `oldest_allowed` sets a limit, whether the producer sensor or the clock pulls.
    """
    watched = pipeline.producer.oldest_allowed is not None

    @dg.sensor(
        name=f"{pipeline.name}_backlog",
        minimum_interval_seconds=300,
        default_status=dg.DefaultSensorStatus.RUNNING if watched else dg.DefaultSensorStatus.STOPPED,
        description="Looks how long messages wait at the source, and reports it as the check `backlog` of "
        f"`{pipeline.name}/messages`.",
        required_resource_keys={pipeline.producer.source, "control"},
    )
    def backlog(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        result = look_at_backlog(pipeline, source_of(context.resources, pipeline.producer.source))
        evaluation = dg.AssetCheckEvaluation(
            asset_key=dg.AssetKey([pipeline.name, "messages"]),
            check_name="backlog",
            passed=result.passed,
            severity=result.severity,
            description=result.description,
            metadata=result.metadata,
        )
        return dg.SensorResult(asset_events=[evaluation], skip_reason=result.description)

    return backlog
