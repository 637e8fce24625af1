"""Sources whose server leases messages until a deadline: SQS, Pub/Sub, a table queue."""

from abc import abstractmethod
from collections.abc import Sequence

from pydantic import Field

from pipeline_platform.model.actions import LEASED, AckActions
from pipeline_platform.source.contract import LeasedIds, Refused, Share, Source


class LeasedSource(Source):
    """A source that leases messages: when a lease expires, the next receive may lease the message.

    A connector implements `ack` and `release` instead of `acknowledge`. The ack actions are `ack`, `noop`, `nack` and
    `nack:<seconds>`.
    """

    lease_s: float = Field(
        60.0, gt=0, le=366 * 86_400, description="Lease in seconds; the run renews it while it needs the messages."
    )

    @property
    def extend_every_s(self) -> float | None:
        """A third of the lease: two renewals may fail."""
        return self.lease_s / 3

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

    @abstractmethod
    def extend(self, receive_id: str, held: LeasedIds) -> bool:
        """Renew a receive's leases to `lease_s` from now; return False if another receive has leased its messages.

        A source whose leases outlast every run may do nothing and return True.
        """

    @abstractmethod
    def ack(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Acknowledge finished messages, in the source's largest unit; see `acknowledge`."""

    @abstractmethod
    def release(self, ack_ref: str, ack_ids: Sequence[str], delay_s: int = 0) -> list[Refused]:
        """Release messages, to be redelivered after `delay_s` seconds; return the refused messages."""
