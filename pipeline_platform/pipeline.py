"""A pipeline: what its author writes. Options are checked when the class is built."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

from pydantic import BaseModel

from pipeline_platform import cron
from pipeline_platform.lake.columns import ColumnError, arrow_schema
from pipeline_platform.message import BatchInfo, Message
from pipeline_platform.options import Batcher, Options, Processors, Producer, Retention, TableBatcher

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
_OWNER = re.compile(r"team:.+|[\w.%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,7}")  # Dagster's own rule
RESERVED_TABLES = frozenset({"messages", "outcomes", "failed"})
"""Tables that every pipeline has; no batcher can be named so."""
SYSTEM_COLUMNS = ("source", "message_id", "attempt", "batch_key", "batch_id", "receive_id", "window")
"""Columns that the platform adds to a batcher's table; no field of its model can be named so."""


class PipelineError(ValueError):
    """A pipeline's options cannot work together: says which, their value, and the way out."""


class Pipeline:
    """Messages in, handled, batched, failures apart, acknowledged when safe.

    Subclass it in a file of its own, set the options as class attributes and write the callbacks. Callbacks run in
    Spark tasks: what they need beyond the message they make themselves or take from `context`. What several pipelines
    share goes into a base of theirs that is none itself: `class Base(Pipeline, abstract=True)` is not checked.

    Attributes:
        name: Names the assets, tables, jobs and limits; lower case. Never change it: it is where the data lies.
        producer: Where messages come from.
        processors: How many are handled at once.
        batchers: By name; none at all means that a handled message leaves nothing behind but its outcome.
        context: A pydantic model with defaults, handed to every callback; a run can override its fields.
        window_cron: When a window begins, in UTC; hourly by default. Never change it once there is data.
        first_window: When the first one begins, with its time zone. Never change it either.
        retention: How long windows are kept.
        fail_run_on: `never`, `any`, or the share of failed messages (0 to 1) above which a run ends red, after
            everything is published and acknowledged.
        redrive: When open failures are driven once more by themselves: a cron schedule in UTC; not at all by default.
        owners: Of the assets: e-mail addresses or `team:<name>`.
    """

    name: ClassVar[str]
    producer: ClassVar[Producer]
    processors: ClassVar[Processors] = Processors()
    batchers: ClassVar[Mapping[str, Batcher | TableBatcher]] = {}
    context: ClassVar[BaseModel | None] = None
    window_cron: ClassVar[str] = "0 * * * *"
    first_window: ClassVar[datetime] = datetime(2026, 1, 1, tzinfo=UTC)
    retention: ClassVar[Retention] = Retention()
    fail_run_on: ClassVar[Literal["never", "any"] | float] = "never"
    redrive: ClassVar[str | None] = None
    owners: ClassVar[Sequence[str]] = ()

    def __init_subclass__(cls, *, abstract: bool = False, **kwargs: object) -> None:
        """Refuse what cannot work, when the class is built."""
        super().__init_subclass__(**kwargs)
        if not abstract:
            _check(cls)

    def transform(self, event: Message) -> Message:
        """Make a message of what the source delivered, before anything else; by default it is one already."""
        return event

    def prepare_messages(self, messages: list[Message], context: Any) -> list[Message]:
        """Do once for a chunk what each message would do for itself (one query, one call).

        Must return as many messages, in the same order; raising, or returning fewer or more, fails the whole chunk.
        """
        del context
        return messages

    def handle_message(self, message: Message, context: Any) -> Message:
        """Handle one message: put its data, its batcher and batch key, or mark it failed.

        Whatever is raised fails this message alone, with its original payload kept.
        """
        raise NotImplementedError(f"{type(self).__name__} has no handle_message")

    def handle_messages(self, messages: DataFrame, context: Any) -> DataFrame:
        """Handle all messages with column expressions: the fast lane, instead of `handle_message`.

        Args:
            messages: The columns of `MESSAGES` but `receive_id`; `position`; and `batcher`, `batch_key`, `status`,
                `reason`.
            context: As for the other callbacks.

        Returns:
            As many rows, with `position` as it was: a row is known again by it alone. A row goes to the table of its
            `batcher`: the fields of that table's model are taken from columns of the same name (`data` where there
            is no model). A row fails by a `status` of `failed` with its `reason`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no handle_messages")

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        """Handle a batch: write it outside, say. Must return the messages, each ok or failed.

        A message that is not returned fails; raising fails them all. May run again for the same
        `batch_info.batch_id` after a crash.
        """
        raise NotImplementedError(f"{type(self).__name__} has no handle_batch")

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        """Look at the messages that failed, before they are recorded: notify, count, `configure_ack`.

        They stay failed. Raising, or returning something else, leaves them as they were.
        """
        del context
        return messages

    @classmethod
    def uses_columns(cls) -> bool:
        """True where the author chose the fast lane."""
        return cls.handle_messages is not Pipeline.handle_messages

    @classmethod
    def description(cls) -> str:
        """The class's own docstring."""
        return inspect.cleandoc(cls.__doc__ or "")

    @classmethod
    def context_of(cls, overrides: Mapping[str, Any] | None) -> BaseModel | None:
        """The context of a run: the class's own with some fields overridden.

        Raises:
            PipelineError: The pipeline has no context, or a field is unknown or does not fit.
        """
        if not overrides:
            return cls.context
        if cls.context is None:
            raise PipelineError(
                f"{cls.name}: the run sets context {sorted(overrides)}, but the pipeline has no context"
            )
        model = type(cls.context)
        unknown = sorted(set(overrides) - set(model.model_fields))
        if unknown:
            raise PipelineError(f"{cls.name}: context has no field {unknown}; it has {sorted(model.model_fields)}")
        try:
            return model.model_validate({**cls.context.model_dump(), **overrides})
        except ValueError as error:
            raise PipelineError(f"{cls.name}: context {dict(overrides)!r} does not fit: {error}") from error


def _check(cls: type[Pipeline]) -> None:
    """Refuse a class that cannot work; all that is wrong with one option is said at once by its own model."""
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
    _check_batchers(cls)
    one = cls.handle_message is not Pipeline.handle_message
    if one == cls.uses_columns():
        _refuse(cls, "handle_message", "both" if one else None, "write either handle_message or handle_messages")
    red: object = cls.fail_run_on
    is_share = isinstance(red, int | float) and not isinstance(red, bool) and 0 <= red <= 1
    if red not in ("never", "any") and not is_share:
        _refuse(cls, "fail_run_on", red, "it is 'never', 'any', or a share of failures from 0.0 to 1.0")
    _check_times(cls)
    _check_owners(cls)


def _refuse(cls: type[Pipeline], option: str, value: object, why: str) -> NoReturn:
    raise PipelineError(f"{cls.__qualname__}.{option} is {value!r}: {why}")


def _check_batchers(cls: type[Pipeline]) -> None:
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
        if isinstance(options, Batcher) and cls.handle_batch is Pipeline.handle_batch:
            _refuse(cls, key, "Batcher", "the class has no handle_batch; write one, or use TableBatcher")


def _check_times(cls: type[Pipeline]) -> None:
    if not cron.is_cron(cls.window_cron):
        _refuse(cls, "window_cron", cls.window_cron, cron.WAY_OUT)
    if cls.redrive is not None and not cron.is_cron(cls.redrive):
        _refuse(cls, "redrive", cls.redrive, f"{cron.WAY_OUT}, or leave it out")
    first: object = cls.first_window
    if not isinstance(first, datetime) or first.utcoffset() is None:
        _refuse(cls, "first_window", first, "it must be a time with its zone: datetime(2026, 1, 1, tzinfo=UTC)")


def _check_owners(cls: type[Pipeline]) -> None:
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
