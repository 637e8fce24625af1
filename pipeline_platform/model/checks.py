"""Checks of a pipeline's class when it is built."""

import inspect
from datetime import UTC, datetime
from typing import Any, NoReturn

from pipeline_platform.model import cron
from pipeline_platform.model.attribute_checks import check_called, check_names, check_shape
from pipeline_platform.model.blocks import BLOCK_TYPES, ROUTING, annotated, name_of
from pipeline_platform.model.casts import ColumnError
from pipeline_platform.model.fields import ModelClass
from pipeline_platform.model.message import SYSTEM_COLUMNS
from pipeline_platform.model.option_types import NAME, requirement_of, requirements_of
from pipeline_platform.model.options import Batcher, Producer, Splitter, TableBatcher
from pipeline_platform.model.partition import SOURCE
from pipeline_platform.model.schema import arrow_schema
from pipeline_platform.model.strict_options import PipelineError, Requirement, shown

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
    _check_rescue(cls, base)


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
    windows = (datetime.now(UTC) - first).days * cron.most_a_day(cls.window_cron)
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
        if timeout is not None and not any(_is_written(cls, base, callback) for callback in timed):
            requirement = Requirement("None in the Spark lane without handle_failed and acknowledge", "Remove it.")
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


def _unfit(model: ModelClass, *, columns: bool) -> str | None:
    """Return the reason why a model cannot be the schema of a table; None if it can."""
    try:
        # Spark and Delta tables ignore the case of column names.
        folded = {name.lower() for name in arrow_schema(model).names}
    except ColumnError as error:
        return str(error)
    if taken := sorted(folded & set(SYSTEM_COLUMNS)):
        return f"{model.__name__} has the fields {taken}, which are columns of the platform. Rename them."
    if columns and (routes := sorted(folded & {"position", *ROUTING})):
        return f"{model.__name__} has the fields {routes}, which handle_messages uses to route rows. Rename them."
    return None
