"""What Dagster loads: every pipeline's assets, jobs, sensors and schedules, and the resources of this deployment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from assets.checks import backlog_check
from assets.delays_per_carrier import delays_per_carrier
from assets.graph import pipeline_assets
from assets.jobs import pipeline_jobs
from assets.maintenance import maintenance_job
from pipeline_platform.home import home
from pipeline_platform.pipeline import Pipeline
from pipeline_platform.pipeline_checks import check_together
from pipelines.flights import Flights
from resources.acknowledger import Acknowledger
from resources.lake import ControlResource, LakeIOManager, LakeResource
from resources.source import source_resource
from resources.spark import SparkResource
from resources.sqs import SqsSource
from resources.table_queue import TableQueue
from sensors.backlog import backlog_sensor
from sensors.producer import producer_sensor
from sensors.schedules import maintenance_schedule, pull_schedule, redrive_schedule


def pipeline_definitions(pipeline: type[Pipeline]) -> dg.Definitions:
    """Build all that one pipeline is in Dagster, without its resources.

    Args:
        pipeline: The class.

    Returns:
        Its assets and checks, its jobs, its sensors and its schedules.
    """
    assets = pipeline_assets(pipeline)
    pull, backfill, replay = pipeline_jobs(pipeline, assets)
    keep = maintenance_job(pipeline)
    return dg.Definitions(
        assets=[assets],
        asset_checks=[backlog_check(pipeline)],
        jobs=[pull, backfill, replay, keep],
        sensors=[producer_sensor(pipeline, pull), backlog_sensor(pipeline)],
        schedules=[
            pull_schedule(pipeline, pull),
            redrive_schedule(pipeline, backfill),
            maintenance_schedule(pipeline, keep),
        ],
    )


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
        PipelineError: Two pipelines have one name or one source, or there is no resource for a source.
    """
    check_together(pipelines, resources)
    lake, spark = resources["lake"], resources["spark"]
    shared = {"acknowledger": Acknowledger(), "io_manager": LakeIOManager(lake=lake, spark=spark), **resources}
    return dg.Definitions.merge(
        *(pipeline_definitions(pipeline) for pipeline in pipelines),
        dg.Definitions(assets=list(assets), resources=shared, executor=dg.in_process_executor),
    )


def _flights_queue() -> Any:
    """The demo's queue: the embedded table queue, or SQS where an address is given."""
    if os.environ.get("FLIGHTS_SQS_URL"):
        return source_resource(SqsSource)(
            name="flights_queue",
            queue_url=dg.EnvVar("FLIGHTS_SQS_URL"),
            visibility_timeout=int(os.environ.get("FLIGHTS_SQS_VISIBILITY", "900")),
            endpoint_url=os.environ.get("AWS_ENDPOINT_URL"),
            region_name=os.environ.get("AWS_REGION", "us-east-1"),
        )
    return source_resource(TableQueue)(
        name="flights_queue", url=f"sqlite:///{home()}/queue.sqlite", created_column="created_at"
    )


def _secret(variable: str, default: str | None) -> Any:
    """A value of the environment, by its name where it is set: Dagster shows all that is in its configuration."""
    return dg.EnvVar(variable) if os.environ.get(variable) else default


def _resources() -> dict[str, Any]:
    return {
        "lake": LakeResource(root=os.environ.get("PIPELINE_PLATFORM_LAKE", str(home() / "lake"))),
        "control": ControlResource(url=_secret("PIPELINE_PLATFORM_CONTROL", f"sqlite:///{home()}/control.sqlite")),
        "spark": SparkResource(
            remote=os.environ.get("PIPELINE_PLATFORM_SPARK", "warm"),
            token=_secret("PIPELINE_PLATFORM_SPARK_TOKEN", None),
        ),
        "flights_queue": _flights_queue(),
    }


PIPELINES = (Flights,)
RESOURCES = _resources()

defs = platform_definitions(PIPELINES, RESOURCES, assets=[delays_per_carrier])
