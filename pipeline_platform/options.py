"""The options of a pipeline, by Broadway's names; what cannot work is refused by option, value and way out."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from pipeline_platform import cron


def _positive(span: timedelta) -> timedelta:
    if span <= timedelta(0):
        raise ValueError(f"must be longer than nothing, got {span}")
    return span


Span = Annotated[timedelta, AfterValidator(_positive)]


def _cron(schedule: str) -> str:
    if not cron.is_cron(schedule):
        raise ValueError(f"{schedule!r} is no cron schedule: {cron.WAY_OUT}")
    return schedule


Cron = Annotated[str, AfterValidator(_cron)]


class Options(BaseModel):
    """What all options share: unknown names are refused, and nothing changes once built."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class RateLimiting(Options):
    """At most so many messages are handled in each interval, over all runs and machines.

    Intervals are aligned to the clock (an interval of a minute begins with the minute); what one leaves unused
    is gone. Backfills and replays are held to it too.
    """

    allowed_messages: PositiveInt = Field(description="Messages handled in an interval, at most.")
    interval: Span = Field(description="Length of an interval.")


class Producer(Options):
    """Where messages come from, and when it is worth a run to fetch them."""

    source: str = Field(description="Key of the resource that is the source.", min_length=1)
    concurrency: PositiveInt = Field(2, description="Tasks that read the source in one run.")
    max_runs: PositiveInt = Field(1, description="Runs that may be under way at once.")
    rate_limiting: RateLimiting | None = Field(None, description="None handles as fast as it can.")
    patience: Span = Field(
        timedelta(seconds=30),
        description="A backlog that is not worth a run gets one after so long all the same.",
    )
    interval: Span = Field(timedelta(seconds=5), description="How often the sensor looks; Dagster's floor is 5 s.")
    schedule: Cron | None = Field(
        None,
        description="Pull by the clock instead: a cron schedule in UTC, which is on by itself, and the sensor is off.",
    )
    oldest_allowed: Span | None = Field(
        None, description="A message that waits longer at the source turns the backlog check to a warning."
    )
    deduplicate_for: Span = Field(
        timedelta(days=4), description="For how long a message that comes again is known to be decided."
    )


class Processors(Options):
    """How much a run takes on, and when more is worth asking for."""

    concurrency: PositiveInt = Field(2, description="Tasks that handle messages at once.")
    max_demand: PositiveInt = Field(50_000, description="Messages that one task takes on in a run.")
    min_demand: NonNegativeInt | None = Field(
        None,
        description="A run is started once `max_demand - min_demand` messages a task can be asked for; "
        "half of max_demand if unset.",
    )
    chunk_size: PositiveInt = Field(
        1_000, description="Messages handed to prepare_messages, and failures to handle_failed, at once."
    )
    chunk_bytes: PositiveInt = Field(
        16 * 2**20,
        description="Bytes of payload in a chunk at the most; a single larger message is one chunk.",
    )

    max_message_bytes: PositiveInt = Field(
        16 * 2**20,
        le=2**30,
        description="Bytes of payload that a message may have; a larger one fails, with its payload kept. A task "
        "holds some copies of a message: give its worker as much memory before raising this.",
    )

    @model_validator(mode="after")
    def _asks_only_when_worthwhile(self) -> Self:
        if self.min_demand is not None and self.min_demand >= self.max_demand:
            raise ValueError(
                f"min_demand is {self.min_demand}, not below max_demand ({self.max_demand}): "
                "every look at the backlog would start a run. Lower it or leave it out."
            )
        return self

    @property
    def worthwhile(self) -> int:
        """Messages that make a run worth its fixed cost."""
        kept = self.max_demand // 2 if self.min_demand is None else self.min_demand
        return self.concurrency * (self.max_demand - kept)


class Batcher(Options):
    """A batcher with a callback: `handle_batch` is called for each batch, and what it returns is a table."""

    concurrency: PositiveInt = Field(1, description="Batches handled at once.")
    batch_size: PositiveInt = Field(100, description="Messages in a batch, at the most.")
    table_schema: type[BaseModel] | None = Field(
        None,
        alias="schema",
        description="Model of the data: typed columns in the table, and models again in handle_batch. "
        "Without it data is one column of JSON, and handle_batch sees decoded JSON (bytes stay bytes).",
    )

    kind: Literal["batcher"] = "batcher"


class TableBatcher(Options):
    """A batcher without a callback: the rows that handling wrote are its table, typed by a model."""

    table_schema: type[BaseModel] = Field(alias="schema", description="Model of the data: the table's columns.")
    batch_size: PositiveInt = Field(1_000_000, description="Rows in a file, at the most.")

    kind: Literal["table"] = "table"


class Retention(Options):
    """How long windows are kept, by their age; None keeps them for ever. Open failures are always kept."""

    messages: Span | None = Field(timedelta(days=30), description="Raw deliveries: how far back a replay reaches.")
    batchers: Span | None = Field(None, description="The batchers' tables.")
    failed: Span | None = Field(timedelta(days=90), description="Closed failures.")
