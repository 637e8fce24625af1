"""A source for pipelines that are not run: in tests of callbacks, and of definitions."""

from collections.abc import Iterator, Sequence

import pyarrow as pa

from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.contract import Held, Refused, Share
from pipeline_platform.source.leased import LeasedSource


class DummySource(LeasedSource):
    """Has no message, ever, and needs no server: the place of a source in definitions under test."""

    def backlog(self) -> Backlog:
        """Nothing waits."""
        return Backlog(0)

    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """There is nothing to divide."""
        return []

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """There is nothing to read."""
        return iter(())

    def extend(self, receive_id: str, held: Held) -> bool:
        """A receive of nothing still has all that it had."""
        return True

    def ack(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Refuse what is not from here."""
        return [Refused(ack_id, "a DummySource gives nothing out", lost=True) for ack_id in ack_ids]

    def release(self, ack_ref: str, ack_ids: Sequence[str], delay_s: int = 0) -> list[Refused]:
        """Refuse what is not from here."""
        return self.ack(ack_ref, ack_ids)
