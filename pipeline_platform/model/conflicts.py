"""Conflicts between the pipelines of a deployment: shared sources, names and sensors."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.strict_options import PipelineError, did_you_mean

_Class = type[Any]


def check_together(pipelines: Sequence[_Class], resources: Mapping[str, Any]) -> None:
    """Raise a `PipelineError` if pipelines, or producers of one pipeline, conflict with each other."""
    names: dict[str, _Class] = {}
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


def _refuse(cls: _Class, option: str, why: str) -> NoReturn:
    raise PipelineError(f"{cls.__qualname__}.{option}: {why}")
