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
        messages: How many could be leased now; None where the source cannot tell.
        oldest: When the oldest of them came; None where no message waits or the source cannot tell.
    """

    messages: int | None
    oldest: datetime | None = None


class Share(BaseModel, frozen=True, extra="forbid"):
    """What one task reads: the source's own description of a part of a receive.

    Attributes:
        at: Where to read, in the source's own words: plain JSON, no payloads.
        window: Partition key of its messages; None for the window of the run.
        messages: Messages to read at the most.
    """

    at: dict[str, Any] = {}
    window: str | None = None
    messages: int


class Refused(NamedTuple):
    """An entry that a source would not acknowledge, extend or release.

    Attributes:
        ack_id: Of the message.
        reason: The source's words.
        lost: Another receive holds the message by now, and will find it decided: there is nothing left to try.
    """

    ack_id: str
    reason: str
    lost: bool = False


class Source(BaseModel, ABC):
    """A place that messages come from and are acknowledged to.

    A connector is one subclass in one file: a pydantic model of its options, free of Dagster. It is pickled to Spark
    tasks, so it makes clients and connections where it uses them.

    What it promises:

    - `plan` and `read` lease: no other receive is given a message until it is acknowledged, released or its lease is
      over. Both may die at any point; a lease that nobody renews runs out.
    - `message_id` is the same at every delivery of a message.
    - `redelivered` is true for every message that may have been delivered before. A source that cannot tell says true.
    - `ack` may be called twice for the same messages, by anyone who has `ack_ref` and `ack_ids`.
    - `ack`, `release` and `extend` act under the lease: they never touch what another receive holds now.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    acknowledges_in_tasks: ClassVar[bool] = True
    """False where one connection owns the messages, so that the driver has to acknowledge."""

    name: str = Field(description="Name of the source; part of every message's identity, so never change it.")
    lease_s: float = Field(60.0, gt=0, description="Seconds that a lease lasts when nobody extends it.")
    on_success: Action = Field(
        "ack",
        description="What the source is told of a handled message: ack, noop, nack or nack:<seconds>. With all but ack "
        "the source delivers it again; it is not handled twice, and the source is told the same once more.",
    )
    on_failure: Action = Field(
        "ack",
        description="What the source is told of a failed message. With noop or nack the source delivers it again; "
        "with ack only the failed-message table holds it.",
    )

    @abstractmethod
    def backlog(self) -> Backlog:
        """Say what waits. Sensors call it: it is quick, leases nothing and does no long poll.

        Raises:
            SourceError: It cannot be reached, or is not there.
        """

    @abstractmethod
    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """Divide up to `demand` messages into at most `concurrency` shares, and lease them if the source can.

        Args:
            demand: Messages that the run may take on.
            concurrency: Tasks that will read.
            receive_id: Name of the lease, for `extend` and `abandon`.

        Raises:
            SourceError: It cannot be reached, or is not there.
        """

    @abstractmethod
    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Read one share: batches of the schema `DELIVERIES`, at most `share.messages` rows in all.

        It runs in a Spark task; in the run's own process for a receive of up to a hundred messages.
        """

    @abstractmethod
    def ack(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Tell the source that these messages are done, in its largest unit; return what it refused.

        Raises:
            SourceError: A whole call failed; earlier ones hold.
        """

    @abstractmethod
    def release(self, ack_ref: str, ack_ids: Sequence[str], delay_s: int = 0) -> list[Refused]:
        """Give messages back, to be delivered again after `delay_s` seconds; return what was refused."""

    def extend(self, receive_id: str) -> bool:
        """Renew a receive's leases to `lease_s` from now; return False if it no longer holds them.

        The driver calls it every third of `lease_s` while the run lives. A source whose leases outlast a run leaves it
        as it is.
        """
        del receive_id
        return True

    def abandon(self, receive_id: str) -> None:
        """Give back all that a receive still holds, if one call can say so; otherwise its leases run out."""
        del receive_id

    def check_ready(self) -> None:
        """Raise `SourceError` if a receive is bound to fail. A run calls it before it leases anything."""
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

        `published_at` is by the source's own clock, and the same at every delivery: a redelivered message is looked up
        only in what was decided since. Leave it out if the source does not promise that.
        """
        rows = len(message_id)
        texts = [json.dumps(m, default=str) if m else None for m in metadata or ()]
        columns = {
            "source": pa.repeat(self.name, rows),
            "message_id": message_id,
            "data": data,
            "metadata": pa.nulls(rows) if metadata is None else texts,
            "ack_ref": pa.repeat(ack_ref, rows),
            "ack_id": ack_id,
            "attempt": pa.repeat(1, rows) if attempt is None else attempt,
            "redelivered": pa.repeat(redelivered, rows) if isinstance(redelivered, bool) else redelivered,
            "published_at": pa.nulls(rows) if published_at is None else published_at,
        }
        return pa.RecordBatch.from_pydict(columns, schema=DELIVERIES)
