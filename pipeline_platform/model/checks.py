"""What a pipeline's class must be like, checked when it is built, and what pipelines must be like together."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

from pydantic import BaseModel

from pipeline_platform.model import cron
from pipeline_platform.model.blocks import KINDS, ROUTING, annotated, name_of
from pipeline_platform.model.casts import ColumnError
from pipeline_platform.model.events import EVENTS, are_functions
from pipeline_platform.model.fields import ModelClass
from pipeline_platform.model.options import (
    Batcher,
    Processors,
    Producer,
    RateLimiting,
    Retention,
    Retry,
    Splitter,
    TableBatcher,
)
from pipeline_platform.model.partition import ALLOWED, SOURCE, is_partitioning
from pipeline_platform.model.schema import arrow_schema
from pipeline_platform.model.strict_options import DURATION, PipelineError, did_you_mean, is_duration, nearest, shown

_Class = type[Any]
"""A pipeline's, while it is built: nothing is known of its attributes yet."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
_NAMED = "lower-case letters, digits and _, a letter first, 63 at the most"
_OWNER = re.compile(r"team:.+|[\w.%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,7}")  # Dagster's own rule
_WITHIN = {
    field.alias or name: model.__name__
    for model in (Retry, Retention, TableBatcher, Batcher, RateLimiting, Processors, Producer)
    for name, field in model.model_fields.items()
}
"""Options within others: as attributes of the class they would do nothing."""
_FIRST_YEAR, _WINDOWS = 1970, 1_000_000
"""Dagster lists all partitions of an asset for its page: beyond these bounds the page hangs."""
RESERVED_TABLES = frozenset({"messages", "outcomes", "failed"})
"""Tables that every pipeline has; no batcher can be named so."""
SYSTEM_COLUMNS = ("source", "message_id", "attempt", "batch_key", "batch_id", "receive_id", "window", "child")
"""Columns that the platform adds to a batcher's table; no field of its model can be named so."""
_PROMISES: Mapping[Callable[[Any], bool], str] = {
    inspect.iscoroutinefunction: "async",
    inspect.isasyncgenfunction: "an async generator",
    inspect.isgeneratorfunction: "a generator",
}


def _is(kind: Any) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kind)


def _is_share(value: Any) -> bool:
    return value in ("never", "any") or (type(value) in (int, float) and 0 <= value <= 1)


_OPTIONS: Mapping[str, tuple[Callable[[Any], object], str]] = {
    "name": (
        lambda value: isinstance(value, str) and _NAME.fullmatch(value),
        f"it must be {_NAMED}: it names tables and assets",
    ),
    "producer": (_is(Producer | None), "it must be a Producer(...)"),
    "producers": (_is(Mapping), "it must be a dict of Producer(...) by name"),
    "processors": (_is(Processors), "it must be a Processors(...)"),
    "retention": (_is(Retention), "it must be a Retention(...)"),
    "context": (_is(BaseModel | None), "it must be an instance of a pydantic model, whose fields a run can override"),
    "fail_run_on": (_is_share, "it is 'never', 'any', or a share of failures from 0.0 to 1.0"),
    "window_cron": (cron.is_cron, cron.WAY_OUT),
    "retry": (_is(Retry | None), "it must be a Retry(max_attempts=...)"),
    "dead_letters": (
        lambda value: value is None or (type(value) is str and value),
        "it must be the key of a resource that is a source, 'orders_dead'",
    ),
    "redrive": (lambda value: value is None or cron.is_cron(value), f"{cron.WAY_OUT}, or leave it out"),
    "acks_immediately": (_is(bool), "it is True or False"),
    "shutdown": (is_duration, DURATION),
    "first_window": (
        lambda value: value is None or (isinstance(value, datetime) and value.utcoffset() is not None),
        "it must be a time with its zone: datetime(2026, 1, 1, tzinfo=UTC)",
    ),
    "telemetry": (are_functions, f"it must be a dict of plain functions by event; there is {', '.join(EVENTS)}"),
    "owners": (_is(list | tuple), "it must be a tuple of owners, ('team:data',)"),
    "batchers": (_is(Mapping), "it must be a dict of Batcher(...) and TableBatcher(schema=...) by name"),
    "partition_by": (is_partitioning, ALLOWED),
}
"""What each option of the class must be, and the words for what is allowed."""


def check_class(cls: _Class, base: _Class) -> None:
    """Refuse a class that cannot work, or not as its author means it; `base` is `Pipeline` itself."""
    _check_names(cls, base)
    for option, (fits, allowed) in _OPTIONS.items():
        if not fits(value := getattr(cls, option, None)):
            _refuse(cls, option, value, allowed)
    _check_first_window(cls)
    _check_producers(cls)
    for owner in cls.owners:
        if not isinstance(owner, str) or not _OWNER.fullmatch(owner):
            _refuse(cls, "owners", owner, "an owner is an e-mail address or 'team:<name>'")
    for callback in _callbacks(base):
        if _is_written(cls, base, callback):
            _check_shape(cls, callback, tuple(inspect.signature(vars(base)[callback]).parameters)[1:])
    if cls.__init__ is not object.__init__:
        _check_shape(cls, "__init__", ())
    _check_lane(cls, base)
    _check_batchers(cls, base)
    _check_order(cls)
    _check_rescue(cls, base)


def check_together(pipelines: Sequence[_Class], resources: Mapping[str, Any]) -> None:
    """Refuse, with a `PipelineError`, pipelines and producers of a pipeline that cannot be defined side by side."""
    names: dict[str, _Class] = {}
    pulling: list[_Pulling] = []
    for pipeline in pipelines:
        if not isinstance(pipeline, type):
            raise PipelineError(f"pipelines has an instance of {type(pipeline).__qualname__}: give the class itself")
        if not hasattr(pipeline, "name"):
            raise PipelineError(f"pipelines has {pipeline.__qualname__}, an abstract base: give what is built on it")
        for name, producer in pipeline.producers_of().items():
            option = f"producers[{name!r}]" if name else "producer"
            one = _Pulling(pipeline, option, producer.source, pipeline.limits_key(name).replace("/", "_"))
            if one.key not in resources:
                hint = did_you_mean(one.key, sorted(resources))
                _refuse(pipeline, f"{option}.source", one.key, f"no resource has this key; {hint}")
            if other := names.get(pipeline.name):
                why = f"{other.__qualname__} has this name too, and tables and limits are by name: rename one"
                _refuse(pipeline, "name", pipeline.name, why)
            for before in pulling:
                _check_apart(one, before, resources)
            pulling.append(one)
        names[pipeline.name] = pipeline


class _Pulling(NamedTuple):
    """A producer: of which class, by which option; the key of its source; what its sensor is named after."""

    pipeline: _Class
    option: str
    key: str
    named: str


def _check_apart(one: _Pulling, other: _Pulling, resources: Mapping[str, Any]) -> None:
    """Refuse two producers that would take each other's messages, or names."""
    mine, theirs, option = resources[one.key], resources[other.key], f"{one.option}.source"
    same = other.pipeline is one.pipeline
    who = f"{other.pipeline.__qualname__}{f'.{other.option}' if same or other.pipeline.producers else ''}"
    if one.key == other.key or mine == theirs:
        pulls = (
            f"{who} pulls from it too" if one.key == other.key else f"it equals {other.key!r}, from which {who} pulls"
        )
        why = (
            f"{pulls}, and each message would come to one of the two: "
            "give each a source of its own, or handle both kinds in one pipeline, by batcher"
        )
        _refuse(one.pipeline, option, one.key, why)
    if getattr(mine, "name", None) == getattr(theirs, "name", ""):
        why = (
            f"that source has the name {mine.name!r}, and so has the source of {who}: messages, and positions in a "
            "log, are known by it, so give each source a name of its own"
        )
        _refuse(one.pipeline, option, one.key, why)
    if one.named == other.named:
        why = f"{who} has sensors of the same name, {one.named}_...: rename one"
        _refuse(one.pipeline, one.option.partition("[")[0], one.named, why)


def _refuse(cls: _Class, option: str, value: object, why: str) -> NoReturn:
    raise PipelineError(f"{cls.__qualname__}.{option} is {shown(value)}: {why}")


def _callbacks(base: _Class) -> list[str]:
    return [name for name, value in vars(base).items() if inspect.isfunction(value) and not name.startswith("_")]


def _is_written(cls: _Class, base: _Class, callback: str) -> bool:
    """Whether the author wrote this callback, here or in a base."""
    return inspect.getattr_static(cls, callback) is not vars(base)[callback]


def _check_names(cls: _Class, base: _Class) -> None:
    """Refuse names that are meant to be an option's or a callback's and are not."""
    options, callbacks = list(inspect.get_annotations(base)), _callbacks(base)
    bases = [one for one in cls.__mro__ if one not in base.__mro__]
    for owner, name, value in ((one, *item) for one in bases for item in vars(one).items()):
        if name.startswith("_") or name in options or name in callbacks:
            continue
        if name in _WITHIN and not callable(value) and not hasattr(type(value), "__get__"):
            why = f"is an option of {_WITHIN[name]}(...): give it there, or call one of your own _{name}"
        elif meant := _meant_within(name, value):
            why = (
                f"is no option; did you mean {meant!r} of {_WITHIN[meant]}(...)? Give it there, "
                f"or call one of your own _{name}"
            )
        elif name in vars(base):
            why = "is a method of the platform's own: give yours another name"
        elif meant := nearest(name, [*options, *callbacks]):
            kind = "option" if meant in options else "callback"
            why = (
                f"is no option or callback; did you mean the {kind} {meant!r}? "
                f"If it is your own, give it a name less like that one, or call it _{name}"
            )
        else:
            continue
        raise PipelineError(f"{owner.__qualname__}.{name} {why}")


def _meant_within(name: str, value: object) -> str | None:
    """The option within others that a number or a span is meant for; other values may be one's own."""
    meant = nearest(name, [one for one in _WITHIN if "_" in one], 0.9)
    is_meant = meant and type(value) in (int, timedelta) and name.count("_") <= meant.count("_")
    return meant if is_meant else None


def _check_shape(cls: _Class, name: str, arguments: Sequence[str]) -> None:
    """Refuse what cannot be called with these arguments, or would answer with a promise of a result."""
    path, written = f"{cls.__qualname__}.{name}", inspect.getattr_static(cls, name)
    method = f"def {name}({', '.join(('self', *arguments))})"
    if isinstance(written, property | cached_property):
        getter = written.fget if isinstance(written, property) else written.func
        if getter and _misfit(getter, ["self"]):
            raise PipelineError(f"{path} is a property: write a plain method, {method}")
        return  # only an instance can say what it gives
    try:
        # As an instance has it, but one that no code of the author's made.
        called = written.__get__(object.__new__(cls), cls) if hasattr(type(written), "__get__") else written
    except Exception:  # a descriptor of the author's own, which wants a real one
        return
    if not callable(called):
        raise PipelineError(f"{path} is {shown(called)}: it must be a method, {method}")
    _check_called(path, called, arguments)


def _check_called(path: str, called: Callable[..., Any], arguments: Sequence[str]) -> None:
    of = called if inspect.isroutine(called) else type(called).__call__
    for is_kind, kind in _PROMISES.items():
        if is_kind(called) or is_kind(of):
            raise PipelineError(f"{path} is {kind}: it must be a plain method, which returns its result itself")
    if misfit := _misfit(called, arguments):
        name = path.rpartition(".")[2]
        wanted = f"it is called as {name}({', '.join(arguments)})" if arguments else "the platform gives it none"
        raise PipelineError(f"{path} takes {misfit}: {wanted}")


def _misfit(called: Callable[..., Any], arguments: Sequence[str]) -> str | None:
    """The parameters of what cannot be called with so many arguments; None if it can."""
    try:
        # The outermost function is called; the one that it wraps may be given more.
        signature = inspect.signature(called, follow_wrapped=False)
    except ValueError:  # something in C that has no signature
        return None
    try:
        signature.bind(*arguments)
    except TypeError:
        return str(signature)
    return None


def _check_first_window(cls: _Class) -> None:
    """Refuse a first window that makes more partitions than Dagster can list."""
    if (first := cls.first_window) is None:
        return
    if first.year < _FIRST_YEAR:
        _refuse(cls, "first_window", first, f"it must be in {_FIRST_YEAR} or later. Begin with the oldest message")
    windows = (datetime.now(UTC) - first).days * cron.most_a_day(cls.window_cron)
    if windows > _WINDOWS:
        why = f"with window_cron {cls.window_cron!r} there are more than {_WINDOWS:,} windows by now. Begin later, or"
        _refuse(cls, "first_window", first, f"{why} choose longer windows")


def _check_producers(cls: _Class) -> None:
    has_one = getattr(cls, "producer", None) is not None
    if has_one and cls.producers:
        why = "write one of them; what a base sets is unset by producer = None or producers = {}"
        raise PipelineError(f"{cls.__qualname__} has both producer and producers: {why}")
    if not has_one and not cls.producers:
        _refuse(cls, "producer", None, "it must be a Producer(...), or producers a dict of them by name")
    for name, producer in cls.producers.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            _refuse(cls, "producers", name, f"a name must be {_NAMED}: it names a sensor and limits")
        if not isinstance(producer, Producer):
            _refuse(cls, f"producers[{name!r}]", producer, "it must be a Producer(...)")


def _check_lane(cls: _Class, base: _Class) -> None:
    if _is_written(cls, base, "handle_message") == (is_lane := _is_written(cls, base, "handle_messages")):
        has = "both handle_message and" if is_lane else "neither handle_message nor"
        raise PipelineError(f"{cls.__qualname__} has {has} handle_messages: write one of them")
    if not is_lane:
        return
    kind = annotated(cls.handle_messages)
    if kind is not None and (name := name_of(kind)) not in {*KINDS, "pyspark.DataFrame"}:
        why = "annotate polars.DataFrame or pyarrow.Table for blocks, or Spark's DataFrame"
        raise PipelineError(f"{cls.__qualname__}.handle_messages takes {name}: {why}")
    why = "is never called beside handle_messages: do it there, or write handle_message instead"
    for callback in ("transform", "prepare_messages") if cls.uses_columns() else ("transform",):
        if _is_written(cls, base, callback):
            raise PipelineError(f"{cls.__qualname__}.{callback} {why}")
    if (threads := cls.processors.threads) > 1:
        why = "handle_messages is called for all messages together: write handle_message instead, or leave it at 1"
        _refuse(cls, "processors.threads", threads, why)
    if cls.uses_columns():
        timeout = cls.processors.message_timeout
        if timeout is not None and not any(_is_written(cls, base, one) for one in ("handle_failed", "acknowledge")):
            why = "a query of Spark cannot be timed, and neither handle_failed nor acknowledge is written: leave it out"
            _refuse(cls, "processors.message_timeout", timeout, why)
        if cls.processors.rescue:
            why = "a row of handle_messages has no way on of its own: write handle_message instead, or leave it out"
            _refuse(cls, "processors.rescue", True, why)


def _check_rescue(cls: _Class, base: _Class) -> None:
    rescuing = {f"batchers[{name!r}].rescue": options for name, options in cls.batchers.items()}
    for path, options in {"processors.rescue": cls.processors, **rescuing}.items():
        if getattr(options, "rescue", False) and not _is_written(cls, base, "handle_failed"):
            why = "the class has no handle_failed to bring a message back: write one, or leave it out"
            _refuse(cls, path, True, why)


def _check_batchers(cls: _Class, base: _Class) -> None:
    for batcher, options in cls.batchers.items():
        key = f"batchers[{batcher!r}]"
        if not isinstance(batcher, str) or not _NAME.fullmatch(batcher) or batcher in RESERVED_TABLES:
            why = f"a name must be {_NAMED}, and none of {', '.join(sorted(RESERVED_TABLES))}: it names a table"
            _refuse(cls, "batchers", batcher, why)
        if not isinstance(options, Batcher | TableBatcher):
            _refuse(cls, key, options, "it must be a Batcher(...) or a TableBatcher(schema=...)")
        model = options.table_schema
        if model is not None and (misfit := _unfit(model, columns=_is_written(cls, base, "handle_messages"))):
            _refuse(cls, f"{key}.schema", model.__name__, misfit)
        if isinstance(options, Batcher) and not _is_written(cls, base, "handle_batch"):
            why = "is a Batcher(...), and the class has no handle_batch; write it, or use TableBatcher(schema=...)"
            raise PipelineError(f"{cls.__qualname__}.{key} {why}")
        if isinstance(options, Batcher) and isinstance(options.batch_size, Splitter):
            _check_called(f"{cls.__qualname__}.{key}.batch_size.step", options.batch_size.step, ("message", "acc"))
    # A class may inherit one that is for others who share the base.
    if "handle_batch" in vars(cls) and not any(isinstance(options, Batcher) for options in cls.batchers.values()):
        why = "is never called: no batcher is a Batcher(...), and a TableBatcher has no callback"
        raise PipelineError(f"{cls.__qualname__}.handle_batch {why}")


def _check_order(cls: _Class) -> None:
    if cls.uses_columns() and cls.partitioning() is not None:
        option = "partition_by" if cls.processors.partition_by is None else "processors.partition_by"
        why = "handle_messages is one query, which has no order: give it to a Batcher(...), or write handle_message"
        _refuse(cls, option, cls.partitioning(), why)
    if not cls.takes_turns(leases_partitions=True):
        return
    for name, producer in cls.producers_of().items():
        if producer.max_runs > 1:
            option = f"producers[{name!r}].max_runs" if name else "producer.max_runs"
            why = f"with a function as partition_by runs take turns: leave it at 1, or partition by {SOURCE!r}"
            _refuse(cls, option, producer.max_runs, why)


def _unfit(model: ModelClass, *, columns: bool) -> str | None:
    """Why a model cannot be the table of a pipeline, or None."""
    try:
        names = arrow_schema(model).names
    except ColumnError as error:
        return str(error)
    # Spark, and Delta tables with it, ignores the case of a column's name.
    folded = [name.lower() for name in names]
    if taken := sorted(set(folded) & set(SYSTEM_COLUMNS)):
        return f"the platform adds columns {taken}: rename them"
    if columns and (routes := sorted(set(folded) & {"position", *ROUTING})):
        return f"in handle_messages the columns {routes} say where a row goes: give these fields other names"
    return None
