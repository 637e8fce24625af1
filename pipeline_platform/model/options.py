"""Options of a pipeline, with Broadway's names."""

from collections.abc import Callable
from copy import deepcopy
from datetime import timedelta
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from pipeline_platform.model.columns.fields import Schema
from pipeline_platform.model.message import Message
from pipeline_platform.model.partition import Only, PartitionBy
from pipeline_platform.model.retry import Backoff
from pipeline_platform.model.strict_options import Cron, Duration, Options, Requirement

DEFAULT_BATCH_BYTES = 128 * 2**20
BATCH_MESSAGES = 10**6
"""Most messages in a batch, also with a splitter."""

WORTH_IT = timedelta(seconds=20)
"""Shortest `target_run_time`: the fixed cost of a run, 1 to 2 s, stays below a tenth of it."""
_PATIENCE_OF_RUNS = timedelta(seconds=30)
"""Default of `patience` without `idle_timeout`: a run costs much more than a round."""
_MAX_DEMAND = 1_000_000
"""Default of `max_demand` where a `target_run_time` is set."""


class RateLimiting(Options):
    """A limit of messages per interval, over all runs and machines, retries and replays included.

    Intervals are aligned to the clock: an interval of a minute starts with the minute. Unused permits of an interval
    expire with it.
    """

    allowed_messages: int = Field(ge=1, le=10**12, description="Most messages handled in an interval.")
    interval: Duration = Field(
        description="Length of an interval. Each interval costs a transaction, so below 0.1 s fewer messages are "
        "handled than allowed: prefer 100 messages per 0.1 s to 1 per millisecond."
    )


class Breaker(Options):
    """Pauses a producer while most of its messages fail, for example because a service is down.

    Failures that are never retried do not count. After a pause, a run receives a few messages: if most of them fail as
    well, the next pause is longer.
    """

    share: float = Field(0.5, gt=0, le=1, description="Share of failed messages from which the producer pauses.")
    of_last: int = Field(1_000, ge=1, le=10**8, description="Number of the last messages that this share refers to.")
    pause: Backoff = Field(
        Backoff(first=timedelta(seconds=30), most=timedelta(minutes=10)), description="Pauses between two attempts."
    )


class Producer(Options):
    """Limits, patience and schedule of the runs that pull from one source."""

    source: str = Field(description="Key of the source among the resources.", min_length=1)
    only: Only = Field(
        None,
        description="Function of a message that returns whether the pipeline handles it. A message for which it "
        "returns False is skipped: no other callback gets it. None: all messages.",
    )
    concurrency: int = Field(2, ge=1, le=1_000, description="Tasks that read the source in one run.")
    max_runs: int = Field(1, ge=1, le=1_000, description="Most runs at the same time.")
    rate_limiting: RateLimiting | None = Field(None, description="Limit of messages per interval. None: no limit.")
    patience: Duration = Field(
        timedelta(seconds=0.2),
        description="Longest wait for a backlog that is worth a run or a round: after this time a smaller backlog "
        "starts one. If idle_timeout is None, the default is 30 s.",
    )
    idle_timeout: Duration | None = Field(
        timedelta(seconds=30),
        description="A run that the sensor starts continues in rounds after its first receive, and ends when no "
        "message has arrived for this time. A round receives the waiting messages at once, so a message is stored "
        "about a second after it arrives. None: a run receives once.",
    )
    breaker: Breaker | None = Field(None, description="Pauses the producer while most messages fail. None: never.")
    interval: Duration = Field(
        timedelta(seconds=5), description="Time between two ticks of the sensor; Dagster allows 5 s or more."
    )
    schedule: Cron | None = Field(
        None,
        description="Cron schedule in UTC that starts runs in place of the sensor. The schedule is on by default, and "
        "the sensor off.",
    )
    oldest_allowed: Duration | None = Field(
        None, description="Age of a message at the source above which the backlog check warns. None: no warning."
    )
    deduplicate_for: Duration = Field(
        timedelta(days=4), description="Time for which a redelivery of a decided message is recognised as a duplicate."
    )

    @model_validator(mode="before")
    @classmethod
    def _is_patient_without_rounds(cls, given: dict[str, Any]) -> dict[str, Any]:
        is_in_rounds = given.get("idle_timeout", True) is not None
        return given if is_in_rounds else {"patience": _PATIENCE_OF_RUNS, **given}


class Processors(Options):
    """Size of a run, the backlog that starts a run, and how messages are handled."""

    concurrency: int = Field(2, ge=1, le=10_000, description="Tasks that handle messages in parallel.")
    target_run_time: Duration | None = Field(
        None,
        description="Desired duration of a run, 20 s or more: the sensor requests as many messages as the last runs "
        "handled in this time, up to `max_demand`, whose default is then 1,000,000. None: a run requests up to "
        "max_demand.",
    )
    max_demand: int = Field(50_000, ge=1, le=10**8, description="Most messages that one task handles in a run.")
    min_demand: int | None = Field(
        None,
        ge=0,
        le=10**8,
        description="A run starts when the sensor can request `max_demand - min_demand` messages per task. None: half "
        "of max_demand.",
    )
    chunk_size: int = Field(
        1_000,
        ge=1,
        le=10**6,
        description="Most messages in a call of prepare_messages, and most failures in a call of handle_failed.",
    )
    chunk_bytes: int = Field(
        16 * 2**20,
        ge=1,
        le=2**30,
        description="Most bytes of payload in a chunk. A larger message is a chunk alone.",
    )
    max_message_bytes: int = Field(
        16 * 2**20,
        ge=1,
        le=2**30,
        description="Most bytes in the payload of a message. A larger message fails, and its payload is kept. A task "
        "has several copies of a message in memory: give the workers more memory before you raise this.",
    )
    partition_by: PartitionBy = Field(
        None,
        description="Partition of a message: one task handles all messages of a partition, in the order of the source. "
        "None: the pipeline's partition_by.",
    )
    on_failure: Literal["continue", "hold"] = Field(
        "continue",
        description="continue: after a failure, later messages of its partition are handled. hold: they wait, as "
        "failures of the kind `held`, until the earlier failure is resolved. hold requires handle_message, "
        "partition_by and retry.",
    )
    threads: int = Field(
        1,
        ge=1,
        le=1_000,
        description="Parallel calls of handle_message in a task, for a callback that waits for a server. The threads "
        "share one instance of the pipeline.",
    )
    rescue: bool = Field(
        False,
        description="Whether handle_failed may rescue messages that failed before batching; they continue to their "
        "batcher.",
    )
    message_timeout: Duration | None = Field(
        None,
        description="Timeout of one call of handle_message, transform, only, partition_by or a serializer (the message "
        "fails), prepare_messages (the chunk fails), handle_failed (its failures are recorded as timeouts), and "
        "acknowledge, per message (the next run calls it again). In the Spark lane it applies to only, handle_failed "
        "and acknowledge. None: no timeout.",
    )

    @model_validator(mode="before")
    @classmethod
    def _leaves_room_to_grow(cls, given: dict[str, Any]) -> dict[str, Any]:
        return given if given.get("target_run_time") is None else {"max_demand": _MAX_DEMAND, **given}

    @model_validator(mode="after")
    def _asks_only_when_worthwhile(self) -> Self:
        if self.target_run_time is not None and self.target_run_time < WORTH_IT:
            raise ValueError(
                f"target_run_time: must be at least {WORTH_IT}, got {self.target_run_time}. Raise it: the fixed cost "
                "of a run is 1 to 2 s. For lower latency, lower the producer's patience."
            )
        if self.target_run_time is not None and self.min_demand is not None:
            raise ValueError(
                f"min_demand: must not be set together with target_run_time, got {self.min_demand}. "
                "Remove one of them: both set the backlog that starts a run."
            )
        if self.min_demand is not None and self.min_demand >= self.max_demand:
            raise ValueError(
                f"min_demand: must be less than max_demand ({self.max_demand}), got {self.min_demand}. "
                "Lower it or remove it: otherwise every tick starts a run."
            )
        return self

    @property
    def per_run(self) -> int:
        """Most messages that one run requests; a replay may exceed it."""
        return self.concurrency * self.max_demand

    @property
    def worthwhile(self) -> int:
        """Messages that start a run."""
        least = self.max_demand // 2 if self.min_demand is None else self.min_demand
        return self.concurrency * (self.max_demand - least)


class Overrides(Options):
    """Options that are changed at run time, in the control store. None: the option of the class applies."""

    concurrency: int | None = Field(None, ge=1, le=10_000, description="Replaces `processors.concurrency`.")
    max_demand: int | None = Field(None, ge=1, le=10**8, description="Replaces `processors.max_demand`.")
    max_runs: int | None = Field(None, ge=1, le=1_000, description="Replaces the producer's `max_runs`.")

    def __str__(self) -> str:
        """Return the options that are set, as text; empty without any."""
        return ", ".join(f"{name} {value:,}" for name, value in self if value is not None)

    def processors(self, own: Processors) -> Processors:
        """Return the effective options; `min_demand` is unset if it is not less than the changed `max_demand`."""
        changed = {name: value for name in ("concurrency", "max_demand") if (value := getattr(self, name)) is not None}
        most = changed.get("max_demand", own.max_demand)
        if own.min_demand is not None and own.min_demand >= most:
            changed["min_demand"] = None
        return own.model_copy(update=changed) if changed else own

    def producer(self, own: Producer) -> Producer:
        """Return the effective options."""
        return own if self.max_runs is None else own.model_copy(update={"max_runs": self.max_runs})


def _is_copyable(value: Any) -> bool:
    try:
        deepcopy(value)
    except Exception:  # of the author's class
        return False
    return True


_Copyable = Annotated[
    Any,
    Requirement("a value that copy.deepcopy can copy", "Use plain data: each batch starts with a copy.", _is_copyable),
]


class Splitter(Options):
    """A rule that ends batches by the content of their messages, for example by a sum or at a change of day.

    `step(message, acc)` is called with each message of a batch, in order, after `handle_message`. It returns
    `("cont", acc)` to continue with a new accumulator, or `("emit", acc)` to end the batch with this message. The next
    batch starts with `initial`, and the accumulator of an `emit` is dropped, as in Broadway. If a step raises or
    returns something else, its message fails.

        def by_weight(message, weight):
            weight += message.data.weight
            return ("emit" if weight >= 1_000 else "cont"), weight

        Batcher(schema=Parcel, batch_size=Splitter(initial=0, step=by_weight))

    It runs in a Spark task. A batch also ends at `batch_bytes`, after a message in mode `flush`, and after a million
    messages.
    """

    initial: _Copyable = Field(description="Accumulator at the start of a batch. Each batch gets a copy.")
    step: Callable[[Message, Any], tuple[Literal["emit", "cont"], Any]] = Field(
        description="Function of a message and the accumulator."
    )


_BatchSize = Annotated[
    int | Splitter,
    Requirement(
        f"an int from 1 to {BATCH_MESSAGES:,} or a Splitter(...)",
        is_valid=lambda size: isinstance(size, Splitter) or (type(size) is int and 1 <= size <= BATCH_MESSAGES),
    ),
]


_SINK: Any = Field(
    None, min_length=1, description="Key of a sink among the resources, which gets the rows, too. None: no sink."
)


class Batcher(Options):
    """A batcher with a callback: `handle_batch` is called for each batch, and the table contains what it returns.

    With `table=False` it has no table: `handle_batch` is called for its effects outside the platform.

    A batch consists of messages of one window and batch key, in order of arrival.

    Data is passed from `handle_message` to `handle_batch` as JSON. With a `schema` every value arrives unchanged: bool,
    int, float (NaN and infinity, too), str, bytes, datetime, date, time, timedelta, Decimal, UUID, Enum, Literal,
    models, and lists, sets, tuples and dicts of them. A datetime whose offset to UTC has seconds arrives in UTC.
    Validators and serializers do not run again, private attributes are created again, and extra fields arrive as plain
    JSON. Fields that are stored as JSON text (`Any`, unions) arrive as plain JSON, or as their type decodes it. Without
    a `schema` bytes stay bytes, and all other data arrives as plain JSON (a datetime as text). A message fails if its
    data cannot be passed.
    """

    concurrency: int = Field(1, ge=1, le=10_000, description="Batches handled in parallel.")
    batch_size: _BatchSize = Field(
        100, description="Most messages in a batch; or a Splitter, which ends batches by their content."
    )
    batch_bytes: int = Field(
        DEFAULT_BATCH_BYTES,
        ge=1,
        le=2**30,
        description="Most bytes in a batch: payloads as delivered, and data as handled. A larger message is a batch "
        "alone.",
    )
    batch_timeout: Duration | None = Field(
        None,
        description="Longest time that messages wait at the source for a full batch: an upper bound of the producer's "
        "`patience`.",
    )
    partition_by: PartitionBy = Field(
        None,
        description="Partition of a message: a batch contains messages of one partition, and one task handles all "
        "batches of a partition, in the order of the source. None: the pipeline's partition_by.",
    )
    message_timeout: Duration | None = Field(
        None,
        description="Timeout of one call of handle_batch (the batch fails), a splitter, a decoder or a serializer (the "
        "message fails), and handle_failed (its failures are recorded as timeouts). None: no timeout.",
    )
    table_schema: Schema | None = Field(
        None,
        alias="schema",
        description="Model of the data: the table has a column per field, and handle_batch gets instances. None: the "
        "table has one column of JSON, and handle_batch gets plain JSON.",
    )
    rescue: bool = Field(
        False,
        description="Whether handle_failed may rescue messages that failed in handle_batch; they count as handled.",
    )
    table: bool = Field(
        True,
        description="Whether a table stores the messages that handle_batch returns. False: only their outcomes are "
        "stored, and the asset of the batcher shows their number.",
    )
    sink: str | None = _SINK

    @model_validator(mode="after")
    def _has_rows_for_its_sink(self) -> Self:
        if self.sink is not None and not self.table:
            raise ValueError(
                f"sink: must be None with table=False, got {self.sink!r}. Remove one: a sink gets its rows."
            )
        return self


class TableBatcher(Options):
    """A batcher without a callback: its table contains the rows that handling wrote, with the columns of a model."""

    table_schema: Schema = Field(alias="schema", description="Model of the data: the table has a column per field.")
    batch_size: int = Field(1_000_000, ge=1, le=10**8, description="Most rows in a file.")
    sink: str | None = _SINK


def has_table(batcher: Batcher | TableBatcher) -> bool:
    """Return whether a batcher has a table."""
    return isinstance(batcher, TableBatcher) or batcher.table


class Retention(Options):
    """Ages at which windows and runs are deleted. None: never. Open failures are never deleted."""

    messages: Duration | None = Field(
        timedelta(days=30), description="Age of deliveries in the table `messages`. A replay needs them."
    )
    batchers: Duration | None = Field(None, description="Age of rows in the tables of batchers.")
    failed: Duration | None = Field(timedelta(days=90), description="Age of closed failures in the table `failed`.")
    runs: Duration | None = Field(
        timedelta(days=14),
        description="Age of ended runs in Dagster, with their events and logs. Failed runs are kept four times as "
        "long, and the newest run of each window is always kept.",
    )
