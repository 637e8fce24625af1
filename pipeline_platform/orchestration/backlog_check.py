"""The check that needs no run, how long messages wait at the source, and the sensor that evaluates it."""

from datetime import UTC, datetime, timedelta

import dagster as dg

from pipeline_platform.model.options import Producer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.jobs import named
from pipeline_platform.orchestration.source_resources import source_of
from pipeline_platform.source.contract import ENDLESS, Backlog, Source, SourceError


def backlog_check(pipeline: type[Pipeline], producer: str = "") -> dg.AssetChecksDefinition:
    """Build the check `backlog`: a warning while the oldest message waits longer than `oldest_allowed`.

    Of several producers each has its own, `backlog_<producer>`.
    """
    options = pipeline.producers_of(producer)[producer]

    @dg.asset_check(
        asset=dg.AssetKey([pipeline.name, "messages"]),
        name=backlog_name(producer),
        description="No message waits at the source for longer than the pipeline allows. Looked at by the sensor "
        f"`{named(pipeline, producer)}_backlog`, which needs no run for it.",
        required_resource_keys={options.source, "control"},
    )
    def backlog(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        return look_at_backlog(options, source_of(context.resources, options.source))

    return backlog


def backlog_name(producer: str) -> str:
    """The name of the check of a producer."""
    return f"backlog_{producer}" if producer else "backlog"


def look_at_backlog(producer: Producer, source: Source) -> dg.AssetCheckResult:
    """Evaluate the check: a source that is away is a warning too."""
    try:
        waiting = source.backlog()
    except SourceError as error:
        return dg.AssetCheckResult(passed=False, severity=dg.AssetCheckSeverity.WARN, description=str(error))
    age = datetime.now(UTC) - waiting.oldest if waiting.oldest else None
    seconds = None if age is None else round(age.total_seconds(), 1)
    passed, description = judged(waiting, producer.oldest_allowed)
    return dg.AssetCheckResult(
        passed=passed,
        severity=dg.AssetCheckSeverity.WARN,
        description=description,
        metadata={
            "messages": None if (waiting.messages or 0) >= ENDLESS else waiting.messages,
            "oldest, seconds": seconds,
        },
    )


def judged(waiting: Backlog, allowed: timedelta | None) -> tuple[bool, str]:
    """Whether messages wait no longer than allowed, and none was lost; and a sentence that says so."""
    if waiting.lost:
        return False, f"The source lost messages: {waiting.lost}."
    if waiting.messages == 0:
        return True, "None waits."
    if allowed is None:
        return True, "The pipeline's `oldest_allowed` sets no limit."
    if waiting.oldest is None:
        unknown = "Messages wait, and the source cannot tell for how long: watch their age at the source itself"
        return False, f"{unknown}, or leave `oldest_allowed` out."
    age = datetime.now(UTC) - waiting.oldest
    if age > allowed:
        return False, f"The oldest has waited {age}; {allowed} are allowed."
    return True, "None waits too long."


def backlog_sensor(pipeline: type[Pipeline], producer: str = "") -> dg.SensorDefinition:
    """Build the sensor that looks how long messages wait, and reports it as the check's evaluation."""
    options = pipeline.producers_of(producer)[producer]

    @dg.sensor(
        name=f"{named(pipeline, producer)}_backlog",
        minimum_interval_seconds=300,
        default_status=dg.DefaultSensorStatus.RUNNING,
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
