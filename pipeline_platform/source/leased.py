"""Sources whose server remembers what it gave out, until a deadline: SQS, Pub/Sub, a table queue."""

from abc import abstractmethod
from collections.abc import Sequence

from pydantic import Field

from pipeline_platform.source.contract import Held, Refused, Source


class LeasedSource(Source):
    """A source that leases messages: whoever lets a lease run out loses them to the next receive.

    A connector writes `ack` and `release` in place of `acknowledge`. Its words are `ack`, `noop`, `nack` and
    `nack:<seconds>`.
    """

    lease_s: float = Field(
        60.0, gt=0, le=366 * 86_400, description="Seconds that a lease lasts when nobody extends it."
    )

    @property
    def extend_every_s(self) -> float | None:
        """A third of the lease: two tries may fail."""
        return self.lease_s / 3

    def acknowledge(self, action: str, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Acknowledge or give back; `noop` leaves messages to their lease."""
        word, _, seconds = action.partition(":")
        if word == "noop":
            return []
        return self.ack(ack_ref, ack_ids) if word == "ack" else self.release(ack_ref, ack_ids, int(seconds or 0))

    @abstractmethod
    def extend(self, receive_id: str, held: Held) -> bool:
        """Renew a receive's leases to `lease_s` from now; return False if it no longer holds them.

        A source whose leases outlast every run may leave them as they are, and return True.
        """

    @abstractmethod
    def ack(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Acknowledge messages that are done with, in the source's largest unit; see `acknowledge`."""

    @abstractmethod
    def release(self, ack_ref: str, ack_ids: Sequence[str], delay_s: int = 0) -> list[Refused]:
        """Give messages back, to be delivered again after `delay_s` seconds; return what was refused."""
