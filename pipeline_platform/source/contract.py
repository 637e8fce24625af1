"""The contract of a source: what a connector does, and what it promises."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, ClassVar, NamedTuple

import pyarrow as pa
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from pipeline_platform.model.message import DELIVERIES, check_action

Action = Annotated[str, AfterValidator(check_action)]
"""`ack`, `noop`, `nack` or `nack:<seconds>`; see `check_action`."""


class SourceError(Exception):
    """A source cannot do what is asked of it: its message names the option, the value and the way out."""


class Backlog(NamedTuple):
    """What waits at a source.

    Attributes:
        messages: How many could be leased now, None where the source cannot tell.
        oldest: When the oldest of them came, None where none waits or the source cannot tell.
    """

    messages: int | None
    oldest: datetime | None = None


class Share(BaseModel, frozen=True, extra="forbid"):
    """What one task reads: the source's own description of a part of a receive.

    Attributes:
        at: Where to read, in the source's own words; plain JSON, no payloads.
        window: The partition key its messages belong to, None for the window of the run.
        messages: At most how many, for the task to stop at.
    """

    at: dict[str, Any] = {}
    window: str | None = None
    messages: int


class Refused(NamedTuple):
    """An entry that a source would not acknowledge, extend or release.

    Attributes:
        ack_id: Whose.
        reason: The source's words.
        lost: The lease is somebody else's by now: nothing is left to try, and nothing is lost, for
            whoever holds the message finds it decided.
    """

    ack_id: str
    reason: str
    lost: bool = False


class Source(BaseModel, ABC):
    """Somewhere that messages come from and are acknowledged to.

    A connector is one subclass in one file: a pydantic model of its options, free of Dagster, for Spark tasks
    use it too. It is copied to them by pickling, so clients and connections are made where they are used.

    What it promises:

    - `plan` and `read` lease: what one receive was given, no other is given until it is acknowledged,
      released or its lease is over. Both may die at any point; a lease that nobody renews runs out.
    - `message_id` is the same at every delivery of a message.
    - `redelivered` is true for every message that may have been delivered before. A source that knows says it
      exactly; one that does not says true.
    - `ack` may be called twice for the same messages, by anyone who knows `ack_ref` and `ack_ids`.
    - `ack`, `release` and `extend` act under the lease: they never touch what another receive holds now.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    acknowledges_in_tasks: ClassVar[bool] = True
    """False where one connection owns the messages, so that the driver has to acknowledge."""

    name: str = Field(description="Name of the source; part of every message's identity, so never change it.")
    lease_s: float = Field(60.0, gt=0, description="Seconds that a lease lasts when nobody extends it.")
    on_success: Action = Field(
        "ack",
        description="Told of a handled message: ack, noop, nack or nack:<seconds>. All but ack leave it at the source, "
        "which delivers it again: it is known to be handled then, and told the same once more.",
    )
    on_failure: Action = Field(
        "ack",
        description="Told of a failed message. With noop or nack the source delivers it again; "
        "with ack the failed-message table alone keeps it.",
    )

    @abstractmethod
    def backlog(self) -> Backlog:
        """Say what waits. Called by sensors: quick, no lease, no long poll.

        Raises:
            SourceError: It cannot be reached, or is not there.
        """

    @abstractmethod
    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """Divide up to `demand` messages into at most `concurrency` shares, leasing them where one can.

        Args:
            demand: How many messages the run may take on.
            concurrency: How many tasks will read.
            receive_id: Whose lease it is; the token of `extend`.

        Raises:
            SourceError: It cannot be reached, or is not there.
        """

    @abstractmethod
    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Read one share: batches of the schema `DELIVERIES`, at most `share.messages` rows in all.

        In a Spark task; of a receive of up to a hundred messages in the run's own process.
        """

    @abstractmethod
    def ack(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Tell the source that these messages are done with, in its largest unit; return what it refused.

        Raises:
            SourceError: A whole call failed; earlier ones hold.
        """

    @abstractmethod
    def release(self, ack_ref: str, ack_ids: Sequence[str], delay_s: int = 0) -> list[Refused]:
        """Give messages back, to be delivered again after `delay_s` seconds; return what was refused."""

    def extend(self, receive_id: str) -> bool:
        """Renew a receive's leases by `lease_s` from now; False where they are not its own any more.

        The driver calls it every third of `lease_s` while the run lives. A source whose leases outlast a run
        (because renewing costs a request per ten messages) leaves it as it is.
        """
        del receive_id
        return True

    def abandon(self, receive_id: str) -> None:
        """Give back all that a receive still holds, where that can be said at once; otherwise leases run out."""
        del receive_id

    def refuse_or_pass(self) -> None:
        """Raise `SourceError` where a receive is bound to fail: called before anything is leased."""
        self.backlog()

    def deliveries(
        self,
        *,
        message_id: Sequence[str] | pa.Array,
        data: Sequence[bytes] | pa.Array,
        ack_id: Sequence[str] | pa.Array,
        ack_ref: str,
        metadata: Sequence[Mapping[str, Any] | None] | None = None,
        attempt: Sequence[int] | pa.Array | None = None,
        redelivered: Sequence[bool] | pa.Array | bool = True,
        published_at: Sequence[datetime | None] | pa.Array | None = None,
    ) -> pa.RecordBatch:
        """Build a batch of `DELIVERIES` from columns, for connectors to yield from `read`.

        `published_at` is by the source's own clock, and the same at every delivery: what was decided before a
        redelivered message was published is not looked at to find it. Leave it out where nobody vouches for that.
        """
        rows = len(message_id)
        if metadata is None:
            told = pa.nulls(rows, pa.string())
        else:
            told = pa.array([json.dumps(m, default=str) if m else None for m in metadata], pa.string())
        columns = [
            pa.repeat(self.name, rows),
            _column(message_id, pa.string()),
            _column(data, pa.binary()),
            told,
            pa.repeat(ack_ref, rows),
            _column(ack_id, pa.string()),
            pa.repeat(pa.scalar(1, pa.int32()), rows) if attempt is None else _column(attempt, pa.int32()),
            pa.repeat(redelivered, rows) if isinstance(redelivered, bool) else _column(redelivered, pa.bool_()),
            pa.nulls(rows, _TIME) if published_at is None else _column(published_at, _TIME),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=DELIVERIES)


_TIME = DELIVERIES.field("published_at").type


def _column(values: Sequence[Any] | pa.Array, type_: pa.DataType) -> pa.Array:
    return values.cast(type_) if isinstance(values, pa.Array) else pa.array(values, type_)
