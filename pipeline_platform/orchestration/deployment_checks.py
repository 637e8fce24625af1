"""Checks of a deployment before it is built: arguments, names in Dagster, and places that sources read."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import dagster as dg

from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.strict_options import PipelineError, did_you_mean, shown
from pipeline_platform.orchestration.resources.lake_resources import ControlResource, LakeResource
from pipeline_platform.orchestration.resources.source_resources import AcknowledgerResource, places_of
from pipeline_platform.orchestration.resources.spark_resource import SparkResource

_KINDS: Mapping[str, type[Any]] = {
    "lake": LakeResource,
    "control": ControlResource,
    "spark": SparkResource,
    "acknowledger": AcknowledgerResource,
}
_JOBS = ("pull", "retry", "replay", "maintenance", "limits")
"""Suffixes of the names of a pipeline's jobs. Graphs, ops and jobs of a code location cannot share a name."""


def check_given(pipelines: Sequence[type[Pipeline]], resources: Mapping[str, Any]) -> None:
    """Refuse arguments of `platform_definitions` that have a wrong type or are missing.

    Raises:
        PipelineError: Names the argument, its value and the fix.
    """
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
    for pipeline in pipelines:
        for producer in BoundProducer.all_of(pipeline) if hasattr(pipeline, "producers") else ():
            resource = resources.get(producer.source)
            if isinstance(resource, (*_KINDS.values(), dg.ConfigurableIOManager, str)):
                raise PipelineError(
                    f"{pipeline.__qualname__}.{producer.option}.source is {producer.source!r}: that resource is a "
                    f"{type(resource).__name__}, not a source. Make a resource of a connector with source_resource(...)"
                )


def check_names(pipelines: Sequence[type[Pipeline]]) -> None:
    """Refuse a pipeline whose name is the name of a job or an op of another pipeline."""
    for pipeline in pipelines:
        for other in pipelines:
            rest = pipeline.name.removeprefix(f"{other.name}_")
            if rest != pipeline.name and (rest in _JOBS or rest.startswith("_")):
                raise PipelineError(
                    f"{pipeline.__qualname__}.name is {pipeline.name!r}: {other.__qualname__} ({other.name!r}) has a "
                    "job or an op with that name. Rename one of the two pipelines"
                )


def check_places(pipelines: Sequence[type[Pipeline]], resources: Mapping[str, Any]) -> None:
    """Refuse two sources that read the same queue, table or subscription: each would get a part of the messages.

    A source with an unset variable or an invalid option is skipped: it cannot be read anyway.
    """
    read: dict[str, tuple[type[Pipeline], str]] = {}
    for pipeline in pipelines:
        for producer in BoundProducer.all_of(pipeline):
            for place in places_of(resources[producer.source]):
                if place in read:
                    other, key = read[place]
                    raise PipelineError(
                        f"{pipeline.__qualname__}.{producer.option}.source is {producer.source!r}: it reads {place}, "
                        f"and so does {key!r}, the source of {other.__qualname__}. Each would get a part of the "
                        "messages. Give each pipeline its own queue, or handle both kinds of messages in one "
                        "pipeline, by batcher"
                    )
            read |= dict.fromkeys(places_of(resources[producer.source]), (pipeline, producer.source))
    for pipeline in pipelines:
        if pipeline.dead_letters is None:
            continue
        for place in places_of(resources[pipeline.dead_letters]):
            if place in read and read[place][0] is pipeline:
                raise PipelineError(
                    f"{pipeline.__qualname__}.dead_letters is {pipeline.dead_letters!r}: it writes to {place}, from "
                    "which the pipeline pulls, and would receive its dead messages again. Use another source"
                )


def check_together(pipelines: Sequence[type[Any]], resources: Mapping[str, Any]) -> None:
    """Raise a `PipelineError` if pipelines, or producers of one pipeline, conflict with each other."""
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
    """Raise a `PipelineError` if two producers share a source, the name of a source, or the names of sensors."""
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
