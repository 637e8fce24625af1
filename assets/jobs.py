"""The jobs of a pipeline: one graph, three origins; and the keeping of its tables."""

from __future__ import annotations

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from assets.tags import RunTags
from pipeline_platform.lake.ledger import Origin
from pipeline_platform.model.pipeline import Pipeline

REPLAY_TAG = "pipeline_platform/replay"
"""On every run of a replay job, with the pipeline's name: `dagster.yaml` has one of a pipeline run at a time."""
NO_RETRIES = {"dagster/max_retries": "0"}
"""A run is not tried again as a whole: the next one finishes what it decided, and its leases bring back the rest."""


def receive_config(pipeline: type[Pipeline], origin: Origin, demand: int | None = None) -> dict[str, object]:
    """The run config of a run on some origin."""
    config: dict[str, object] = {"origin": origin}
    if demand is not None:
        config["demand"] = demand
    return {"ops": {pipeline.name: {"ops": {"receive_messages": {"config": config}}}}}


def pipeline_jobs(pipeline: type[Pipeline], assets: dg.AssetsDefinition) -> list[UnresolvedAssetJobDefinition]:
    """Build `<pipeline>_pull`, `<pipeline>_backfill` (open failures) and `<pipeline>_replay` (everything)."""
    # Not the check of the backlog: it looks at the source, and would have every run do that twice.
    selection = dg.AssetSelection.assets(*assets.keys).without_checks() | dg.AssetSelection.checks(assets)
    told: dict[Origin, tuple[str, str]] = {
        "source": ("pull", "Pulls messages from the source."),
        "failed": ("backfill", "Drives the open failures of the chosen windows once more."),
        "messages": ("replay", "Replays all that the chosen windows received, in place of what came of it."),
    }
    return [
        dg.define_asset_job(
            f"{pipeline.name}_{name}",
            selection=selection,
            description=description,
            tags={
                RunTags.of(pipeline).origin: origin,
                **({REPLAY_TAG: pipeline.name} if origin == "messages" else {}),
                **NO_RETRIES,
            },
        )
        for origin, (name, description) in told.items()
    ]
