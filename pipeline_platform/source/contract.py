"""The contract of a source: what every connector does, whichever family it belongs to.

A connector is one subclass of a family: `LeasedSource` (the server remembers what was given out), `LogSource` (nobody
does: a position is ours) or `ConnectedSource` (the open connection does).
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, Literal, NamedTuple, Self

import pyarrow as pa
from pydantic import BaseModel, Field, PrivateAttr, model_validator

from pipeline_platform.model.actions import LEASED, AckPolicy, Words
from pipeline_platform.model.message import DELIVERIES
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.offsets import Positions
from pipeline_platform.source.options import SourceOptions
from pipeline_platform.source.readers import Reader, others


class SourceError(Exception):
    """A source cannot do what is asked of it: its message names the option, the value and the way out.

    Attributes:
        summary: What is wrong with the source, in two or three words after its name.
    """

    summary: ClassVar[str] = "cannot be used"


class SourceAwayError(SourceError):
    """The server does not answer now. What failed so may be tried again."""

    summary = "does not answer"


BackoffType = Literal["exp", "rand", "rand_exp", "stop"]
"""How pauses grow: each twice the last, or at random, or at random up to a bound that doubles; or one try is all."""


class Patience(NamedTuple):
    """How a run waits for a source that is away.

    Attributes:
        backoff: How the pauses between tries grow.
        least_s: Seconds of the shortest pause.
        most_s: Seconds of the longest.
        within_s: Seconds after which there is no other try. A restart takes less than 30, and the run's claim and
            leases live on meanwhile.
    """

    backoff: BackoffType = "rand_exp"
    least_s: float = 0.5
    most_s: float = 5.0
    within_s: float = 30.0


class Share(BaseModel, frozen=True, extra="forbid"):
    """What one task reads: `at`, the source's own description, is plain JSON without payloads.

    Attributes:
        window: Partition key of its messages; None for the window of the run.
        messages: Messages to read at the most.
    """

    at: dict[str, Any] = {}
    window: str | None = None
    messages: int


class Refused(NamedTuple):
    """An entry that a source would not acknowledge.

    Attributes:
        ack_id: Of the message.
        reason: The source's words.
        lost: The receive no longer holds the message, and there is nothing left to try: another receive will find it
            decided, or it is gone with its queue.
    """

    ack_id: str
    reason: str
    lost: bool = False


Held = Callable[[], Iterable[tuple[str, Sequence[str]]]]
"""Reads what a receive holds: `ack_id`s in groups of one `ack_ref`. It costs a look at the lake for each call.

It knows what was written down, so it gives nothing while `read` is under way, though messages are leased then. One
`ack_ref` may come several times, each with some of its ids. A server that holds by `receive_id` need not call it.
"""


class Source(SourceOptions, ABC):
    """Messages are leased from a source, and acknowledged there.

    A connector is a pydantic model of its options, and does not import Dagster. It is pickled to Spark tasks, so it
    makes clients and connections in the process that uses them, at the first use.

    What every source promises:

    - Whatever asks the server raises `SourceError` where it cannot be reached, or is not there.
    - `plan` and `read` give a message to one receive at a time, until it is acknowledged, abandoned or its lease is
      over. The process may die at any point.
    - `message_id` is the same at every delivery of a message, where `has_identity`. Where not, messages that come
      again are handled again.
    - `redelivered` is true for every message that may have been delivered before. A source that cannot tell says true.
      A delivery that is not marked is always handled, even if another message has the same id.
    - `acknowledge` may be called twice for the same messages, and never touches what another receive holds.
    """

    has_identity: ClassVar[bool] = True
    """Whether a message has an id of its own. A class may decide it by its options, with a property.

    If not, a message that comes again is handled again, and `check_source` does not ask for the same id. `read` gives
    each delivery a `message_id` of its own then: a message whose id was decided before counts as a duplicate. `extend`
    should say no once the messages come again, so that the run decides none of them.
    """
    reads_again: ClassVar[bool] = False
    """Whether reading the same share twice gives the same messages.

    A run writes down what it reads, and reads a share once; but a task that dies is tried again, and reads its share
    again. If this is true, it gets the same. If not, it may get other messages, or none, and those of the first time
    come again to a later receive, when their lease is over. `check_source` asks a source that says so to prove it.
    """
    acknowledges_by_id: ClassVar[bool] = True
    """Whether `acknowledge` does anything. If not, `finish` does it for a whole receive."""
    dates_by_own_clock: ClassVar[bool] = True
    """Whether `published_at` is by the source's own clock.

    If so, a redelivered message is looked up only in what was decided since. If not, `published_at` is for display.
    """
    leases_partitions: ClassVar[bool] = False
    """Whether a partition is given to one receive at a time, until its messages are acknowledged.

    If so, the runs of a pipeline that keeps the order of the source's partitions (`partition_by = "source"`) work side
    by side. If not, they take turns.
    """
    gives_back_offsets: ClassVar[bool] = False
    """Whether `give_back` leaves a part of a receive out of what `finish` acknowledges."""
    in_tasks: ClassVar[bool] = True
    """Whether Spark tasks read and acknowledge. If not, the run's own process does.

    In tasks, each has a copy of the source, which connects by itself: nothing that `read` opened is there in
    `acknowledge`. If not, all payloads go through one process, and one part after the other is acknowledged. Where that
    has to be the process that read, derive from `ConnectedSource`: executors that give each step a process are refused
    then.
    """

    name: str = Field(description="Name of the source; part of every message's identity, so never change it.")
    on_success: str = Field(
        "ack",
        description="How a handled message is acknowledged. With a word that does not end it the source delivers it "
        "again; it is not handled twice, but acknowledged by the same word again.",
    )
    on_failure: str = Field(
        "ack",
        description="How a failed message is acknowledged. With a word that does not end it the source delivers it "
        "again; otherwise it is only in the table of failed messages.",
    )

    _positions: Positions | None = PrivateAttr(default=None)

    @classmethod
    def without_partitions(cls, options: Mapping[str, Any]) -> str | None:
        """Why a source with these options never says in which partition a message is, and how it may; None if it may.

        An option that comes from the environment is not known yet: it is a `dg.EnvVar`.
        """
        return None

    def __getstate__(self) -> dict[Any, Any]:
        """Leave out what this process opened: a source is pickled to tasks, clients and connections are not."""
        state = super().__getstate__()
        # And the control store: tasks that read plan nothing, and its address may hold a password.
        private = {**(state["__pydantic_private__"] or {}), "_positions": None}
        options = {k: v for k, v in state["__dict__"].items() if k in type(self).model_fields}
        return {**state, "__dict__": options, "__pydantic_private__": private}

    @model_validator(mode="after")
    def _actions_are_known(self) -> Self:
        for option in ("on_success", "on_failure"):
            try:
                self.ack_policy.checked(getattr(self, option))
            except ValueError as error:
                raise ValueError(f"{option}: {error}") from None
        return self

    @property
    def places(self) -> frozenset[str]:
        """What the source reads: a queue, or the topics of a consumer group; empty where that is not known.

        A place is the same text for all sources that would take each other's messages, whatever their names are, and
        however they write the address. It has no credentials: errors show it. It does not connect to find it.
        """
        return frozenset()

    @property
    def words(self) -> Words:
        """What an action may be."""
        return LEASED

    @property
    def ack_policy(self) -> AckPolicy:
        """What tasks that only handle know of this source."""
        return AckPolicy(self.name, self.on_success, self.on_failure, self.words)

    @property
    def extend_every_s(self) -> float | None:
        """Seconds between two calls of `extend`; None where nothing runs out."""
        return None

    @property
    def patience(self) -> Patience:
        """How a run waits where the source is away and nothing was done yet."""
        return Patience()

    def open(self, positions: Positions) -> None:
        """Prepare for a run or a sensor, with what receives hold of logs. Connect at the first use, not here."""
        self._positions = positions

    @property
    def deployment(self) -> Reader | None:
        """Who reads, for a source that can be marked by it; None where `open` was not called."""
        return self._positions.reader() if self._positions else None

    def others(self, readers: Iterable[Reader] | None) -> str | None:
        """What a `Backlog` says of other deployments, by the marks that were found; None where nothing is known."""
        me = None if readers is None else self.deployment
        return others(readers or (), me) if me else None

    def close(self) -> None:
        """Close what this process opened, at the end of a run."""

    @abstractmethod
    def backlog(self) -> Backlog:
        """Count the messages that wait. Sensors call it: it is quick, leases nothing and does no long poll."""

    def backlog_up_to(self, most: int) -> Backlog:
        """Count the messages that wait, no further than is of use to a sensor: `most`, 1 or more.

        A source that takes long to count a large backlog counts less of it here.
        """
        return self.backlog()

    def whereabouts(self, message_id: str) -> str | None:
        """Say where a message is at the source now, in words; None where a source cannot be asked for one message."""
        return None

    @abstractmethod
    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """Divide up to `demand` messages into at most `concurrency` shares, and reserve them if the source can.

        Args:
            demand: Messages that the run may take on.
            concurrency: Tasks that will read.
            receive_id: The receive that holds the messages.
        """

    @abstractmethod
    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Read one share: batches of the schema `DELIVERIES`, at most `share.messages` rows in all.

        It runs in a Spark task, or in the run's own process: for a small receive, and where not `in_tasks`.
        """

    @abstractmethod
    def acknowledge(self, action: str, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Acknowledge messages, in the source's largest unit; return what it refused.

        Args:
            action: One of `words`, checked.
            ack_ref: Their group.
            ack_ids: Their ids at the source.

        Raises:
            SourceError: A whole call failed; earlier ones hold.
        """

    def finish(self, receive_id: str) -> None:
        """Finish a receive, all of which is acknowledged. It may be called twice; the next run does if it raises."""

    def give_back(self, receive_id: str, not_begun: Held, begun: Held) -> None:
        """Give back the messages that a stopped run did not begin, before `finish`. It may be called twice.

        It is only called where `gives_back_offsets`: other sources get a word for each message.

        Args:
            receive_id: The receive.
            not_begun: Its messages that come again.
            begun: All its other messages.
        """

    def extend(self, receive_id: str, held: Held) -> bool:
        """Hold a receive's messages for longer; return False if it no longer has them.

        It is called every `extend_every_s` seconds while the run lives, in the run's own process; where that is None,
        only before a decision.

        Raises:
            SourceError: It no longer has them, and the source knows why: the run ends with these words.
        """
        return True

    def abandon(self, receive_id: str, held: Held) -> None:
        """Give back everything that a dead receive holds. It may be called twice, and if it never held anything.

        `held` is what it wrote to the lake before it died; it may have leased more.
        """

    def holders(self) -> set[str]:
        """Receives that hold messages until they are abandoned. Empty for a source whose leases run out."""
        return set()

    def send(self, payloads: Iterable[bytes], metadata: Iterable[Mapping[str, Any] | None] | None = None) -> int:
        """Put messages into the source; return how many, once they are safe there.

        Args:
            payloads: One per message.
            metadata: What the source takes beside a payload, one or None for each.

        Raises:
            SourceError: It takes no messages from here, or refused some.
        """
        raise SourceError(f"source {self.name!r} takes no messages: {type(self).__name__} has no send()")

    def labelled(self, labels: Mapping[str, str]) -> Mapping[str, Any] | None:
        """The metadata by which `send` gives a message these labels; None where the source has no place for them.

        Each label is one line of text; there are up to eight, of 500 characters at most.
        """
        return labels

    def check_ready(self) -> None:
        """Raise `SourceError` if a receive is bound to fail. A run calls it before it leases anything."""
        self.backlog()

    def deliveries(
        self,
        *,
        message_id: Sequence[str] | pa.Array,
        data: Sequence[bytes] | pa.Array,
        ack_id: Sequence[str] | pa.Array,
        ack_ref: str | Sequence[str] | pa.Array,
        metadata: Sequence[Mapping[str, Any] | None] | pa.Array | None = None,
        attempt: Sequence[int] | pa.Array | None = None,
        redelivered: Sequence[bool] | pa.Array | bool = True,
        published_at: Sequence[datetime | None] | pa.Array | None = None,
        partition: Sequence[str | None] | pa.Array | str | None = None,
        sequence: Sequence[int | None] | pa.Array | None = None,
    ) -> pa.RecordBatch:
        """Build a batch of `DELIVERIES` from columns, for connectors to yield from `read`.

        `published_at` is the same at every delivery, and by the source's own clock unless `dates_by_own_clock` is
        false. Leave it out if the source does not promise that. In an Arrow array `metadata` is JSON already.
        """
        rows = len(message_id)
        if metadata is not None and not isinstance(metadata, pa.Array):
            metadata = pa.array([json.dumps(m, default=str) if m else None for m in metadata], pa.string())

        def column(value: Any) -> Any:
            return pa.repeat(value, rows) if isinstance(value, str | bool | int) else value

        columns = {
            "source": self.name,
            "message_id": message_id,
            "data": data,
            "metadata": metadata,
            "ack_ref": ack_ref,
            "ack_id": ack_id,
            "attempt": 1 if attempt is None else attempt,
            "redelivered": redelivered,
            "published_at": published_at,
            "partition": partition,
            "sequence": sequence,
        }
        filled = {name: pa.nulls(rows) if value is None else column(value) for name, value in columns.items()}
        return pa.RecordBatch.from_pydict(filled, schema=DELIVERIES)
