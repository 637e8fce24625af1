"""Checks that need no run of the pipeline: how long messages wait at the source."""

from datetime import UTC, datetime

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from pipeline_platform.pipeline import Pipeline
from pipeline_platform.source import Source, SourceError


def backlog_check(pipeline: type[Pipeline]) -> dg.AssetChecksDefinition:
    """Build the check `backlog`: a warning while the oldest message waits longer than `oldest_allowed`."""
    key = pipeline.producer.source

    @dg.asset_check(
        asset=dg.AssetKey([pipeline.name, "messages"]),
        name="backlog",
        description="No message waits at the source for longer than the pipeline allows.",
        required_resource_keys={key},
    )
    def backlog(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        source: Source = getattr(context.resources, key)
        allowed = pipeline.producer.oldest_allowed
        try:
            waiting = source.backlog()
        except SourceError as error:
            return dg.AssetCheckResult(passed=False, severity=dg.AssetCheckSeverity.WARN, description=str(error))
        age = datetime.now(UTC) - waiting.oldest if waiting.oldest else None
        old = age is not None and allowed is not None and age > allowed
        return dg.AssetCheckResult(
            passed=not old,
            severity=dg.AssetCheckSeverity.WARN,
            description=f"The oldest has waited {age}; {allowed} are allowed." if old else "None waits too long.",
            metadata={
                "messages": dg.MetadataValue.null() if waiting.messages is None else waiting.messages,
                "oldest, seconds": dg.MetadataValue.null() if age is None else round(age.total_seconds(), 1),
            },
        )

    return backlog


def backlog_job(pipeline: type[Pipeline]) -> UnresolvedAssetJobDefinition:
    """Build the job that evaluates the check."""
    key = dg.AssetCheckKey(dg.AssetKey([pipeline.name, "messages"]), "backlog")
    return dg.define_asset_job(
        f"{pipeline.name}_backlog",
        selection=dg.AssetSelection.checks(key),
        description="Looks how long messages wait.",
    )
