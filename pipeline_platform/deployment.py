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
from pipeline_platform.model.options import nearest
from pipeline_platform.model.partition import SOURCE
from pipeline_platform.model.pipeline import Pipeline, PipelineError
from pipeline_platform.source.contract import Source
from resources.acknowledger import AcknowledgerResource
from resources.lake import LakeIOManager
from resources.source import connector_of
from sensors.backlog import backlog_sensor
from sensors.producer import producer_sensor
from sensors.retry import retry_sensor
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
        PipelineError: Two pipelines have one name, or two producers one source, there is no resource for a source, or
            dead letters cannot be sent where a pipeline says, a source cannot be told early, or one never says in which
            partition a message is, and the pipeline goes by that.
    """
    check_together(pipelines, resources)
    for pipeline in pipelines:
        check_dead_letters(pipeline, resources)
        check_early_acks(pipeline, resources)
        check_partitions(pipeline, resources)
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


def check_dead_letters(pipeline: type[Pipeline], resources: Mapping[str, Any]) -> None:
    """Refuse a pipeline whose dead letters can be sent nowhere, or would come back to it.

    Raises:
        PipelineError: `dead_letters` names no resource, none that is a source with `send`, or a source of the pipeline.
    """
    key = pipeline.dead_letters
    if key is None:
        return
    own = [producer.source for producer in pipeline.producers_of().values()]
    connector = connector_of(resources.get(key))
    if key not in resources:
        meant = nearest(key, resources, 0.6)
        why = f"no resource has this key; {f'did you mean {meant!r}?' if meant else f'there is {sorted(resources)}'}"
    elif connector is None:
        why = "that resource is no source: make one of a connector by source_resource(...)"
    elif connector.send is Source.send:
        why = f"{connector.__name__} has no send(): name a source that takes messages"
    elif key in own or resources[key] in [resources[one] for one in own]:
        why = "the pipeline pulls from it, and would get its dead messages again: name another source"
    else:
        return
    raise PipelineError(f"{pipeline.__qualname__}.dead_letters is {key!r}: {why}")


def check_early_acks(pipeline: type[Pipeline], resources: Mapping[str, Any]) -> None:
    """Refuse `acks_immediately` where tasks cannot tell a source of single messages.

    Raises:
        PipelineError: A producer's source is settled by its run's own process, or by positions.
    """
    for name, producer in pipeline.producers_of().items() if pipeline.acks_immediately else ():
        connector = connector_of(resources[producer.source])
        if connector is None or (connector.in_tasks and connector.settles_by_id):
            continue
        option = f"producers[{name!r}].source" if name else "producer.source"
        why = "only the run's own process settles" if connector.settles_by_id else "takes only positions"
        raise PipelineError(
            f"{pipeline.__qualname__}.acks_immediately is True: {option} {producer.source!r} is a "
            f"{connector.__name__}, which {why}; leave it out, or pull from a source that leases messages"
        )


def check_partitions(pipeline: type[Pipeline], resources: Mapping[str, Any]) -> None:
    """Refuse `partition_by = "source"` where a source never says in which partition a message is.

    Raises:
        PipelineError: A producer's source is one.
    """
    options = {
        "processors": pipeline.processors,
        **{f"batchers[{key!r}]": one for key, one in pipeline.batchers.items()},
    }
    places = {f"{place}.partition_by": getattr(one, "partition_by", None) for place, one in options.items()}
    by_source = [place for place, one in {"partition_by": pipeline.partition_by, **places}.items() if one == SOURCE]
    for name, producer in pipeline.producers_of().items() if by_source else ():
        connector = connector_of(resource := resources[producer.source])
        given = {field: getattr(resource, field) for field in connector.model_fields} if connector else {}
        if connector and (why := connector.without_partitions(given)):
            option = f"producers[{name!r}].source" if name else "producer.source"
            raise PipelineError(
                f"{pipeline.__qualname__}.{by_source[0]} is {SOURCE!r}: {option} {producer.source!r} is a "
                f"{connector.__name__}, {why}, or partition by a function of the message"
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
            *([retry_sensor(pipeline, backfill)] if pipeline.retry else []),
        ],
        schedules=[
            *(pull_schedule(pipeline, pull, name) for name in producers),
            redrive_schedule(pipeline, backfill),
            maintenance_schedule(pipeline, maintenance),
        ],
    )
