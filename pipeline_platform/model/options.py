"""The options of a pipeline, by Broadway's names; what cannot work is refused by option, value and way out."""

import math
import zlib
from collections.abc import Callable
from copy import deepcopy
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    PlainValidator,
    field_validator,
    model_validator,
)

from pipeline_platform.model.fields import Schema
from pipeline_platform.model.message import Message
from pipeline_platform.model.partition import PartitionBy
from pipeline_platform.model.strict_options import Cron, Duration, Options

_SPREAD = 0.25
"""Part of a pause that is added at random, so that messages that failed together do not all come back together."""


class Backoff(Options):
    """Pauses that grow: `first`, then each `factor` times the one before it, up to `most`."""

    first: Duration = Field(description="Pause before the second attempt.")
    factor: float = Field(2.0, ge=1, le=100, description="Each pause is so many times the one before it.")
    most: Duration = Field(timedelta(hours=1), description="The longest pause.")

    @model_validator(mode="after")
    def _grows(self) -> Self:
        if self.most < self.first:
            raise ValueError(
                f"most is {self.most}, less than first ({self.first}): raise it, or give Retry one timedelta as backoff"
            )
        return self


class Retry(Options):
    """Retries a failed message after a pause. A message that fails at the last attempt is dead."""

    max_attempts: int = Field(ge=1, le=1_000, description="Attempts in all; with 1 no message is retried.")
    backoff: Duration | Backoff = Field(
        Backoff(first=timedelta(minutes=1)),
        description="The pause after each failure: always the same, or a Backoff. Up to a quarter is added to it.",
    )

    def is_last(self, attempt: int) -> bool:
        """Whether a message that fails at this attempt is dead."""
        return attempt >= self.max_attempts

    def due_at(self, source: str, message_id: str, attempt: int, failed_at: datetime) -> datetime:
        """When a message that failed at this attempt is to be retried. What is added is the same at each call."""
        spread = zlib.crc32("\0".join((source, message_id, str(attempt))).encode()) / 2**32
        return failed_at + self._pause(attempt) * (1 + _SPREAD * spread)

    def _pause(self, attempt: int) -> timedelta:
        if not isinstance(self.backoff, Backoff):
            return self.backoff
        first, factor, most = self.backoff.first, self.backoff.factor, self.backoff.most
        grown = (attempt - 1) * math.log(factor)  # as a power it may be more than a float holds
        return most if grown >= math.log(most / first) else first * math.exp(grown)


BATCH_BYTES = 128 * 2**20
BATCH_MESSAGES = 10**6
"""Messages in a batch, at the most, whatever a splitter says."""

WORTH_IT = timedelta(seconds=20)
"""A run that works for so long spends less than a tenth of its time on what every run costs, 1 to 2 s."""
_MAX_DEMAND = 1_000_000
"""In place of the default of `max_demand` where a `target_run_time` sizes runs."""


class RateLimiting(Options):
    """The most messages that are handled in each interval, over all runs and machines, backfills and replays included.

    Intervals are aligned to the clock: an interval of a minute starts with the minute. Unused permits of an interval
    expire with it.
    """

    allowed_messages: int = Field(ge=1, le=10**12, description="The most messages handled in an interval.")
    interval: Duration = Field(
        description="Length of an interval. Below 0.1 s fewer messages are handled than allowed, because each interval "
        "costs a transaction: prefer 100 messages per 0.1 s to 1 per millisecond."
    )


class Producer(Options):
    """Where messages come from, and when it is worth a run to fetch them."""

    source: str = Field(description="Key of the resource that is the source.", min_length=1)
    concurrency: int = Field(2, ge=1, le=1_000, description="Tasks that read the source in one run.")
    max_runs: int = Field(1, ge=1, le=1_000, description="Runs that may be under way at once.")
    rate_limiting: RateLimiting | None = Field(None, description="None handles as fast as it can.")
    patience: Duration = Field(
        timedelta(seconds=30),
        description="A backlog that is not worth a run gets one after so long all the same.",
    )
    interval: Duration = Field(timedelta(seconds=5), description="How often the sensor looks; Dagster's floor is 5 s.")
    schedule: Cron | None = Field(
        None,
        description="Pull by the clock instead: a cron schedule in UTC, which is on by itself, and the sensor is off.",
    )
    oldest_allowed: Duration | None = Field(
        None, description="A message that waits longer at the source turns the backlog check to a warning."
    )
    deduplicate_for: Duration = Field(
        timedelta(days=4), description="For how long a message that comes again is known to be decided."
    )


class Processors(Options):
    """How much a run takes on, and when more is worth asking for."""

    concurrency: int = Field(2, ge=1, le=10_000, description="Tasks that handle messages at once.")
    target_run_time: Duration | None = Field(
        None,
        description="How long a run should take, 20 s or more: the sensor asks for what the last runs handled in so "
        "long. `max_demand` stays the ceiling, and is 1,000,000 if unset. None has each run take on up to max_demand.",
    )
    max_demand: int = Field(50_000, ge=1, le=10**8, description="Messages that one task takes on in a run, at most.")
    min_demand: int | None = Field(
        None,
        ge=0,
        le=10**8,
        description="A run is started once `max_demand - min_demand` messages a task can be asked for; "
        "half of max_demand if unset.",
    )
    chunk_size: int = Field(
        1_000,
        ge=1,
        le=10**6,
        description="Messages handed to prepare_messages, and failures to handle_failed, at once.",
    )
    chunk_bytes: int = Field(
        16 * 2**20,
        ge=1,
        le=2**30,
        description="Bytes of payload in a chunk at the most; a single larger message is one chunk.",
    )
    max_message_bytes: int = Field(
        16 * 2**20,
        ge=1,
        le=2**30,
        description="Bytes of payload that a message may have; a larger one fails, with its payload kept. A task "
        "holds some copies of a message: give its worker as much memory before raising this.",
    )
    partition_by: PartitionBy = Field(
        None,
        description="Messages of one partition are handled by one task, in the order of their source; "
        "the pipeline's partition_by if unset.",
    )
    threads: int = Field(
        1,
        ge=1,
        le=1_000,
        description="Messages that a task gives to handle_message at once: for one that waits, for a server say. They "
        "share the task's instance of the pipeline.",
    )
    rescue: bool = Field(
        False,
        description="Whether handle_failed may bring back messages that failed before their batcher: they go on to it.",
    )
    message_timeout: Duration | None = Field(
        None,
        description="How long one call may take: of handle_message, transform, partition_by or a serializer (its "
        "message fails), of prepare_messages (its chunk fails), of handle_failed (its failures are recorded as "
        "time-outs), of acknowledge, for each of its messages (the next run calls it again). With column expressions "
        "it holds for handle_failed and acknowledge only: a query of Spark cannot be timed. None waits for ever.",
    )

    @model_validator(mode="before")
    @classmethod
    def _leaves_room_to_grow(cls, given: dict[str, Any]) -> dict[str, Any]:
        return given if given.get("target_run_time") is None else {"max_demand": _MAX_DEMAND, **given}

    @model_validator(mode="after")
    def _asks_only_when_worthwhile(self) -> Self:
        if self.target_run_time is not None and self.target_run_time < WORTH_IT:
            raise ValueError(
                f"target_run_time is {self.target_run_time}, below {WORTH_IT}: what every run costs, 1 to 2 s, would "
                "be more than a tenth of it. Raise it; for latency, lower the producer's patience."
            )
        if self.target_run_time is not None and self.min_demand is not None:
            raise ValueError(
                f"min_demand is {self.min_demand} beside a target_run_time, which says what is worth a run: "
                "leave out one of them."
            )
        if self.min_demand is not None and self.min_demand >= self.max_demand:
            raise ValueError(
                f"min_demand is {self.min_demand}, not below max_demand ({self.max_demand}): "
                "every look at the backlog would start a run. Lower it or leave it out."
            )
        return self

    @property
    def per_run(self) -> int:
        """Messages that one run takes on at most; a replay may take on more."""
        return self.concurrency * self.max_demand

    @property
    def worthwhile(self) -> int:
        """Messages that make a run worth its fixed cost."""
        least = self.max_demand // 2 if self.min_demand is None else self.min_demand
        return self.concurrency * (self.max_demand - least)


class Overrides(Options):
    """Options that are changed at run time, in the control store; None leaves the class's own."""

    concurrency: int | None = Field(None, ge=1, le=10_000, description="In place of `processors.concurrency`.")
    max_demand: int | None = Field(None, ge=1, le=10**8, description="In place of `processors.max_demand`.")
    max_runs: int | None = Field(None, ge=1, le=1_000, description="In place of the producer's `max_runs`.")

    def __str__(self) -> str:
        """Return the options that are set, for people; empty if none is."""
        return ", ".join(f"{name} {value:,}" for name, value in self if value is not None)

    def processors(self, own: Processors) -> Processors:
        """The options that hold; a `min_demand` that is not below the changed `max_demand` counts as unset."""
        changed = {name: value for name in ("concurrency", "max_demand") if (value := getattr(self, name)) is not None}
        most = changed.get("max_demand", own.max_demand)
        if own.min_demand is not None and own.min_demand >= most:
            changed["min_demand"] = None
        return own.model_copy(update=changed) if changed else own

    def producer(self, own: Producer) -> Producer:
        """The options that hold."""
        return own if self.max_runs is None else own.model_copy(update={"max_runs": self.max_runs})


class Splitter(Options):
    """Says where batches end by what is in their messages: a sum, a change of day.

    `step(message, acc)` is called with each message of a batch, in order, after `handle_message`. It returns
    `("cont", acc)` to go on with another accumulator, or `("emit", acc)` to end the batch with this message. The next
    batch begins with `initial` again, and the accumulator of an `emit` is dropped, as Broadway does. A message for
    which a step raises or returns something else fails alone.

        def by_weight(message, weight):
            weight += message.data.weight
            return ("emit" if weight >= 1_000 else "cont"), weight

        Batcher(schema=Parcel, batch_size=Splitter(initial=0, step=by_weight))

    It runs in a Spark task. A batch ends too at `batch_bytes`, after a message in mode `flush`, and at a million
    messages.
    """

    initial: Any = Field(description="What the accumulator is at the beginning of each batch, which gets its own copy.")
    step: Callable[[Message, Any], tuple[Literal["emit", "cont"], Any]] = Field(
        description="Called with a message and the accumulator."
    )

    @field_validator("initial")
    @classmethod
    def _copies(cls, initial: Any) -> Any:
        try:
            deepcopy(initial)
        except Exception as error:
            raise ValueError(
                f"each batch begins with a copy of it, and it has none ({type(error).__name__})"
            ) from error
        return initial


def _size(size: object) -> int | Splitter:
    if isinstance(size, Splitter) or (type(size) is int and 1 <= size <= BATCH_MESSAGES):
        return size
    raise ValueError(f"it must be a whole number from 1 to {BATCH_MESSAGES:,}, or a Splitter(...)")


class Batcher(Options):
    """A batcher with a callback: `handle_batch` is called for each batch, and what it returns is a table.

    A batch holds messages of one window and batch key, in order of arrival.

    Data crosses from `handle_message` to `handle_batch` as JSON. With a `schema` every type that its table takes comes
    back with the very value: bool, int, float (NaN and infinity too), str, bytes, datetime, date, time, timedelta,
    Decimal, UUID, Enum, Literal, models, and lists, sets, tuples and dicts of them. Validators and serializers do not
    run again, private attributes are made anew, and extra fields come as plain JSON. Without a `schema` bytes stay
    bytes, and all else comes as plain JSON (a datetime as text). Data that does not cross fails its message.
    """

    concurrency: int = Field(1, ge=1, le=10_000, description="Batches handled at once.")
    batch_size: Annotated[int | Splitter, PlainValidator(_size)] = Field(
        100, description="Messages in a batch, at the most; or a Splitter, which says where batches end."
    )
    batch_bytes: int = Field(
        BATCH_BYTES,
        ge=1,
        le=2**30,
        description="Bytes in a batch, at the most: payloads as delivered, and data as handled. A single larger "
        "message is a batch.",
    )
    batch_timeout: Duration | None = Field(
        None,
        description="How long messages wait at the source for a batch to fill: the sensor's `patience` is no longer "
        "than this.",
    )
    partition_by: PartitionBy = Field(
        None,
        description="Batches hold messages of one partition, and those of a partition are handled by one task, in the "
        "order of their source; the pipeline's partition_by if unset.",
    )
    message_timeout: Duration | None = Field(
        None,
        description="How long one call may take: of handle_batch (its batch fails), a splitter, a decoder or a "
        "serializer (its message fails), handle_failed (its failures are recorded as time-outs). None waits for ever.",
    )
    table_schema: Schema | None = Field(
        None,
        alias="schema",
        description="Model of the data: typed columns in the table, and models in handle_batch. Without it data is one "
        "column of JSON, and plain JSON in handle_batch.",
    )
    rescue: bool = Field(
        False,
        description="Whether handle_failed may bring back messages that failed in handle_batch: they count as handled.",
    )


class TableBatcher(Options):
    """A batcher without a callback: the rows that handling wrote are its table, typed by a model."""

    table_schema: Schema = Field(alias="schema", description="Model of the data: the table's columns.")
    batch_size: int = Field(1_000_000, ge=1, le=10**8, description="Rows in a file, at the most.")


class Retention(Options):
    """How long windows are kept, by their age; None keeps them for ever. Open failures are always kept."""

    messages: Duration | None = Field(timedelta(days=30), description="Raw deliveries: how far back a replay reaches.")
    batchers: Duration | None = Field(None, description="The batchers' tables.")
    failed: Duration | None = Field(timedelta(days=90), description="Closed failures.")
