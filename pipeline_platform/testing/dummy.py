"""An empty source for tests of callbacks and definitions."""

from collections.abc import Iterator, Sequence

import pyarrow as pa

from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.contract import Refused, Share
from pipeline_platform.source.leased import LeasedSource


class DummySource(LeasedSource):
    """A source that is always empty and needs no server, for definitions under test."""

    def backlog(self) -> Backlog:
        """Return an empty backlog."""
        return Backlog(0)

    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """Return no shares."""
        return []

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Yield nothing."""
        return iter(())

    def ack(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Refuse all ids: a `DummySource` never delivered them."""
        return [Refused(ack_id, "a DummySource delivers no messages", lost=True) for ack_id in ack_ids]

    def release(self, ack_ref: str, ack_ids: Sequence[str], delay_s: int = 0) -> list[Refused]:
        """Refuse all ids."""
        return self.ack(ack_ref, ack_ids)
