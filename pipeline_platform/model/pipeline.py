"""A pipeline: what its author writes. Options are checked when the class is built."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pipeline_platform.model.blocks import KINDS, annotated, name_of
from pipeline_platform.model.checks import check_class
from pipeline_platform.model.events import Event
from pipeline_platform.model.message import BatchInfo, Message
from pipeline_platform.model.options import Batcher, Processors, Producer, Retention, Retry, TableBatcher
from pipeline_platform.model.partition import SOURCE
from pipeline_platform.model.strict_options import PipelineError, did_you_mean, reason_of, shown

__all__ = ["Pipeline", "PipelineError"]


class Pipeline:
    """Handles messages of a source, one by one and in batches, and records those that fail.

    Subclass it in a file of its own, set the options as class attributes and write the callbacks. Callbacks run in
    Spark tasks: they take what they need from the message and `context`, or make it. Pipelines may share a base,
    `class Base(Pipeline, abstract=True)`, which is not checked.

    You may add methods and constants of your own. A name that resembles an option or callback
    (`prosessors`, `handle_fialed`) is refused as a mistake, and so is an option that belongs into another (`max_runs`).
    Give yours a leading underscore, capitals, or a name that resembles them less.

    Attributes:
        name: Names the assets, tables, jobs and limits; lower case. Never change it: the data is under this name.
        producer: Where messages come from.
        producers: By name, in place of `producer`, where messages come from several sources. Each is pulled from by
            runs of its own, within limits of its own. Never change a name while one of its receives is unfinished.
        processors: How many messages are handled at once.
        batchers: By name. Without any, a handled message leaves only its outcome.
        partition_by: Which messages keep their order: `"source"` for those of a partition that the source names, or a
            function of a message that returns its partition, an int of 0 or more. `processors` and each `Batcher` may
            have one of their own. A function gets the message after `transform`; that of a `Batcher` gets it after
            `handle_message`. If it raises, that message alone fails. It is a lambda, a function of the module or a
            `staticmethod`.
        context: A pydantic model with defaults, handed to every callback; a run can override its fields.
        window_cron: When a window begins, in UTC; hourly by default. Once there is data, another one is refused.
        first_window: When the first one begins, with its time zone. Once there is data, a later begin is refused. None
            for the window in which the definitions are first loaded; the control store keeps it.
        retention: How long windows are kept.
        fail_run_on: `never`, `any`, or the share of failed messages (0 to 1) above which a run ends red, after
            everything is published and acknowledged.
        retry: Retries each failure after a pause, until it is dead after its last attempt. None never does.
        dead_letters: Key of a source that dead messages are sent to, with the reason; None for nowhere.
        redrive: When all failures that are not dead are retried: a cron schedule in UTC; None for never.
        acks_immediately: Whether callbacks may call `ack_immediately`. Their tasks then hold the source, with its
            credentials.
        shutdown: How long a run that has to stop (`pipeline-platform drain`, a termination) still begins messages.
        telemetry: Functions that get this pipeline's events, by event, in the process where these happen:
            `{"batch": on_batch}`. See `docs/run/telemetry.md`.
        owners: Of the assets: e-mail addresses or `team:<name>`. A base sets them for all its pipelines.
    """

    name: ClassVar[str]
    producer: ClassVar[Producer]
    producers: ClassVar[Mapping[str, Producer]] = {}
    processors: ClassVar[Processors] = Processors()
    batchers: ClassVar[Mapping[str, Batcher | TableBatcher]] = {}
    partition_by: ClassVar[Callable[[Message], int] | Literal["source"] | None] = None
    context: ClassVar[BaseModel | None] = None
    window_cron: ClassVar[str] = "0 * * * *"
    first_window: ClassVar[datetime | None] = None
    retention: ClassVar[Retention] = Retention()
    fail_run_on: ClassVar[Literal["never", "any"] | float] = "never"
    retry: ClassVar[Retry | None] = None
    dead_letters: ClassVar[str | None] = None
    acks_immediately: ClassVar[bool] = False
    shutdown: ClassVar[timedelta] = timedelta(seconds=30)
    redrive: ClassVar[str | None] = None
    telemetry: ClassVar[Mapping[str, Callable[[Event], object]]] = {}
    owners: ClassVar[Sequence[str]] = ()

    def __init_subclass__(cls, *, abstract: bool = False, **kwargs: object) -> None:
        """Refuse what cannot work, when the class is built.

        Raises:
            PipelineError: On one line: the class, the option or callback, its value and what is allowed.
        """
        super().__init_subclass__(**kwargs)
        if not abstract:
            check_class(cls, Pipeline)

    def transform(self, event: Message) -> Message:
        """Change a message before all other callbacks see it; returns it unchanged by default."""
        return event

    def prepare_messages(self, messages: list[Message], context: Any) -> list[Message]:
        """Do once for a chunk what would be done for each message (one query, one call).

        It must return as many messages, in the same order. The whole chunk fails if it raises, or returns fewer or
        more. Where `handle_messages` takes blocks, this takes and returns them, too, before permits are taken.
        """
        return messages

    def handle_message(self, message: Message, context: Any) -> Message | list[Message]:
        """Handle one message: put its data, its batcher and batch key, or mark it failed.

        It may return a list of messages made from this one, at most 10,000: its children. If one of them fails, the
        message fails, and no table gets a row of the others. With an empty list no table gets a row.

        If it raises, this message alone fails, and its original payload is recorded.
        """
        raise NotImplementedError(f"{type(self).__name__} has no handle_message")

    def handle_messages(self, messages: Any, context: Any) -> Any:
        """Handle many messages at once, as columns, instead of `handle_message`. See `docs/build/lanes.md`.

        Args:
            messages: As it is annotated. `polars.DataFrame` or `pyarrow.Table`: a block, some thousand messages of a
                task, in order. Spark's `DataFrame`, or no annotation: all messages of a run. It has the columns of
                `MESSAGES` but `receive_id`, `first_receive_id` and `published_at`; `position`; and `batcher`,
                `batch_key`, `status`, `reason`.
            context: As for the other callbacks.

        Returns:
            As many rows, with `position` as it was: it identifies a row. A row goes to the table of its `batcher`: the
            fields of that table's model are taken from columns of the same name (`data` without a model). A row with
            the `status` `failed` fails with its `reason`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no handle_messages")

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        """Handle a batch, for example write it outside. Must return the messages, each ok or failed.

        It may change their data, mark them failed and set how they are acknowledged (`configure_ack`). A message whose
        batcher or batch key it changes fails, and so does one that it does not return. If it raises, all fail. It may
        run again for the same `batch_info.batch_id` after a crash, and for the same messages in another batch when they
        are retried or replayed.
        """
        raise NotImplementedError(f"{type(self).__name__} has no handle_batch")

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        """Look at the messages that failed, before they are recorded: notify, count, `configure_ack`.

        Reason, batcher and batch key are recorded as it leaves them. The data is not: the table `failed` has the
        payload as it was delivered, to be retried. A message that it returns as `rescued()` goes on as if it had
        not failed, if `Processors(rescue=True)` or the batcher's `Batcher(rescue=True)` allows it; otherwise it stays
        failed. If it raises or returns something else, messages stay as they were.
        """
        return messages

    def acknowledge(self, ack_ref: str, successful: list[Message], failed: list[Message], context: Any) -> None:
        """Get messages whose outcome is decided and published, before the source does: mark rows, notify.

        It gets the messages of one group, as they were delivered, up to 1,000 at once. Those that failed have their
        reason, batcher and batch key. If it raises, these messages are not acknowledged yet, and the next run calls it
        again; so it does after a crash. It does not get messages that are given back or retried.
        """

    @classmethod
    def uses_columns(cls) -> bool:
        """True where the author chose Spark's columns."""
        return cls.handle_messages is not Pipeline.handle_messages and cls.block_type() is None

    @classmethod
    def block_type(cls) -> Any:
        """The class of the blocks that the author chose to handle; None where it is rows, or Spark's columns."""
        if cls.handle_messages is Pipeline.handle_messages:
            return None
        kind = annotated(cls.handle_messages)
        return kind if name_of(kind) in KINDS else None

    @classmethod
    def partitioning(cls, batcher: str | None = None) -> Any:
        """How the messages of a batcher, or those to be handled, are partitioned; None where they keep no order."""
        options = cls.processors if batcher is None else cls.batchers[batcher]
        if isinstance(options, TableBatcher):
            return None
        return cls.partition_by if options.partition_by is None else options.partition_by

    @classmethod
    def takes_turns(cls, *, leases_partitions: bool = False) -> bool:
        """Whether its runs come one after the other, or messages would not keep their order.

        Args:
            leases_partitions: Whether the source of a run gives a partition to one receive at a time.
        """
        used = [one for name in (None, *cls.batchers) if (one := cls.partitioning(name)) is not None]
        return bool(used) and not (leases_partitions and all(one == SOURCE for one in used))

    @classmethod
    def producers_of(cls, name: str = "") -> Mapping[str, Producer]:
        """The producer of this name; without a name all, by name. That of `producer` has the name `""`.

        Raises:
            PipelineError: There is none of this name.
        """
        if not cls.producers and not name:
            return {"": cls.producer}
        if not name:
            return cls.producers
        if name not in cls.producers:
            hint = "Leave the name out: its only producer has no name."
            if cls.producers:
                hint = did_you_mean(name, cls.producers, "producers")
            raise PipelineError(f"{cls.name}: has no producer {name!r}. {hint}")
        return {name: cls.producers[name]}

    @classmethod
    def batch_timeout(cls) -> timedelta | None:
        """The shortest of its batchers; None where none has one."""
        timeouts = (one.batch_timeout for one in cls.batchers.values() if isinstance(one, Batcher))
        return min(filter(None, timeouts), default=None)

    @classmethod
    def limits_key(cls, producer: str = "") -> str:
        """What the control store knows a producer by; without a name the whole pipeline, or its only producer."""
        return f"{cls.name}/{producer}" if producer else cls.name

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
        if overrides is None or overrides == {}:
            return cls.context
        if not isinstance(overrides, Mapping):
            why = f"overrides must be a dict of values by field, got {shown(overrides)}."
            raise PipelineError(f"{cls.__qualname__}.context: {why}")
        if cls.context is None:
            why = f"is None, but the run overrides {', '.join(map(str, overrides))}. Remove the overrides."
            raise PipelineError(f"{cls.__qualname__}.context: {why}")
        return overridden(cls.context, overrides, f"{cls.__qualname__}.context")


def overridden(context: BaseModel, values: Mapping[str, Any], path: str) -> BaseModel:
    """Return a copy of a context with other values in some fields; a `PipelineError` starts with `path`."""
    model = type(context)
    for name in values:
        if name not in model.model_fields:
            hint = did_you_mean(str(name), model.model_fields, "fields")
            raise PipelineError(f"{path}.{name}: is not a field of the context. {hint}")
    try:
        return model.model_validate({**context.model_dump(), **values})
    except ValidationError as error:
        refused = error.errors(include_url=False)
    raise PipelineError(" ".join(_error(model, each, path) for each in refused))


def _error(model: type[BaseModel], refused: ErrorDetails, path: str) -> str:
    """Return the error for a field on one line, without a value that the model hides."""
    place, why = ".".join([path, *map(str, refused["loc"])]), reason_of(refused)
    field = model.model_fields.get(str(refused["loc"][0])) if refused["loc"] else None
    if field is None or not field.repr or "Secret" in str(field.annotation):
        return f"{place}: {why.removesuffix('.')}."
    return f"{place}: {why}, got {shown(refused['input'])}."
