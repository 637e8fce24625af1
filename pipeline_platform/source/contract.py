"""The contract of a source, which every connector implements.

A connector is a subclass of a family: `LeasedSource` (the server tracks leases), `LogSource` (the platform tracks
positions) or `ConnectedSource` (the open connection tracks deliveries).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, ClassVar, NamedTuple, Self

import pyarrow as pa
from pydantic import BaseModel, Field, PrivateAttr, model_validator

from pipeline_platform.model.actions import LEASED, AckActions, AckPolicy
from pipeline_platform.model.message import DELIVERIES
from pipeline_platform.model.retry import Backoff
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.clients import close_clients
from pipeline_platform.source.errors import Errors
from pipeline_platform.source.errors import SourceAwayError as SourceAwayError  # noqa: PLC0414 - part of the contract
from pipeline_platform.source.errors import SourceError as SourceError  # noqa: PLC0414
from pipeline_platform.source.metadata import as_json
from pipeline_platform.source.offsets import Positions
from pipeline_platform.source.options import SourceOptions
from pipeline_platform.source.pauses import PAUSES, Patience, poll
from pipeline_platform.source.readers import Reader, others


class Share(BaseModel, frozen=True, extra="forbid"):
    """The part of a receive that one task reads. `at`, in the source's own format, is plain JSON without payloads.

    Attributes:
        window: Partition key of the messages; None for the window of the run.
        messages: Maximum messages to read.
    """

    at: dict[str, Any] = {}
    window: str | None = None
    messages: int

    @classmethod
    def equal(cls, messages: int, parts: int, per_call: int = 1) -> "list[Share]":
        """Return shares of `messages`, at most `parts`, whose numbers of calls differ by one at most."""
        calls = -(-messages // per_call)
        parts = min(parts, calls)
        sizes = [(calls // parts + (part < calls % parts)) * per_call for part in range(parts)]
        return [cls(messages=size - (sum(sizes) - messages) * (part == parts)) for part, size in enumerate(sizes, 1)]


class Refused(NamedTuple):
    """A message whose acknowledgement a source refused.

    Attributes:
        ack_id: Id of the message at the source.
        reason: Description by the source.
        lost: Whether the receive no longer leases the message, so that a retry is useless: another receive will find it
            decided, or it was deleted with its queue.
    """

    ack_id: str
    reason: str
    lost: bool = False


LeasedIds = Callable[[], Iterable[tuple[str, Sequence[str]]]]
"""Reads the recorded messages of a receive: `ack_id`s in groups of the same `ack_ref`. Each call reads the lake.

Messages are recorded after `read`, so it returns nothing while `read` runs, although messages are leased by then. An
`ack_ref` may occur several times, each time with some of its ids. A source whose server tracks `receive_id` need not
call it.
"""


class Source(SourceOptions, ABC):
    """A queue, log or table from which messages are leased, and to which they are acknowledged.

    A connector is a pydantic model of its options, and does not import Dagster. It is pickled to Spark tasks, so it
    creates clients and connections in the process that uses them, at the first use.

    Every source guarantees:

    - Every method that contacts the server raises `SourceError` if the server is unavailable or the source does not
      exist.
    - `plan` and `read` give a message to one receive at a time, until it is acknowledged, abandoned or its lease
      expires. The process may crash at any point.
    - `message_id` is the same at every delivery of a message, if `has_identity`. If not, redelivered messages are
      handled again.
    - `redelivered` is true for every message that may have been delivered before. A source that does not know this sets
      it always. A delivery without it is always handled, even if another message has the same id.
    - `acknowledge` may be called twice for the same messages, and never affects messages that another receive has
      leased.
    """

    has_identity: ClassVar[bool] = True
    """Whether a message has a permanent id. A class may determine it from its options, with a property.

    If not, a redelivered message is handled again, and `check_source` does not require the same id. `read` must then
    give each delivery a new `message_id`: a message whose id was decided before counts as a duplicate. `extend` should
    return False once the messages are redelivered, so that the run does not decide them.
    """
    reads_again: ClassVar[bool] = False
    """Whether reading the same share twice returns the same messages.

    A run records the messages that it reads, and reads a share once. But a crashed task is retried, and reads its share
    again. If this is true, it gets the same messages. If not, it may get other messages or none, and the first messages
    are redelivered to a later receive when their lease expires. `check_source` verifies it if it is true.
    """
    acknowledges_by_id: ClassVar[bool] = True
    """Whether `acknowledge` does anything. If not, `finish` acknowledges a whole receive."""
    dates_by_own_clock: ClassVar[bool] = True
    """Whether `published_at` is set by the source's own clock.

    If so, a redelivered message is looked up only in later decisions. If not, `published_at` is only displayed.
    """
    leases_partitions: ClassVar[bool] = False
    """Whether a partition is leased to one receive at a time, until its messages are acknowledged.

    If so, the runs of a pipeline that keeps the order of the source's partitions (`partition_by = "source"`) run
    concurrently. If not, they take turns.
    """
    gives_back_offsets: ClassVar[bool] = False
    """Whether `give_back` excludes a part of a receive from what `finish` acknowledges."""
    in_tasks: ClassVar[bool] = True
    """Whether Spark tasks read and acknowledge. If not, the run's own process does.

    In tasks, each task has a copy of the source, which connects separately: `acknowledge` has no access to connections
    that `read` opened. Otherwise all payloads pass through one process, and parts are acknowledged one after the other.
    If the process that acknowledges must be the one that read, derive from `ConnectedSource`: executors that start a
    process for each step are then refused.
    """
    poll_pauses: ClassVar[Backoff] = PAUSES
    """Pauses between the looks of `wait`. Set longer pauses if `backlog` costs money."""

    on_success: str = Field(
        "ack",
        description="Ack action of a handled message. After an action that does not end the message, the source "
        "redelivers it; it is not handled twice, but acknowledged with the same action again.",
    )
    on_failure: str = Field(
        "ack",
        description="Ack action of a failed message. After an action that does not end the message, the source "
        "redelivers it; otherwise it exists only in the table of failed messages.",
    )

    _positions: Positions | None = PrivateAttr(default=None)

    @classmethod
    def without_partitions(cls, options: Mapping[str, Any]) -> str | None:
        """Return why a source with these options sets no partition, and the fix; None if it can set one.

        The value of an option from the environment is not known yet: it is a `dg.EnvVar`.
        """
        return None

    def __getstate__(self) -> dict[Any, Any]:
        """Return the state without clients and connections: a source is pickled to tasks."""
        state = super().__getstate__()
        # The control store is left out too: reading tasks do not plan, and its URL may contain a password.
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
        """Canonical names of the places that the source reads: a queue, or topics with a group; empty if unknown.

        Sources that would receive each other's messages have the same place, whatever their names are and however the
        address is written. It contains no credentials, because errors show it, and is computed without a connection.
        """
        return frozenset()

    @property
    def ack_actions(self) -> AckActions:
        """The valid ack actions."""
        return LEASED

    @property
    def ack_policy(self) -> AckPolicy:
        """The ack policy, for tasks that only handle messages."""
        return AckPolicy(self.name, self.on_success, self.on_failure, self.ack_actions)

    @property
    def extend_every_s(self) -> float | None:
        """Seconds between two calls of `extend`; None if nothing expires."""
        return None

    @property
    def patience(self) -> Patience:
        """Retries of a run's first request while the source is unavailable."""
        return Patience()

    def open(self, positions: Positions) -> None:
        """Prepare for a run or a sensor, with the positions of logs. Connect at the first use, not here."""
        self._positions = positions

    @property
    def deployment(self) -> Reader | None:
        """The deployment that reads, for sources with marks of readers; None if `open` was not called."""
        return self._positions.reader() if self._positions else None

    def others(self, readers: Iterable[Reader] | None) -> str | None:
        """Return the value of `Backlog.others` for marks of readers; None if unknown."""
        me = None if readers is None else self.deployment
        return others(readers or (), me) if me else None

    def close(self) -> None:
        """Close this process's clients and connections, at the end of a run: by default the `per_process` clients."""
        close_clients(self)

    @contextmanager
    def explaining(self, fix: str, *, refused: Errors = (), away: Errors = ()) -> Iterator[None]:
        """Raise errors of a client library as errors of this source, with its places and the fix.

        `away`, unless in `refused`, are errors of an unavailable server. They close the clients: the next use connects.
        """
        try:
            yield
        except (*refused, *away) as error:
            if is_away := not isinstance(error, refused):
                self.close()
            parts = "; ".join(sorted(self.places)), type(error).__name__, str(error)  # `TimeoutError` has no text
            raise self.error(f"{': '.join(filter(None, parts))}. {fix}", away=is_away) from None

    @abstractmethod
    def backlog(self) -> Backlog:
        """Return the backlog. Sensors call it, so it must be quick, lease nothing and not wait for messages."""

    def backlog_up_to(self, most: int) -> Backlog:
        """Return the backlog, counted no further than a sensor needs: `most`, 1 or more.

        A source that is slow at counting a large backlog can stop early here.
        """
        return self.backlog()

    def wait(self, seconds: float, taken: int = 0) -> bool:
        """Return True as soon as messages may be waiting, or False after `seconds` without any. It leases nothing.

        It is called several times in a row, for a few seconds each, and not while another method runs. A receive after
        True may still get nothing: another run has leased the messages or their partition, or the source does not
        report its backlog. The caller then pauses before the next call.

        Args:
            seconds: Longest wait; 0 looks once.
            taken: Messages of the backlog to ignore: other runs will lease them or, if it `counts_held`, have done so.
        """

        def may_be_waiting() -> bool:
            messages = self.backlog_up_to(taken + 1).messages
            return messages is None or messages > taken

        return poll(may_be_waiting, seconds, self.poll_pauses)

    def location(self, message_id: str) -> str | None:
        """Return where a message is at the source now, as text; None if the source cannot look up a single message."""
        return None

    @abstractmethod
    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """Divide up to `demand` messages into at most `concurrency` shares, and reserve them if the source can.

        Args:
            demand: Maximum messages of the run.
            concurrency: Tasks that will read.
            receive_id: Receive that leases the messages.
        """

    @abstractmethod
    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Read one share: batches of the schema `DELIVERIES`, at most `share.messages` rows in all.

        It runs in a Spark task or, for a small receive and if not `in_tasks`, in the run's own process.
        """

    @abstractmethod
    def acknowledge(self, action: str, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Acknowledge messages, in the source's largest unit; return the refused messages.

        Args:
            action: Valid ack action.
            ack_ref: Group of the messages.
            ack_ids: Ids of the messages at the source.

        Raises:
            SourceError: A whole call failed; earlier calls stay effective.
        """

    def finish(self, receive_id: str, held: LeasedIds) -> None:
        """Finish a fully acknowledged receive. It may be called twice; if it raises, the next run repeats it.

        `held` returns all messages of the receive, also those that `give_back` released.
        """

    def give_back(self, receive_id: str, not_begun: LeasedIds, begun: LeasedIds) -> None:
        """Release the unstarted messages of a stopped run, before `finish`. It may be called twice.

        It is only called if `gives_back_offsets`: other sources get an ack action for each message.

        Args:
            receive_id: The receive.
            not_begun: Messages of the receive to redeliver.
            begun: All other messages of the receive.
        """

    def extend(self, receive_id: str, held: LeasedIds) -> bool:
        """Renew the leases of a receive; return False if it no longer has them.

        It is called every `extend_every_s` seconds during a run, in the run's own process; if that is None, only before
        a decision.

        Raises:
            SourceError: The leases are lost for a known reason: the run ends with this error.
        """
        return True

    def abandon(self, receive_id: str, held: LeasedIds) -> None:
        """Release all messages of a crashed receive. It may be called twice, and for a receive that leased nothing.

        `held` returns the messages that it recorded before the crash; it may have leased more.
        """

    def holders(self) -> set[str]:
        """Return receives that lease messages until they are abandoned; empty for a source whose leases expire."""
        return set()

    def send(self, payloads: Iterable[bytes], metadata: Iterable[Mapping[str, Any] | None] | None = None) -> int:
        """Send messages to the source; return their number once they are stored durably.

        Args:
            payloads: One per message.
            metadata: Metadata in the source's format, a mapping or None for each payload.

        Raises:
            SourceError: The source does not support sending, or refused some messages.
        """
        raise self.error(f"{type(self).__name__} does not support send(). Send messages by other means.")

    def labelled(self, labels: Mapping[str, str]) -> Mapping[str, Any] | None:
        """Return metadata with which `send` attaches labels to a message; None if the source cannot store labels.

        Each label is a line of text; there are up to eight, of at most 500 characters.
        """
        return labels

    def check_ready(self) -> None:
        """Raise `SourceError` if a receive would fail. A run calls it before it leases anything."""
        self.backlog()

    def deliveries(
        self,
        *,
        message_id: Sequence[str] | pa.Array,
        data: Sequence[bytes] | pa.Array,
        ack_ref: str | Sequence[str] | pa.Array,
        ack_id: Sequence[str] | pa.Array | None = None,
        metadata: Sequence[Mapping[str, Any] | None] | pa.Array | None = None,
        attempt: Sequence[int] | pa.Array | None = None,
        redelivered: Sequence[bool] | pa.Array | bool = True,
        published_at: Sequence[datetime | None] | pa.Array | None = None,
        partition: Sequence[str | None] | pa.Array | str | None = None,
        sequence: Sequence[int | None] | pa.Array | None = None,
    ) -> pa.RecordBatch:
        """Build a batch of `DELIVERIES` from columns, for connectors to yield from `read`.

        `ack_id` is `message_id` by default. `published_at` is the same at every delivery, and set by the source's own
        clock unless `dates_by_own_clock` is false. Leave it out if the source does not guarantee that. Bytes in
        `metadata` are text if they are UTF-8, else `{"base64": ...}`. In an Arrow array `metadata` is already JSON.
        """
        rows = len(message_id)
        if metadata is not None and not isinstance(metadata, pa.Array):
            metadata = pa.array([as_json(m) if m else None for m in metadata], pa.string())

        def column(value: Any) -> Any:
            return pa.repeat(value, rows) if isinstance(value, str | bool | int) else value

        columns = {
            "source": self.name,
            "message_id": message_id,
            "data": data,
            "metadata": metadata,
            "ack_ref": ack_ref,
            "ack_id": message_id if ack_id is None else ack_id,
            "attempt": 1 if attempt is None else attempt,
            "redelivered": redelivered,
            "published_at": published_at,
            "partition": partition,
            "sequence": sequence,
        }
        filled = {name: pa.nulls(rows) if value is None else column(value) for name, value in columns.items()}
        return pa.RecordBatch.from_pydict(filled, schema=DELIVERIES)
