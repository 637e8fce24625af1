"""Checks of a pipeline's class when it is built: its options, lanes, batchers, and the name of each attribute."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, NoReturn

from pipeline_platform.model.blocks import BLOCK_TYPES, ROUTING, annotated, name_of
from pipeline_platform.model.columns.casts import ColumnError
from pipeline_platform.model.columns.fields import ModelClass
from pipeline_platform.model.columns.schema import arrow_schema
from pipeline_platform.model.message import SYSTEM_COLUMNS
from pipeline_platform.model.options import (
    Batcher,
    Processors,
    Producer,
    RateLimiting,
    Retention,
    Splitter,
    TableBatcher,
)
from pipeline_platform.model.partition import SOURCE
from pipeline_platform.model.retry import Retry
from pipeline_platform.model.strict_options import (
    NAME,
    PipelineError,
    Requirement,
    nearest,
    requirement_of,
    requirements_of,
    shown,
)
from pipeline_platform.model.windows import most_a_day

_Class = type[Any]
"""A subclass of `Pipeline` whose attributes are not checked yet."""
_FIRST_YEAR, _WINDOWS = 1970, 1_000_000
"""Bounds of `first_window`: Dagster lists all partitions on the page of an asset, which hangs beyond them."""
RESERVED_TABLES = frozenset({"messages", "outcomes", "failed"})
"""Tables of every pipeline, whose names a batcher cannot have."""


def check_class(cls: _Class, base: _Class) -> None:
    """Raise a `PipelineError` if a class is not a valid pipeline; `base` is `Pipeline` itself."""
    requirements, callbacks = requirements_of(base), _callbacks(base)
    check_names(cls, base, list(requirements), callbacks)
    for option, requirement in requirements.items():
        if not requirement.is_valid(value := getattr(cls, option, None)):
            _refuse(cls, option, requirement.error(value))
    _check_first_window(cls)
    _check_producers(cls)
    for callback in callbacks:
        if _is_written(cls, base, callback):
            check_shape(cls, callback, tuple(inspect.signature(vars(base)[callback]).parameters)[1:])
    if cls.__init__ is not object.__init__:
        check_shape(cls, "__init__", ())
    _check_lane(cls, base)
    _check_batchers(cls, base)
    _check_order(cls)
    _check_hold(cls, base)
    _check_rescue(cls, base)
    for function in cls.retry.functions if cls.retry is not None else ():
        check_called(f"{cls.__qualname__}.retry", function, ("error",))


def _refuse(cls: _Class, option: str, why: str) -> NoReturn:
    raise PipelineError(f"{cls.__qualname__}.{option}: {why}")


def _callbacks(base: _Class) -> list[str]:
    return [name for name, value in vars(base).items() if inspect.isfunction(value) and not name.startswith("_")]


def _is_written(cls: _Class, base: _Class, callback: str) -> bool:
    """Whether the class or one of its bases overrides this callback."""
    return inspect.getattr_static(cls, callback) is not vars(base)[callback]


def _check_first_window(cls: _Class) -> None:
    """Refuse a first window that makes more partitions than Dagster can list."""
    if (first := cls.first_window) is None:
        return
    if first.year < _FIRST_YEAR:
        requirement = Requirement(f"in {_FIRST_YEAR} or later", "Use the time of the oldest message.")
        _refuse(cls, "first_window", requirement.error(first))
    windows = (datetime.now(UTC) - first).days * most_a_day(cls.window_cron)
    if windows > _WINDOWS:
        why = f"must give at most {_WINDOWS:,} windows with window_cron {cls.window_cron!r}, got {shown(first)}."
        _refuse(cls, "first_window", f"{why} Use a later time, or longer windows.")


def _check_producers(cls: _Class) -> None:
    has_one = getattr(cls, "producer", None) is not None
    if has_one and cls.producers:
        fix = "Remove one of them, or unset an inherited one by producer = None or producers = {}."
        raise PipelineError(f"{cls.__qualname__}: must have either producer or producers, got both. {fix}")
    if not has_one and not cls.producers:
        fix = "Set it, or set producers to a dict of producers by name."
        _refuse(cls, "producer", requirement_of(Producer)._replace(fix=fix).error(None))
    for name, producer in cls.producers.items():
        if not NAME.is_valid(name):
            requirement = NAME._replace(fix="Change it: a sensor and limits are named after it.")
            _refuse(cls, "producers", f"a name {requirement.error(name)}")
        if not isinstance(producer, Producer):
            _refuse(cls, f"producers[{name!r}]", requirement_of(Producer).error(producer))


def _check_lane(cls: _Class, base: _Class) -> None:
    if _is_written(cls, base, "handle_message") == (is_lane := _is_written(cls, base, "handle_messages")):
        found = "both" if is_lane else "neither"
        why = f"must have either handle_message or handle_messages, got {found}. Write one of them."
        raise PipelineError(f"{cls.__qualname__}: {why}")
    if not is_lane:
        return
    kind = annotated(cls.handle_messages)
    if kind is not None and (name := name_of(kind)) not in {*BLOCK_TYPES, "pyspark.DataFrame"}:
        why = f"must take a polars.DataFrame, a pyarrow.Table or Spark's DataFrame, got {name}. Correct the annotation."
        _refuse(cls, "handle_messages", why)
    why = "is never called in a pipeline with handle_messages. Move its code there, or write handle_message instead."
    for callback in ("transform", "prepare_messages") if cls.uses_columns() else ("transform",):
        if _is_written(cls, base, callback):
            _refuse(cls, callback, why)
    if (threads := cls.processors.threads) > 1:
        requirement = Requirement("1 in a pipeline with handle_messages", "Remove it, or write handle_message instead.")
        _refuse(cls, "processors.threads", requirement.error(threads))
    if cls.uses_columns():
        timeout, timed = cls.processors.message_timeout, ("handle_failed", "acknowledge")
        has_only = any(producer.only for producer in cls.producers.values() or (cls.producer,))
        if timeout is not None and not has_only and not any(_is_written(cls, base, callback) for callback in timed):
            must_be = "None in the Spark lane without only, handle_failed and acknowledge"
            requirement = Requirement(must_be, "Remove it.")
            _refuse(cls, "processors.message_timeout", requirement.error(timeout))
        if cls.processors.rescue:
            requirement = Requirement("False in the Spark lane", "Remove it, or write handle_message instead.")
            _refuse(cls, "processors.rescue", requirement.error(True))


def _check_rescue(cls: _Class, base: _Class) -> None:
    rescuing = {f"batchers[{name!r}].rescue": options for name, options in cls.batchers.items()}
    for path, options in {"processors.rescue": cls.processors, **rescuing}.items():
        if getattr(options, "rescue", False) and not _is_written(cls, base, "handle_failed"):
            requirement = Requirement("False without the callback handle_failed", "Write handle_failed, or remove it.")
            _refuse(cls, path, requirement.error(True))


def _check_batchers(cls: _Class, base: _Class) -> None:
    for batcher, options in cls.batchers.items():
        key = f"batchers[{batcher!r}]"
        if not NAME.is_valid(batcher) or batcher in RESERVED_TABLES:
            must_be = f"{NAME.must_be}, and not {', '.join(sorted(RESERVED_TABLES))}"
            requirement = Requirement(must_be, "Change it: a table is named after it.")
            _refuse(cls, "batchers", f"a name {requirement.error(batcher)}")
        if not isinstance(options, Batcher | TableBatcher):
            _refuse(cls, key, Requirement("a Batcher(...) or a TableBatcher(schema=...)").error(options))
        model = options.table_schema
        if model is not None and (misfit := _unfit(model, columns=_is_written(cls, base, "handle_messages"))):
            _refuse(cls, f"{key}.schema", misfit)
        if isinstance(options, Batcher) and not _is_written(cls, base, "handle_batch"):
            why = "a Batcher(...) requires the callback handle_batch. Write it, or use TableBatcher(schema=...)."
            _refuse(cls, key, why)
        if isinstance(options, Batcher) and isinstance(options.batch_size, Splitter):
            check_called(f"{cls.__qualname__}.{key}.batch_size.step", options.batch_size.step, ("message", "acc"))
    # An inherited handle_batch is allowed: it may serve other subclasses of the base.
    if "handle_batch" in vars(cls) and not any(isinstance(options, Batcher) for options in cls.batchers.values()):
        why = "is never called, because no batcher is a Batcher(...). Remove it, or use a Batcher(...)."
        _refuse(cls, "handle_batch", why)


def _check_order(cls: _Class) -> None:
    if cls.uses_columns() and cls.partitioning() is not None:
        option = "partition_by" if cls.processors.partition_by is None else "processors.partition_by"
        must_be = "None in the Spark lane, where messages have no order"
        requirement = Requirement(must_be, "Set it on a Batcher(...), or write handle_message.")
        _refuse(cls, option, requirement.error(cls.partitioning()))
    if not cls.takes_turns(leases_partitions=True):
        return
    for name, producer in cls.producers.items() or (("", cls.producer),):
        if producer.max_runs > 1:
            must_be = "1 if partition_by is a function, because runs then take turns"
            requirement = Requirement(must_be, f"Remove it, or use partition_by={SOURCE!r}.")
            option = f"producers[{name!r}]" if name else "producer"
            _refuse(cls, f"{option}.max_runs", requirement.error(producer.max_runs))


def _check_hold(cls: _Class, base: _Class) -> None:
    if not cls.holds_partitions():
        return
    option, held = "processors.on_failure", cls.processors.on_failure
    if not _is_written(cls, base, "handle_message"):
        requirement = Requirement(
            "'continue' in a pipeline with handle_messages", "Remove it, or write handle_message."
        )
        _refuse(cls, option, requirement.error(held))
    for name, value in (("partition_by", cls.partitioning()), ("retry", cls.retry)):
        if value is None:
            requirement = Requirement(f"'continue' without {name}", f"Set {name}, or remove on_failure.")
            _refuse(cls, option, requirement.error(held))
    for batcher, options in cls.batchers.items():
        if isinstance(options, Batcher) and cls.partitioning(batcher) != cls.partitioning():
            must_be = f"{shown(cls.partitioning())}, as for handle_message, if processors.on_failure is {held!r}"
            requirement = Requirement(must_be, "Set partition_by on the pipeline only.")
            _refuse(cls, f"batchers[{batcher!r}].partition_by", requirement.error(cls.partitioning(batcher)))


def _unfit(model: ModelClass, *, columns: bool) -> str | None:
    """Return the reason why a model cannot be the schema of a table; None if it can."""
    try:
        # Spark and Delta tables ignore the case of column names.
        folded = {name.lower() for name in arrow_schema(model).names}
    except ColumnError as error:
        return str(error)
    if taken := sorted(folded & set(SYSTEM_COLUMNS)):
        return f"{model.__name__} has the fields {taken}, which are columns of the platform. {_rename(taken)}"
    if columns and (routes := sorted(folded & {"position", *ROUTING})):
        return f"{model.__name__} has the fields {routes}, which handle_messages uses to route rows. {_rename(routes)}"
    return None


def _rename(fields: Sequence[str]) -> str:
    """Return how to rename a field whose name in the payload stays the same."""
    name = fields[0]
    return f"Rename them, for example {name}_ = Field(validation_alias={name!r}), or field(name={name!r}) of msgspec."


_WITHIN = {
    field.alias or name: model.__name__
    for model in (Retry, Retention, TableBatcher, Batcher, RateLimiting, Processors, Producer)
    for name, field in model.model_fields.items()
}
"""Options of other options, and the class that each belongs to: as attributes of a pipeline they have no effect."""
_FORMER: Mapping[str, str] = {"fail_run_on": "max_failed_share", "redrive": "retry_schedule"}
"""Options that resemble their names of release 0.2 in nothing."""
_DEFERRED: Mapping[Callable[[Any], bool], str] = {
    inspect.iscoroutinefunction: "an async function",
    inspect.isasyncgenfunction: "an async generator",
    inspect.isgeneratorfunction: "a generator",
}
"""Functions that do not return their result directly."""


def check_names(cls: _Class, base: _Class, options: Sequence[str], callbacks: Sequence[str]) -> None:
    """Refuse attributes whose names resemble an option or a callback; `base` is `Pipeline` itself."""
    classes = [parent for parent in cls.__mro__ if parent not in base.__mro__]
    for owner, name, value in ((parent, *item) for parent in classes for item in vars(parent).items()):
        if name.startswith("_") or name in options or name in callbacks:
            continue
        rename = f"or rename your attribute to _{name}."
        if name in _WITHIN and not callable(value) and not hasattr(type(value), "__get__"):
            why = f"is an option of {_WITHIN[name]}(...), not of the class. Set it there, {rename}"
        elif meant := _meant_within(name, value):
            why = f"is not an option. Did you mean {meant!r} of {_WITHIN[meant]}(...)? Set it there, {rename}"
        elif name in vars(base):
            why = "overrides a method of Pipeline that is not a callback. Rename yours."
        elif meant := _FORMER.get(name) or nearest(name, [*options, *callbacks]):
            kind = "option" if meant in options else "callback"
            why = f"is not an option or callback. Did you mean the {kind} {meant!r}? Use that name, {rename}"
        else:
            continue
        raise PipelineError(f"{owner.__qualname__}.{name}: {why}")


def _meant_within(name: str, value: object) -> str | None:
    """Return the option of other options that an int or a timedelta is meant for; None for other values."""
    meant = nearest(name, [option for option in _WITHIN if "_" in option], 0.9)
    is_meant = meant and type(value) in (int, timedelta) and name.count("_") <= meant.count("_")
    return meant if is_meant else None


def check_shape(cls: _Class, name: str, arguments: Sequence[str]) -> None:
    """Refuse a callback that is not a method with these arguments, or does not return its result directly."""
    path, written = f"{cls.__qualname__}.{name}", inspect.getattr_static(cls, name)
    fix = f"Write def {name}({', '.join(('self', *arguments))})."
    if isinstance(written, property | cached_property):
        getter = written.fget if isinstance(written, property) else written.func
        if getter and _misfit(getter, ["self"]):
            raise PipelineError(f"{path}: must be a method, got a property. {fix}")
        return  # only an instance can return its value
    try:
        # Bind it to an instance whose __init__ did not run: no code of the author runs here.
        called = written.__get__(object.__new__(cls), cls) if hasattr(type(written), "__get__") else written
    except Exception:  # a custom descriptor that needs a real instance
        return
    if not callable(called):
        raise PipelineError(f"{path}: must be a method, got {shown(called)}. {fix}")
    check_called(path, called, arguments)


def check_called(path: str, called: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Refuse a function that cannot be called with these arguments, or does not return its result directly."""
    of = called if inspect.isroutine(called) else type(called).__call__
    for is_kind, kind in _DEFERRED.items():
        if is_kind(called) or is_kind(of):
            fix = "Write a plain function, without async and yield."
            raise PipelineError(f"{path}: must return its result directly, got {kind}. {fix}")
    if misfit := _misfit(called, arguments):
        wanted = f"be callable with ({', '.join(arguments)})" if arguments else "be callable without arguments"
        raise PipelineError(f"{path}: must {wanted}, got the parameters {misfit}. Change its signature.")


def _misfit(called: Callable[..., Any], arguments: Sequence[str]) -> str | None:
    """Return the parameters of a function that cannot be called with these arguments; None if it can."""
    try:
        # The outermost function is called; a wrapped function may get more arguments.
        signature = inspect.signature(called, follow_wrapped=False)
    except ValueError:  # a function in C without a signature
        return None
    try:
        signature.bind(*arguments)
    except TypeError:
        return str(signature)
    return None
