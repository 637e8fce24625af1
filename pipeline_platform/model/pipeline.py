"""Base class of pipelines; options and callbacks are checked when a subclass is built."""

import inspect
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pipeline_platform.model.blocks import BLOCK_TYPES, annotated, name_of
from pipeline_platform.model.checks import check_class
from pipeline_platform.model.events import Functions
from pipeline_platform.model.message import Message
from pipeline_platform.model.options import (
    BATCH_MESSAGES,
    Batcher,
    Processors,
    Producer,
    Retention,
    TableBatcher,
    has_table,
)
from pipeline_platform.model.partition import SOURCE, PartitionBy
from pipeline_platform.model.retry import Retry
from pipeline_platform.model.strict_options import (
    Context,
    Cron,
    Duration,
    Name,
    Owners,
    PipelineError,
    Share,
    SourceKey,
    ZonedDatetime,
    did_you_mean,
    refusal_reason,
    requirement_of,
    shown,
)

__all__ = ["BatchInfo", "Pipeline", "PipelineError", "Trigger"]

Trigger = Literal["size", "flush", "timeout"]


class BatchInfo(NamedTuple):
    """Properties of a batch, for `handle_batch`.

    Attributes:
        batcher: Name of the batcher.
        batch_key: Key of its messages.
        partition: Partition of its messages, from `partition_by` or the source; None without `partition_by`.
        size: Number of its messages.
        trigger: Reason for which it ended: `size` (`batch_size`, `batch_bytes` or the splitter), `flush` (a message in
            mode `flush`, or the end of a retry, a replay or a drain) or `timeout` (the end of a run that pulls).
        batch_id: Id that stays the same when the batch of a receive is handled again. Retries and replays make new
            batches: for idempotent writes use `source`, `message_id` and `child` of each message.
    """

    batcher: str
    batch_key: str
    partition: int | str | None
    size: int
    trigger: Trigger
    batch_id: str


class Pipeline:
    """Base class of pipelines: handles messages of a source one by one and in batches, and records failures.

    Subclass it in a file of its own, set the options as class attributes and write the callbacks. Callbacks run in
    Spark tasks: they use the message, `context` and objects that they create. Pipelines may share a base class,
    `class Base(Pipeline, abstract=True)`, which is not checked.

    You may add methods and constants. A name that resembles an option or a callback (`prosessors`, `handle_fialed`) is
    refused as a mistake, and so is an option of another class (`max_runs`). Start yours with an underscore, write it in
    capitals, or choose a different name.
    """

    name: ClassVar[Name]
    """Name of the pipeline, in lower case: part of the names of assets, tables, jobs and limits. Never change it: the
    data is stored under it."""

    # None in a class with `producers`, which may inherit a producer.
    producer: ClassVar[Annotated[Producer, requirement_of(Producer | None)]]
    """The source of messages, and the limits, patience and schedule of its runs."""

    producers: ClassVar[Mapping[str, Producer]] = {}
    """Producers by name, instead of `producer`, for several sources. Each has its own runs and limits. Never change a
    name while one of its receives is unfinished."""

    processors: ClassVar[Processors] = Processors()
    """Size of a run, and how messages are handled."""

    batchers: ClassVar[Mapping[str, Batcher | TableBatcher]] = {}
    """Batchers by name. Without batchers, a handled message leaves only its outcome."""

    partition_by: ClassVar[PartitionBy] = None
    """Partition of a message; messages of a partition are handled in order. `"source"` uses the partitions of the
    source. A function gets a message and returns its partition, an int of 0 or more. It must be a lambda, a function of
    the module or a `staticmethod`, and runs after `transform`; if it raises, only that message fails. `processors` and
    each `Batcher` can set their own; a function of a `Batcher` runs after `handle_message`. None: no order."""

    context: ClassVar[Context | None] = None
    """An instance of a pydantic model, passed to every callback. A run can override its fields."""

    window_cron: ClassVar[Cron] = "0 * * * *"
    """Cron schedule in UTC of the starts of windows; hourly by default. It cannot change once there is data."""

    first_window: ClassVar[ZonedDatetime | None] = None
    """Start of the first window, with its time zone. It cannot become later once there is data. None: the window in
    which the definitions are first loaded, which the control store keeps."""

    retention: ClassVar[Retention] = Retention()
    """Ages at which windows and runs are deleted."""

    max_failed_share: ClassVar[Share | None] = None
    """Share of failed messages (0.0 to 1.0) above which a run ends red, after everything is published and acknowledged.
    0.0 for any failure; None for never."""

    retry: ClassVar[Retry | None] = None
    """Attempts and pauses of automatic retries. None: no automatic retry."""

    dead_letters: ClassVar[SourceKey | None] = None
    """Key of a source to which dead messages are sent, with the reason. None: they are not sent."""

    retry_schedule: ClassVar[Cron | None] = None
    """Cron schedule in UTC of a retry of all failures that are not dead. None: no schedule."""

    acks_immediately: ClassVar[bool] = False
    """Whether callbacks may call `ack_immediately`. Their tasks then get the source with its credentials."""

    shutdown: ClassVar[Duration] = timedelta(seconds=30)
    """Time for which a run that must stop (`pipeline-platform drain`, a termination) still starts messages."""

    telemetry: ClassVar[Functions] = {}
    """Functions by event that get this pipeline's events in the process where they happen: `{"batch": on_batch}`. See
    `docs/run/telemetry.md`."""

    owners: ClassVar[Owners] = ()
    """Owners of the assets: e-mail addresses or `team:<name>`."""

    def __init_subclass__(cls, *, abstract: bool = False, **kwargs: object) -> None:
        """Check the options and callbacks of a class when it is built.

        Raises:
            PipelineError: An option or callback is not valid.
        """
        super().__init_subclass__(**kwargs)
        if not abstract:
            check_class(cls, Pipeline)

    def transform(self, event: Message) -> Message:
        """Change a message before all other callbacks; returns it unchanged by default."""
        return event

    def prepare_messages(self, messages: list[Message], context: Any) -> list[Message]:
        """Prepare a chunk of messages together, for example with one query instead of one per message.

        It must return the same number of messages, in the same order. If it raises or returns another number, the
        whole chunk fails. If `handle_messages` takes blocks, this callback takes and returns blocks, too. It is called
        before permits are taken.
        """
        return messages

    def handle_message(self, message: Message, context: Any) -> Message | list[Message]:
        """Handle one message: put its data, its batcher and batch key, or mark it as failed.

        It may return a list of up to 10,000 messages derived from this one: its children. If a child fails, the
        message fails, and no table gets rows of its other children. With an empty list no table gets a row.

        If it raises, only this message fails, and its original payload is recorded.
        """
        raise NotImplementedError(f"{type(self).__name__} has no handle_message")

    def handle_messages(self, messages: Any, context: Any) -> Any:
        """Handle many messages together, as columns, instead of `handle_message`. See `docs/build/lanes.md`.

        Args:
            messages: A table of the annotated class. `polars.DataFrame` or `pyarrow.Table`: a block of some thousand
                messages of a task, in order. Spark's `DataFrame`, or no annotation: all messages of a run. Its columns
                are those of `MESSAGES` without `receive_id`, `first_receive_id` and `published_at`; `position`; and
                `batcher`, `batch_key`, `status`, `reason`.
            context: The context of the run.

        Returns:
            The same number of rows, with the same `position`, which identifies a row. A row is written to the table of
            its `batcher`: the fields of the table's model are read from columns of the same name (from `data` without
            a model). A row with the `status` `failed` fails with its `reason`, and one with `skipped` is skipped.
        """
        raise NotImplementedError(f"{type(self).__name__} has no handle_messages")

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        """Handle a batch, for example write it to another system, and return its messages.

        It may change their data, mark them as failed and set their ack actions (`configure_ack`). A message fails if
        it is not returned, or if its batcher or batch key changed. If the callback raises, all messages fail. It may
        be called again for the same `batch_info.batch_id` after a crash, and for the same messages in another batch
        when they are retried or replayed.
        """
        raise NotImplementedError(f"{type(self).__name__} has no handle_batch")

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        """Handle failed messages before they are recorded, for example notify, count, or `configure_ack`.

        Changed reasons, batchers and batch keys are recorded. Changed data is not: the table `failed` contains the
        payload as delivered, for a retry. A message that is returned as `rescued()` continues as if it had not failed,
        if `Processors(rescue=True)` or the batcher's `Batcher(rescue=True)` allows it. If the callback raises or
        returns something else, the messages are recorded unchanged.
        """
        return messages

    def acknowledge(self, ack_ref: str, successful: list[Message], failed: list[Message], context: Any) -> None:
        """Process messages after their outcome is published and before the source is acknowledged, for example notify.

        It gets the messages of one group, as delivered, up to 1,000 per call. Failed messages have their reason,
        batcher and batch key. If it raises, these messages are not acknowledged yet, and the next run calls it again;
        the same holds after a crash. It does not get messages that are released or retried.
        """

    @classmethod
    def uses_columns(cls) -> bool:
        """Whether the pipeline uses the Spark lane."""
        return cls.handle_messages is not Pipeline.handle_messages and cls.block_type() is None

    @classmethod
    def block_type(cls) -> Any:
        """Return the class of the blocks that the pipeline handles; None in the row lane and the Spark lane."""
        if cls.handle_messages is Pipeline.handle_messages:
            return None
        kind = annotated(cls.handle_messages)
        return kind if name_of(kind) in BLOCK_TYPES else None

    @classmethod
    def partitioning(cls, batcher: str | None = None) -> Any:
        """Return the effective `partition_by` of a batcher, or of handling; None if messages have no order."""
        options = cls.processors if batcher is None else cls.batchers[batcher]
        if isinstance(options, TableBatcher):
            return None
        return cls.partition_by if options.partition_by is None else options.partition_by

    @classmethod
    def holds_partitions(cls) -> bool:
        """Whether a failure stops the later messages of its partition."""
        return cls.processors.on_failure == "hold"

    @classmethod
    def batchers_with_tables(cls) -> list[str]:
        """Return the names of the batchers that have a table."""
        return [name for name, options in cls.batchers.items() if has_table(options)]

    @classmethod
    def takes_turns(cls, *, leases_partitions: bool = False) -> bool:
        """Whether its runs must not overlap, because messages would lose their order.

        Args:
            leases_partitions: Whether the source leases a partition to one receive at a time.
        """
        used = [by for name in (None, *cls.batchers) if (by := cls.partitioning(name)) is not None]
        return bool(used) and not (leases_partitions and all(by == SOURCE for by in used))

    @classmethod
    def batch_timeout(cls) -> timedelta | None:
        """Return the shortest `batch_timeout` of its batchers; None without any."""
        timeouts = (batcher.batch_timeout for batcher in cls.batchers.values() if isinstance(batcher, Batcher))
        return min(filter(None, timeouts), default=None)

    @classmethod
    def batch_size(cls) -> int:
        """Return the largest `batch_size` of its batchers; `BATCH_MESSAGES` if there is none."""
        batchers = (batcher.batch_size for batcher in cls.batchers.values() if isinstance(batcher, Batcher))
        return max((size for size in batchers if isinstance(size, int)), default=BATCH_MESSAGES)

    @classmethod
    def description(cls) -> str:
        """Return the docstring of the class."""
        return inspect.cleandoc(cls.__doc__ or "")

    @classmethod
    def context_of(cls, overrides: Mapping[str, Any] | None) -> BaseModel | None:
        """Return the context of a run: the context of the class with some fields overridden.

        Raises:
            PipelineError: The pipeline has no context, or a field is unknown or has an invalid value.
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
    place, why = ".".join([path, *map(str, refused["loc"])]), refusal_reason(refused)
    field = model.model_fields.get(str(refused["loc"][0])) if refused["loc"] else None
    if field is None or not field.repr or "Secret" in str(field.annotation):
        return f"{place}: {why.removesuffix('.')}."
    return f"{place}: {why}, got {shown(refused['input'])}."
