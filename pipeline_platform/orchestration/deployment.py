"""Deployments: the definitions of several pipelines with their shared resources."""

import warnings
from collections.abc import Container, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import dagster as dg

from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline, PipelineError
from pipeline_platform.orchestration.asset_windows import find_first_windows, windows_of
from pipeline_platform.orchestration.deployment_checks import check_deployment
from pipeline_platform.orchestration.graph import asset_keys, pipeline_assets, resource_keys
from pipeline_platform.orchestration.jobs import REFUSED, pipeline_jobs
from pipeline_platform.orchestration.limits_job import limits_job
from pipeline_platform.orchestration.reports.backlog_check import backlog_check, backlog_sensor
from pipeline_platform.orchestration.reports.run_checks import run_checks
from pipeline_platform.orchestration.resources.default_resources import default_resources
from pipeline_platform.orchestration.resources.lake_resources import (
    IO_MANAGER,
    LakeIOManager,
    LakeResource,
    resource_options,
)
from pipeline_platform.orchestration.resources.launchpad import out_of_launchpad
from pipeline_platform.orchestration.resources.sink_resources import sink_resource
from pipeline_platform.orchestration.resources.source_resources import (
    AcknowledgerResource,
    configured,
    connector_of,
    source_resource,
)
from pipeline_platform.orchestration.resources.spark_resource import SparkResource, shipping_also
from pipeline_platform.orchestration.retention.maintenance_job import maintenance_job
from pipeline_platform.orchestration.sensors.alerts import To, alerts_sensor
from pipeline_platform.orchestration.sensors.history import history_asset, history_sensor
from pipeline_platform.orchestration.sensors.producers import producer_sensor
from pipeline_platform.orchestration.sensors.schedules import (
    maintenance_schedule,
    pull_schedule,
    retry_schedule,
    retry_sensor,
)
from pipeline_platform.sinks.contract import Sink
from pipeline_platform.source.contract import Source
from pipeline_platform.spark import shipping


class Built(NamedTuple):
    """Arguments of `platform_definitions`: the classes, and resources by key."""

    pipelines: tuple[type[Pipeline], ...]
    resources: Mapping[str, Any]

    def warm_up(self, **server: Any) -> None:
        """Start the Spark session of this deployment's runs on a warm server, given by options of `SparkResource`."""
        packages = shipping_also(self.resources["spark"], packages_of_tasks(self.pipelines, self.resources)).packages
        connectors = filter(None, map(connector_of, self.resources.values()))
        with closing(SparkResource(**server, packages=packages)) as spark:
            spark.warm_up(*(cls.__module__ for cls in (*connectors, *self.pipelines)))


BUILT: list[Built] = []
"""Deployments built in this process, in order, for the command line, which uses the last: a project may merge the
definitions with its own, and Dagster's definitions do not contain the classes of the pipelines."""


def platform_definitions(
    pipelines: Sequence[type[Pipeline]],
    resources: Mapping[str, Any] | None = None,
    assets: Sequence[Any] = (),
    sensors: Sequence[Any] = (),
    alerts: To | None = None,
    *,
    sources: Mapping[str, Source] | None = None,
    sinks: Mapping[str, Sink] | None = None,
) -> dg.Definitions:
    """Combine pipelines and resources with other assets and sensors.

    Each pipeline gets its assets, checks, jobs, sensors and schedules. An asset or sensor that you pass, such as
    `producer_sensor(Orders)` or `pipeline_assets(Orders)`, replaces the one that would be built.

    Args:
        pipelines: The classes.
        resources: By key: `lake`, `control`, `spark`, and each pipeline's source. Spark's workers get the packages of
            pipelines and connectors. By default the lake and the control store are in the deployment's folder
            (`pipeline_platform.home.home`), or where `PIPELINE_PLATFORM_LAKE` and `_CONTROL` point; Spark is this
            machine's warm server, or a session of the run's own; and each run uses one process.
        assets: Other assets, such as assets downstream of pipelines.
        sensors: Other sensors.
        alerts: A function that gets each `Alert`; `dg.EnvVar("ALERTS_URL")`, the variable with the address of a webhook
            to post alerts to; or `Alerts`, with limits for failures. None for no alerts.
        sources: Connectors by key, such as `{"orders_queue": TableQueue(...)}`. Use `source_resource` and `resources`
            instead if an option comes from a `dg.EnvVar`.
        sinks: Sinks by key, such as `{"warehouse": PostgresSink(...)}`. Use `sink_resource` and `resources` instead if
            an option comes from a `dg.EnvVar`.

    Returns:
        Definitions without defaults for other assets and jobs. A project with definitions of its own merges both:
        `dg.Definitions.merge(own, platform_definitions(...))`. Each job runs in one process, so that Spark starts once
        per run, not once per step.

    Raises:
        PipelineError: Two pipelines have the same name, two producers read the same queue, a source or its resource is
            missing, or a source does not support an option of its pipeline: `dead_letters`, `acks_immediately`, or
            `partition_by="source"`.
    """
    executor = dg.in_process_executor if resources is None else None
    resources = resources_together(pipelines, with_sources(resources, sources or {}, sinks or {}))
    given = {key: asset for asset in assets if isinstance(asset, dg.AssetsDefinition) for key in asset.keys}
    own = [given.get(asset_keys(pipeline)["messages"]) for pipeline in pipelines]
    named = {sensor.name for sensor in sensors}
    return dg.Definitions.merge(
        *(pipeline_definitions(pipeline, resources, given, named) for pipeline in pipelines),
        dg.Definitions(
            assets=[asset for asset in assets if asset not in own],
            sensors=[*sensors, *([alerts_sensor(pipelines, alerts)] if alerts else [])],
            resources=resources,
            executor=executor,
        ),
    )


def with_sources(
    resources: Mapping[str, Any] | None, sources: Mapping[str, Source], sinks: Mapping[str, Sink]
) -> Mapping[str, Any]:
    """Return the resources of a deployment with a resource for each connector and sink; None: the default resources.

    Raises:
        PipelineError: A value is not a connector or a sink, or its key is also a key of `resources`.
    """
    wanted = {"sources": (Source, "a connector, such as TableQueue(...)"), "sinks": (Sink, "a sink")}
    for option, given in ("sources", sources), ("sinks", sinks):
        kind, must_be = wanted[option]
        for key, item in given.items():
            if not isinstance(item, kind):
                name = item.__name__ if isinstance(item, type) else type(item).__name__
                raise PipelineError(f"{option}[{key!r}] must be {must_be}; got a {name}")
            if key in (resources or {}):
                raise PipelineError(f"{option}[{key!r}] is also a key of resources. Remove one of the two")
    if resources is not None and not sources and not sinks:
        return resources
    made: dict[str, Any] = {key: source_resource(type(item))(**configured(item)) for key, item in sources.items()}
    made |= {key: sink_resource(type(item))(**configured(item)) for key, item in sinks.items()}
    return {**(default_resources() if resources is None else resources), **made}


def resources_together(pipelines: Sequence[type[Pipeline]], resources: Mapping[str, Any]) -> dict[str, Any]:
    """Check pipelines and resources, and return all resources of the deployment by key.

    Raises:
        PipelineError: As of `platform_definitions`.
    """
    check_deployment(pipelines, resources)
    for pipeline in pipelines:
        check_models(pipeline, resources["lake"])
    find_first_windows(pipelines, resources)
    BUILT.append(Built(tuple(pipelines), resources))
    resources = {**resources, "spark": shipping_also(resources["spark"], packages_of_tasks(pipelines, resources))}
    io_manager = LakeIOManager(lake=resources["lake"], spark=resources["spark"])
    resources = {"acknowledger": AcknowledgerResource(), IO_MANAGER: io_manager, **resources}
    for resource in resources.values():
        out_of_launchpad(resource)
    return resources


def packages_of_tasks(pipelines: Sequence[type[Pipeline]], resources: Mapping[str, Any]) -> set[str]:
    """Return the project's packages that tasks import: those of pipelines and connectors, and their dependencies.

    Raises:
        PipelineError: Spark's workers cannot import one of the classes.
    """
    classes = [*pipelines, *filter(None, map(connector_of, resources.values()))]
    try:
        return shipping.packages_of(classes)
    except ValueError as error:
        raise PipelineError(str(error)) from None


def check_models(pipeline: type[Pipeline], resource: Any) -> None:
    """Warn of a model that does not fit its table, if the lake is a folder. A bucket would delay each load.

    Runs of the pipeline are refused until it is changed; other pipelines are not affected.
    """
    REFUSED.pop(pipeline, None)
    folder = Path((resource_options(resource)["root"] or "") if isinstance(resource, LakeResource) else "")
    if (folder / pipeline.name).is_dir() and (refusals := Tables(Lake(root=str(folder)), pipeline).refusals()):
        REFUSED[pipeline] = "; ".join(refusals.values())
        warnings.warn(f"Runs of {pipeline.name} are refused: {REFUSED[pipeline]}", stacklevel=4)


def pipeline_definitions(
    pipeline: type[Pipeline],
    resources: Mapping[str, Any],
    given: Mapping[dg.AssetKey, dg.AssetsDefinition],
    named: Container[str],
) -> dg.Definitions:
    """Return the definitions of a pipeline, without sensors that are `named` already."""
    messages, producers = asset_keys(pipeline)["messages"], BoundProducer.all_of(pipeline)
    connectors = filter(None, (connector_of(resources[producer.source]) for producer in producers))
    kinds = {connector.__name__.removesuffix("Source").lower() for connector in connectors}
    windows = windows_of(pipeline)  # assets in `given` were built before the first window was known

    def completed(spec: dg.AssetSpec) -> dg.AssetSpec:
        # Dagster accepts three kinds, and Spark and Delta are two of them.
        own = kinds if spec.key == messages and len(kinds) == 1 else set()
        return spec.replace_attributes(partitions_def=windows).merge_attributes(kinds=own)

    (assets,) = dg.map_asset_specs(completed, [given.get(messages) or pipeline_assets(pipeline)])
    sensors = [
        *(producer_sensor(pipeline, producer.name) for producer in producers),
        *(backlog_sensor(each) for each in producers if each.options.oldest_allowed or each.options.schedule),
        *([retry_sensor(pipeline)] if pipeline.retry else []),
        history_sensor(pipeline),
    ]
    # Bound to the pipeline's own resources: Dagster describes a job with all resources of its definitions, so that the
    # description of all jobs would grow with the square of the number of pipelines.
    own = {key: resources[key] for key in (*resource_keys(pipeline), IO_MANAGER)}
    jobs = [*pipeline_jobs(pipeline, assets), maintenance_job(pipeline), limits_job(pipeline)]
    bound = dg.Definitions(assets=[assets], jobs=jobs, resources=own)
    return dg.Definitions(
        assets=[assets, history_asset(pipeline)],
        asset_checks=[*run_checks(pipeline), *map(backlog_check, producers)],
        jobs=[bound.resolve_job_def(job.name) for job in jobs],
        sensors=[sensor for sensor in sensors if sensor.name not in named],
        schedules=[
            *(pull_schedule(producer, cron) for producer in producers if (cron := producer.options.schedule)),
            *([retry_schedule(pipeline, pipeline.retry_schedule)] if pipeline.retry_schedule else []),
            maintenance_schedule(pipeline),
        ],
    )
