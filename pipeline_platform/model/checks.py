"""What a pipeline's class must be like, asked when it is built, and what pipelines must be like together."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from pydantic import BaseModel

from pipeline_platform.model import cron
from pipeline_platform.model.options import (
    Batcher,
    Options,
    PipelineError,
    Processors,
    Producer,
    RateLimiting,
    Retention,
    TableBatcher,
    nearest,
    shown,
)
from pipeline_platform.model.schema import ColumnError, arrow_schema

_Class = type[Any]
"""A pipeline's, which is checked while it is built: nothing is known of its attributes yet."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
_WITHIN = {
    field.alias or name: model.__name__
    for model in (Retention, TableBatcher, Batcher, RateLimiting, Processors, Producer)
    for name, field in model.model_fields.items()
}
"""Options within others: as attributes of the class they would do nothing."""
_OWNER = re.compile(r"team:.+|[\w.%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,7}")  # Dagster's own rule
RESERVED_TABLES = frozenset({"messages", "outcomes", "failed"})
"""Tables that every pipeline has; no batcher can be named so."""
SYSTEM_COLUMNS = ("source", "message_id", "attempt", "batch_key", "batch_id", "receive_id", "window")
"""Columns that the platform adds to a batcher's table; no field of its model can be named so."""


def check_class(cls: _Class, base: _Class) -> None:
    """Refuse a class that cannot work, or not as its author means it.

    Args:
        cls: The class, as it was just built.
        base: `Pipeline` itself.

    Raises:
        PipelineError: An attribute's name is like that of an option or callback, or shadows a method of the
            platform's; an option or a callback is not what it has to be, or one is never called.
    """
    _check_names(cls, base)
    _check_options(cls)
    for callback in _callbacks(base):
        if _is_written(cls, base, callback):
            _check_shape(cls, callback, _parameters(base, callback))
    if cls.__init__ is not object.__init__:
        _check_shape(cls, "__init__", ())
    _check_lane(cls, base)
    _check_batchers(cls, base)
    _check_times(cls)
    _check_owners(cls)


def check_together(pipelines: Sequence[_Class], resources: Collection[str]) -> None:
    """Refuse pipelines that cannot be defined side by side.

    Args:
        pipelines: All of a deployment.
        resources: The keys of its resources.

    Raises:
        PipelineError: Two have one name or one source, or there is no resource for a source.
    """
    names: dict[str, _Class] = {}
    sources: dict[str, _Class] = {}
    for pipeline in pipelines:
        source = pipeline.producer.source
        if source not in resources:
            meant = nearest(source, resources, 0.6)
            hint = f"did you mean {meant!r}?" if meant else f"there is {', '.join(sorted(resources))}"
            _refuse(pipeline, "producer.source", source, f"no resource has this key; {hint}")
        if (other := names.setdefault(pipeline.name, pipeline)) is not pipeline or pipelines.count(pipeline) > 1:
            why = f"{other.__qualname__} has this name too, and tables and limits are by name: rename one"
            _refuse(pipeline, "name", pipeline.name, why)
        if (other := sources.setdefault(source, pipeline)) is not pipeline:
            why = (
                f"{other.__qualname__} pulls from it too, and each message would come to one of the two: "
                "give each a source of its own, or handle both kinds in one pipeline, by batcher"
            )
            _refuse(pipeline, "producer.source", source, why)


def _refuse(cls: _Class, option: str, value: object, why: str) -> NoReturn:
    raise PipelineError(f"{cls.__qualname__}.{option} is {shown(value)}: {why}")


def _callbacks(base: _Class) -> list[str]:
    return [name for name, value in vars(base).items() if inspect.isfunction(value) and not name.startswith("_")]


def _parameters(base: _Class, callback: str) -> tuple[str, ...]:
    return tuple(inspect.signature(vars(base)[callback]).parameters)[1:]


def _is_written(cls: _Class, base: _Class, callback: str) -> bool:
    """Whether the author wrote this callback, here or in a base."""
    return inspect.getattr_static(cls, callback) is not vars(base)[callback]


def _check_names(cls: _Class, base: _Class) -> None:
    """Refuse names that are meant to be an option's or a callback's and are not."""
    options, callbacks = list(inspect.get_annotations(base)), _callbacks(base)
    platform = {name for name in vars(base) if not name.startswith("_")} - {*options, *callbacks}
    for owner in cls.__mro__:
        if owner in base.__mro__:
            continue
        for name, value in vars(owner).items():
            if name.startswith("_") or name in options or name in callbacks:
                continue
            if name in _WITHIN and not callable(value) and not hasattr(type(value), "__get__"):
                why = f"is an option of {_WITHIN[name]}(...): give it there, or call one of your own _{name}"
                raise PipelineError(f"{owner.__qualname__}.{name} {why}")
            if name in platform:
                why = "is a method of the platform's own: give yours another name"
                raise PipelineError(f"{owner.__qualname__}.{name} {why}")
            if meant := nearest(name, [*options, *callbacks]):
                kind = "option" if meant in options else "callback"
                raise PipelineError(
                    f"{owner.__qualname__}.{name} is no option or callback; did you mean the {kind} {meant!r}? "
                    f"If it is your own, give it a name less like that one, or call it _{name}"
                )


def _check_options(cls: _Class) -> None:
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        why = "lower-case letters, digits and _ only, beginning with a letter: it names tables and assets"
        _refuse(cls, "name", name, why)
    models: dict[str, type[Options]] = {"producer": Producer, "processors": Processors, "retention": Retention}
    for option, model in models.items():
        if not isinstance(value := getattr(cls, option, None), model):
            _refuse(cls, option, value, f"it must be a {model.__name__}(...)")
    if cls.context is not None and not isinstance(cls.context, BaseModel):
        why = "it must be an instance of a pydantic model, whose fields a run can override"
        _refuse(cls, "context", cls.context, why)
    red: object = cls.fail_run_on
    is_share = isinstance(red, int | float) and not isinstance(red, bool) and 0 <= red <= 1
    if red not in ("never", "any") and not is_share:
        _refuse(cls, "fail_run_on", red, "it is 'never', 'any', or a share of failures from 0.0 to 1.0")


def _check_shape(cls: _Class, name: str, arguments: Sequence[str]) -> None:
    """Refuse what cannot be called with these arguments, or would answer with a promise of a result."""
    path, written = f"{cls.__qualname__}.{name}", inspect.getattr_static(cls, name)
    getter = getattr(written, "fget", None) if isinstance(written, property) else getattr(written, "func", None)
    if isinstance(written, property | cached_property):
        if getter and _misfit(getter, ["self"]):
            raise PipelineError(f"{path} is a property: write a plain method, def {name}(self, {', '.join(arguments)})")
        return  # what it gives, only an instance can tell
    try:
        # As an instance has it, but one that no code of the author's made.
        called = written.__get__(object.__new__(cls), cls) if hasattr(type(written), "__get__") else written
    except Exception:  # a descriptor of the author's own, which wants a real one
        return
    if not callable(called):
        raise PipelineError(f"{path} is {shown(called)}: it must be a method, def {name}(self, {', '.join(arguments)})")
    of = called if inspect.isroutine(called) else type(called).__call__
    for is_kind, kind in _PROMISES.items():
        if is_kind(called) or is_kind(of):
            raise PipelineError(f"{path} is {kind}: it must be a plain method, which returns its result itself")
    if misfit := _misfit(called, arguments):
        wanted = f"it is called as {name}({', '.join(arguments)})" if arguments else "the platform gives it none"
        raise PipelineError(f"{path} takes {misfit}: {wanted}")


def _misfit(called: Callable[..., Any], arguments: Sequence[str]) -> str | None:
    """The parameters of what cannot be called with so many arguments; None where it can."""
    try:
        # The outermost function is what is called; the one that it wraps may be given more.
        signature = inspect.signature(called, follow_wrapped=False)
        signature.bind(*arguments)
    except TypeError:
        return str(signature)
    except ValueError:  # of something in C that does not tell
        return None
    return None


_PROMISES: Mapping[Callable[[Any], bool], str] = {
    inspect.iscoroutinefunction: "async",
    inspect.isasyncgenfunction: "an async generator",
    inspect.isgeneratorfunction: "a generator",
}


def _check_lane(cls: _Class, base: _Class) -> None:
    one = _is_written(cls, base, "handle_message")
    if one == cls.uses_columns():
        _refuse(cls, "handle_message", "both" if one else None, "write either handle_message or handle_messages")
    if cls.uses_columns():
        for callback in ("transform", "prepare_messages"):
            if _is_written(cls, base, callback):
                why = "is never called beside handle_messages: do it there, or write handle_message instead"
                raise PipelineError(f"{cls.__qualname__}.{callback} {why}")


def _check_batchers(cls: _Class, base: _Class) -> None:
    if not isinstance(cls.batchers, Mapping):
        _refuse(cls, "batchers", cls.batchers, "it must be a dict of Batcher(...) and TableBatcher(schema=...) by name")
    for batcher, options in cls.batchers.items():
        key = f"batchers[{batcher!r}]"
        if not isinstance(batcher, str) or not _NAME.fullmatch(batcher) or batcher in RESERVED_TABLES:
            why = f"not the name of a batcher: [a-z][a-z0-9_]*, and none of {sorted(RESERVED_TABLES)}"
            _refuse(cls, "batchers", batcher, why)
        if not isinstance(options, Batcher | TableBatcher):
            _refuse(cls, key, options, "it must be a Batcher(...) or a TableBatcher(schema=...)")
        if options.table_schema is not None and (wrong := _unfit(options.table_schema)):
            _refuse(cls, f"{key}.schema", options.table_schema.__name__, wrong)
        if options.table_schema is not None and cls.uses_columns() and (meant := _routes(options.table_schema)):
            why = f"in handle_messages the columns {meant} say where a row goes: give these fields other names"
            _refuse(cls, f"{key}.schema", options.table_schema.__name__, why)
        if isinstance(options, Batcher) and not _is_written(cls, base, "handle_batch"):
            _refuse(cls, key, "Batcher", "the class has no handle_batch; write one, or use TableBatcher")
    # One that it inherits may be for others who share the base.
    if "handle_batch" in vars(cls) and not any(isinstance(options, Batcher) for options in cls.batchers.values()):
        why = "is never called: no batcher is a Batcher(...), and a TableBatcher has no callback"
        raise PipelineError(f"{cls.__qualname__}.handle_batch {why}")


def _check_times(cls: _Class) -> None:
    if not cron.is_cron(cls.window_cron):
        _refuse(cls, "window_cron", cls.window_cron, cron.WAY_OUT)
    if cls.redrive is not None and not cron.is_cron(cls.redrive):
        _refuse(cls, "redrive", cls.redrive, f"{cron.WAY_OUT}, or leave it out")
    first: object = cls.first_window
    if not isinstance(first, datetime) or first.utcoffset() is None:
        _refuse(cls, "first_window", first, "it must be a time with its zone: datetime(2026, 1, 1, tzinfo=UTC)")


def _check_owners(cls: _Class) -> None:
    if isinstance(cls.owners, str) or not isinstance(cls.owners, Sequence):
        _refuse(cls, "owners", cls.owners, "it must be a tuple of owners, ('team:data',)")
    for owner in cls.owners:
        if not isinstance(owner, str) or not _OWNER.fullmatch(owner):
            _refuse(cls, "owners", owner, "an owner is an e-mail address or 'team:<name>'")


def _routes(model: type[BaseModel]) -> list[str]:
    """The fields of a model that mean something else as columns of the fast lane."""
    return sorted({"position", "batcher", "status", "reason"} & {name.lower() for name in arrow_schema(model).names})


def _unfit(model: type[BaseModel]) -> str | None:
    """Why a model cannot be a table, or None."""
    try:
        names = arrow_schema(model).names
    except ColumnError as error:
        return str(error)
    # Spark, and Delta tables with it, does not tell columns apart by case.
    folded = [name.lower() for name in names]
    if taken := sorted(set(folded) & set(SYSTEM_COLUMNS)):
        return f"the platform adds columns {taken}: rename them"
    if twice := sorted(name for name in set(folded) if folded.count(name) > 1):
        return f"the fields {twice} differ in nothing but case, which tables do not tell apart: rename them"
    return None
