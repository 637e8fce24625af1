"""A deployment: pipelines, resources and assets put together for Dagster and for the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import dagster as dg

from assets.checks import backlog_check
from assets.graph import pipeline_assets
from assets.jobs import maintenance_job, pipeline_jobs
from assets.limits import limits_job
from pipeline_platform.model.checks import check_together
from pipeline_platform.model.pipeline import Pipeline
from resources.acknowledger import AcknowledgerResource
from resources.lake import LakeIOManager
from sensors.backlog import backlog_sensor
from sensors.producer import producer_sensor
from sensors.schedules import maintenance_schedule, pull_schedule, redrive_schedule


class Built(NamedTuple):
    """What `platform_definitions` was given: the classes, and resources by key."""

    pipelines: tuple[type[Pipeline], ...]
    resources: Mapping[str, Any]


BUILT: list[Built] = []
"""In this process, for the command line: the last one is of the module that was loaded last."""


def platform_definitions(
    pipelines: Sequence[type[Pipeline]], resources: Mapping[str, Any], assets: Sequence[Any] = ()
) -> dg.Definitions:
    """Put pipelines, resources and assets downstream of them together.

    Args:
        pipelines: The classes.
        resources: By key: `lake`, `control`, `spark`, and each pipeline's source.
        assets: Whatever else there is.

    Returns:
        Definitions whose runs work in their own process: Spark starts once a run, not once a step.

    Raises:
        PipelineError: Two pipelines have one name, or two producers one source, or there is no resource for a source.
    """
    check_together(pipelines, resources)
    BUILT.append(Built(tuple(pipelines), resources))
    io_manager = LakeIOManager(lake=resources["lake"], spark=resources["spark"])
    return dg.Definitions.merge(
        *map(_definitions, pipelines),
        dg.Definitions(
            assets=list(assets),
            resources={"acknowledger": AcknowledgerResource(), "io_manager": io_manager, **resources},
            executor=dg.in_process_executor,
        ),
    )


def _definitions(pipeline: type[Pipeline]) -> dg.Definitions:
    """All that one pipeline is in Dagster, without its resources; each producer has its own sensors and schedule."""
    assets = pipeline_assets(pipeline)
    pull, backfill, replay = pipeline_jobs(pipeline, assets)
    maintenance, producers = maintenance_job(pipeline), pipeline.producers_of()
    return dg.Definitions(
        assets=[assets],
        asset_checks=[backlog_check(pipeline, name) for name in producers],
        jobs=[pull, backfill, replay, maintenance, limits_job(pipeline)],
        sensors=[
            *(producer_sensor(pipeline, pull, name) for name in producers),
            *(backlog_sensor(pipeline, name) for name in producers),
        ],
        schedules=[
            *(pull_schedule(pipeline, pull, name) for name in producers),
            redrive_schedule(pipeline, backfill),
            maintenance_schedule(pipeline, maintenance),
        ],
    )
