"""Checks of a deployment before it is built: arguments, names in Dagster, options of sources, and places they read."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import dagster as dg

from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.partition import SOURCE
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.strict_options import PipelineError, did_you_mean, shown
from pipeline_platform.orchestration.resources.lake_resources import ControlResource, LakeResource
from pipeline_platform.orchestration.resources.sink_resources import sink_keys
from pipeline_platform.orchestration.resources.source_resources import AcknowledgerResource, connector_of, places_of
from pipeline_platform.orchestration.resources.spark_resource import SparkResource
from pipeline_platform.source.contract import Source

_KINDS: Mapping[str, type[Any]] = {
    "lake": LakeResource,
    "control": ControlResource,
    "spark": SparkResource,
    "acknowledger": AcknowledgerResource,
}
_JOBS = ("pull", "retry", "replay", "maintenance", "limits")
"""Suffixes of the names of a pipeline's jobs. Graphs, ops and jobs of a code location cannot share a name."""


def check_deployment(pipelines: Sequence[type[Pipeline]], resources: Mapping[str, Any]) -> None:
    """Refuse arguments of `platform_definitions` that are missing, have a wrong type, or do not fit together.

    Raises:
        PipelineError: Names the option or the argument, its value and the fix.
    """
    _check_given(pipelines, resources)
    _check_together(pipelines, resources)
    _check_names(pipelines)
    for pipeline in pipelines:
        _check_dead_letters(pipeline, resources)
        for producer in BoundProducer.all_of(pipeline):
            _check_source(producer, resources[producer.source])
    _check_sinks(pipelines, resources)
    _check_places(pipelines, resources)


def _check_given(pipelines: Sequence[type[Pipeline]], resources: Mapping[str, Any]) -> None:
    if isinstance(pipelines, type | str) or not isinstance(pipelines, Sequence):
        raise PipelineError(f"pipelines must be a list of pipeline classes, got {shown(pipelines)}. Use [Orders]")
    if not isinstance(resources, Mapping):
        raise PipelineError(f"resources must be a dict of resources by key, got a {type(resources).__name__}")
    for key, kind in _KINDS.items():
        if key not in resources and kind is not AcknowledgerResource:
            raise PipelineError(f"resources[{key!r}] is missing. Add {kind.__name__}(...)")
        if key in resources and not isinstance(resources[key], kind):
            given = type(resources[key]).__name__  # the value may be a secret
            raise PipelineError(f"resources[{key!r}] must be {kind.__name__}(...), got a value of type {given}")


def _check_names(pipelines: Sequence[type[Pipeline]]) -> None:
    """Refuse a pipeline whose name is the name of a job or an op of another pipeline."""
    for pipeline in pipelines:
        for other in pipelines:
            rest = pipeline.name.removeprefix(f"{other.name}_")
            if rest != pipeline.name and (rest in _JOBS or rest.startswith("_")):
                raise PipelineError(
                    f"{pipeline.__qualname__}.name is {pipeline.name!r}: {other.__qualname__} ({other.name!r}) has a "
                    "job or an op with that name. Rename one of the two pipelines"
                )


def _check_dead_letters(pipeline: type[Pipeline], resources: Mapping[str, Any]) -> None:
    """Refuse a pipeline whose dead letters cannot be sent, or would be delivered to it again."""
    key = pipeline.dead_letters
    if key is None:
        return
    own = [producer.source for producer in BoundProducer.all_of(pipeline)]
    connector = connector_of(resources.get(key))
    if key not in resources:
        why = f"no resource has this key. {did_you_mean(key, sorted(resources), 'keys')}"
    elif connector is None:
        why = "that resource is not a source. Make a resource of a connector with source_resource(...)"
    elif connector.send is Source.send:
        why = f"{connector.__name__} has no send(). Use a source that supports it"
    elif key in own or resources[key] in [resources[other] for other in own]:
        why = "the pipeline pulls from it, and would receive its dead messages again. Use another source"
    else:
        return
    raise PipelineError(f"{pipeline.__qualname__}.dead_letters is {key!r}: {why}")


def _check_sinks(pipelines: Sequence[type[Pipeline]], resources: Mapping[str, Any]) -> None:
    """Refuse a resource that is not a sink, and two batchers that would share a table of a sink."""
    owners: dict[tuple[str, str], str] = {}
    for pipeline in pipelines:
        for batcher, key in sink_keys(pipeline).items():
            option = f"batchers[{batcher!r}].sink"
            if key not in resources:
                hint = did_you_mean(key, sorted(resources), "keys")
                _refuse(pipeline, option, f"no resource has the key {key!r}. {hint}")
            if not hasattr(type(resources[key]), "sink_class"):
                kind = type(resources[key]).__name__
                why = f"must be the key of a sink, got {key!r}, a {kind}. Make a resource with sink_resource(...)"
                _refuse(pipeline, option, why)
            table = f"{pipeline.name}_{batcher}"  # also of `orders` and `eu_big`, and of `orders_eu` and `big`
            if other := owners.get((key, table)):
                fix = "Rename a batcher, or use another sink."
                why = f"the table {table} of {key!r} already has the rows of {other}. {fix}"
                _refuse(pipeline, option, why)
            owners[key, table] = f"{pipeline.__qualname__}.batchers[{batcher!r}]"


def _check_source(producer: BoundProducer, resource: Any) -> None:
    """Refuse a resource that is not a source, or a source that does not support an option of its pipeline."""
    pipeline, connector = producer.pipeline, connector_of(resource)
    if isinstance(resource, (*_KINDS.values(), dg.ConfigurableIOManager, str)):
        raise PipelineError(
            f"{pipeline.__qualname__}.{producer.option}.source is {producer.source!r}: that resource is a "
            f"{type(resource).__name__}, not a source. Make a resource of a connector with source_resource(...)"
        )
    name = getattr(resource, "name", producer.source)
    # Messages contain the name.
    if pipeline.producers and producer.options.only and type(name) is str and name != producer.source:
        raise PipelineError(
            f"{pipeline.__qualname__}.{producer.option}.only: needs a source with the name of its key, got the "
            f"source {producer.source!r} with the name {name!r}. Use {name!r} as the key, too."
        )
    if connector is None:
        return
    of_source = f"{producer.option}.source {producer.source!r} is a {connector.__name__}"
    if pipeline.acks_immediately and not (connector.in_tasks and connector.acknowledges_by_id):
        by_run = "only the run's own process can acknowledge"
        why = by_run if connector.acknowledges_by_id else "acknowledges whole receives only"
        raise PipelineError(
            f"{pipeline.__qualname__}.acks_immediately is True: {of_source}, which {why}. Remove the option, or pull "
            "from a source that leases messages"
        )
    options = {
        "partition_by": pipeline,
        "processors.partition_by": pipeline.processors,
        **{f"batchers[{key!r}].partition_by": batcher for key, batcher in pipeline.batchers.items()},
    }
    by_source = [option for option, of in options.items() if getattr(of, "partition_by", None) == SOURCE]
    given = {field: getattr(resource, field) for field in connector.model_fields}
    if by_source and (fix := connector.without_partitions(given)):
        raise PipelineError(
            f"{pipeline.__qualname__}.{by_source[0]} is {SOURCE!r}: {of_source}, {fix}, or partition by a function of "
            "the message"
        )


def _check_places(pipelines: Sequence[type[Pipeline]], resources: Mapping[str, Any]) -> None:
    """Refuse two sources that read the same queue, table or subscription: each would get a part of the messages.

    A source with an unset variable or an invalid option is skipped: it cannot be read anyway.
    """
    read: dict[str, tuple[type[Pipeline], str]] = {}
    for pipeline in pipelines:
        for producer in BoundProducer.all_of(pipeline):
            places = places_of(resources[producer.source])
            for place in places:
                if place in read:
                    other, key = read[place]
                    raise PipelineError(
                        f"{pipeline.__qualname__}.{producer.option}.source is {producer.source!r}: it reads {place}, "
                        f"and so does {key!r}, the source of {other.__qualname__}. Each would get a part of the "
                        "messages. Give each pipeline its own queue, or handle both kinds of messages in one "
                        "pipeline, by batcher"
                    )
            read |= dict.fromkeys(places, (pipeline, producer.source))
    for pipeline in pipelines:
        if pipeline.dead_letters is None:
            continue
        for place in places_of(resources[pipeline.dead_letters]):
            if place in read and read[place][0] is pipeline:
                raise PipelineError(
                    f"{pipeline.__qualname__}.dead_letters is {pipeline.dead_letters!r}: it writes to {place}, from "
                    "which the pipeline pulls, and would receive its dead messages again. Use another source"
                )


def _check_together(pipelines: Sequence[type[Any]], resources: Mapping[str, Any]) -> None:
    names: dict[str, type[Any]] = {}
    pulling: list[BoundProducer] = []
    for pipeline in pipelines:
        if not isinstance(pipeline, type):
            kind = type(pipeline).__qualname__
            raise PipelineError(f"pipelines: must contain classes, got an instance of {kind}. Use the class itself.")
        if not hasattr(pipeline, "name"):
            kind = pipeline.__qualname__
            raise PipelineError(f"pipelines: must not contain an abstract base, got {kind}. Use a subclass of it.")
        for added in BoundProducer.all_of(pipeline):
            if added.source not in resources:
                hint = did_you_mean(added.source, sorted(resources), "keys")
                _refuse(pipeline, f"{added.option}.source", f"no resource has the key {added.source!r}. {hint}")
            if other := names.get(pipeline.name):
                why = f"must be unique, got {pipeline.name!r}, the name of {other.__qualname__}. Rename one of them."
                _refuse(pipeline, "name", why)
            for earlier in pulling:
                _check_apart(added, earlier, resources)
            pulling.append(added)
        names[pipeline.name] = pipeline


def _check_apart(added: BoundProducer, other: BoundProducer, resources: Mapping[str, Any]) -> None:
    source, theirs, option = resources[added.source], resources[other.source], f"{added.option}.source"
    same = other.pipeline is added.pipeline
    owner = f"{other.pipeline.__qualname__}{f'.{other.option}' if same or other.pipeline.producers else ''}"
    if added.source == other.source or source == theirs:
        what = "is also" if added.source == other.source else f"is equal to {other.source!r},"
        why = (
            f"{added.source!r} {what} the source of {owner}. Each message would reach only one of them: "
            "use two sources, or one pipeline with two batchers."
        )
        _refuse(added.pipeline, option, why)
    if getattr(source, "name", None) == getattr(theirs, "name", ""):
        why = (
            f"{added.source!r} has the name {source.name!r}, like the source of {owner}. "
            "Rename one of them: messages and log positions are stored by the name of their source."
        )
        _refuse(added.pipeline, option, why)
    if added.prefix == other.prefix:
        why = f"its sensors would be called {added.prefix}_..., like the sensors of {owner}. Rename one of them."
        _refuse(added.pipeline, added.option.partition("[")[0], why)


def _refuse(cls: type[Any], option: str, why: str) -> NoReturn:
    raise PipelineError(f"{cls.__qualname__}.{option}: {why}")
