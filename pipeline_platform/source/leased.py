"""Sources whose server leases messages until a deadline: SQS, Pub/Sub, a table queue."""

import logging
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

from pydantic import Field

from pipeline_platform.model.actions import LEASED, AckActions
from pipeline_platform.source.contract import LeasedIds, Refused, Share, Source
from pipeline_platform.source.options import SourceOptions

logger = logging.getLogger(__name__)


class LeaseOptions(SourceOptions):
    """The lease of a source whose leases expire."""

    lease_s: float = Field(
        60.0, gt=0, le=366 * 86_400, description="Lease in seconds; the run renews it while it needs the messages."
    )

    @property
    def extend_every_s(self) -> float | None:
        """A third of the lease: two renewals may fail."""
        return self.lease_s / 3


class LeasedSource(LeaseOptions, Source):
    """A source that leases messages: when a lease expires, the next receive may lease the message.

    A connector implements `ack` and `release` instead of `acknowledge`, and `renew` instead of `extend` and `abandon`
    unless its server can renew and release a whole receive at once. The ack actions are `ack`, `noop`, `nack` and
    `nack:<seconds>`.
    """

    lease_option: ClassVar[str] = "lease_s"
    """Name of the option that sets the lease."""

    @property
    def longest_delay_s(self) -> int:
        """Maximum seconds of the action `nack:<seconds>`."""
        return LEASED["nack"].longest_s or 0

    @property
    def ack_actions(self) -> AckActions:
        """The ack actions of a leased source, with the server's longest delay."""
        return {**LEASED, "nack": LEASED["nack"]._replace(longest_s=self.longest_delay_s)}

    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """Divide the demand into a share per task. Nothing is leased yet: `read` leases."""
        return Share.equal(demand, concurrency)

    def acknowledge(self, action: str, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Acknowledge or release messages; `noop` leaves them until their lease expires."""
        verb, _, seconds = action.partition(":")
        if verb == "noop":
            return []
        return self.ack(ack_ref, ack_ids) if verb == "ack" else self.release(ack_ref, ack_ids, int(seconds or 0))

    def leased(self, receive_id: str, held: LeasedIds) -> Iterable[tuple[str, Sequence[str]]]:
        """Yield the messages that a receive leases, for `extend` and `abandon`: by default the recorded messages.

        If the server can list the messages of a receive, override it: then the messages that were not recorded yet are
        renewed, too, and after a crash released at once.
        """
        return held()

    def renew(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Renew the leases of messages to `lease_s` from now; return the refused messages. `extend` calls it."""
        raise NotImplementedError(f"{type(self).__name__} must implement renew() or extend().")

    def extend(self, receive_id: str, held: LeasedIds) -> bool:
        """Renew the leases of a receive. A refused message has been leased by another receive, or keeps its lease.

        A source whose leases outlast every run may do nothing and return True.

        Returns:
            False if other receives have leased all messages. A message that another receive decides first is left out
            of this run's decision.
        """
        started, asked, left = time.monotonic(), 0, list[Refused]()
        for ack_ref, ack_ids in self.leased(receive_id, held):
            asked += len(ack_ids)
            left += self.renew(ack_ref, ack_ids)
        if left:
            how_many = f"{len(left)} of {asked}"
            logger.warning("Could not renew the leases of %s messages from %s: %s", how_many, self.name, left[0].reason)
        if (took := time.monotonic() - started) > self.lease_s / 3:
            logger.warning(
                "Renewed %d leases from %s in %.0f s, more than a third of %s (%g s): some messages may be "
                "redelivered. Raise it, or lower the demand of a run.",
                *(asked, self.name, took, self.lease_option, self.lease_s),
            )
        return sum(entry.lost for entry in left) < asked or not any(ack_ids for _, ack_ids in held())

    def abandon(self, receive_id: str, held: LeasedIds) -> None:
        """Release the messages of a crashed receive; messages that `leased` does not yield wait for their deadline."""
        for ack_ref, ack_ids in self.leased(receive_id, held):
            self.release(ack_ref, ack_ids)

    @abstractmethod
    def ack(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Acknowledge finished messages, in the source's largest unit; see `acknowledge`."""

    @abstractmethod
    def release(self, ack_ref: str, ack_ids: Sequence[str], delay_s: int = 0) -> list[Refused]:
        """Release messages, to be redelivered after `delay_s` seconds; return the refused messages."""
