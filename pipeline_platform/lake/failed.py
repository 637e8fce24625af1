"""Failed messages as a source: the open failures of some windows, given out to be handled once more."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field

from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import FAILED, Table
from pipeline_platform.model.message import DELIVERIES
from pipeline_platform.source.contract import Backlog, Refused, Share, Source

_KEY = ("source", "message_id", "attempt", "state")
_COUNTED = "_open_failures.json"


class FailedMessages(Source):
    """The open failures of a pipeline: those whose latest event is a failure.

    They are acknowledged by the events that their next outcome commits: a failure with `attempt + 1` keeps one open,
    its end closes it. There is nothing to lease: of two receives that drive the same failure, one decides it.
    """

    lake: Lake = Field(description="Where the table is.")
    pipeline: str = Field(description="Whose failures.")
    windows: tuple[str, ...] | None = Field(None, description="Of these windows only; None for all.")

    def _table(self) -> Table:
        return Table(self.lake, self.pipeline, "failed", FAILED)

    def _files(self) -> dict[str, list[str]]:
        """Paths by window."""
        table = self._table()
        files: dict[str, list[str]] = {}
        if table.exists():
            for file in table.files(table.open(), self.windows):
                files.setdefault(file.window, []).append(f"{self.pipeline}/failed/{file.path}")
        return files

    def open_by_window(self) -> dict[str, int]:
        """How many failures are open, by window; windows without any are left out."""
        return self._count(self._files())

    def _count(self, files: Mapping[str, Sequence[str]]) -> dict[str, int]:
        """Count the open failures of each window; those whose files are still the same were counted before."""
        known = Counted.read(self.lake, self.pipeline)
        counts = Counted({})
        for window, paths in sorted(files.items()):
            digest = sha256("\0".join(sorted(paths)).encode()).hexdigest()
            counted, count = known.windows.get(window, ("", 0))
            if counted != digest:
                count = open_failures(self.lake, paths).num_rows
            counts.windows[window] = (digest, count)
        if counts.windows.items() - known.windows.items():
            (counts if self.windows is None else Counted(known.windows | counts.windows)).write(
                self.lake, self.pipeline
            )
        return {window: count for window, (_, count) in counts.windows.items() if count}

    def backlog(self) -> Backlog:
        """Count the open failures."""
        return Backlog(sum(self.open_by_window().values()))

    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """Share out the windows with open failures, oldest first; a window is never divided."""
        del concurrency, receive_id
        shares = []
        paths = self._files()
        for window, count in self._count(paths).items():
            taken = min(count, demand)
            if taken > 0:
                shares.append(Share(at={"paths": paths[window]}, window=window, messages=taken))
                demand -= taken
        return shares

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Read the payloads of a window's open failures, each with the attempt that is to come."""
        del receive_id
        wanted = _identity(open_failures(self.lake, share.at["paths"]))
        left = share.messages
        for path in share.at["paths"]:
            with self.lake.open_input(path) as file:
                parquet = pq.ParquetFile(file)
                for group in range(parquet.metadata.num_row_groups):
                    rows = parquet.read_row_group(group, columns=[*_KEY, "data", "metadata"])
                    mine = pc.and_(pc.equal(rows["state"], "open"), pc.is_in(_identity(rows), wanted))
                    rows = rows.filter(mine).slice(0, left)
                    left -= rows.num_rows
                    yield from self._deliveries(rows)
                    if not left:
                        return

    def _deliveries(self, rows: pa.Table) -> list[pa.RecordBatch]:
        count = rows.num_rows
        columns: dict[str, Any] = {
            "source": rows["source"],
            "message_id": rows["message_id"],
            "data": rows["data"],
            "metadata": rows["metadata"],
            "ack_ref": pa.repeat(self.name, count),
            "ack_id": rows["message_id"],
            "attempt": pc.add(rows["attempt"], pa.scalar(1, pa.int32())),
            "redelivered": pa.repeat(False, count),
            "published_at": pa.nulls(count, DELIVERIES.field("published_at").type),
        }
        batches: list[pa.RecordBatch] = pa.table(columns, schema=DELIVERIES).combine_chunks().to_batches()
        return batches

    def ack(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Nothing to do: the events are in the table."""
        del ack_ref, ack_ids
        return []

    def release(self, ack_ref: str, ack_ids: Sequence[str], delay_s: int = 0) -> list[Refused]:
        """Nothing to do: they are open still."""
        del ack_ref, ack_ids, delay_s
        return []


class Counted(NamedTuple):
    """How many failures were open when somebody last counted: every run does, over all windows.

    Attributes:
        windows: The count of each window, under a digest of the files that were counted. Other files, another count:
            so whoever writes it last is right, and it may be lost.
    """

    windows: dict[str, tuple[str, int]]

    @classmethod
    def read(cls, lake: Lake, pipeline: str) -> Counted:
        """Read what is kept; nothing where that cannot be read."""
        try:
            kept = json.loads(lake.read(f"{pipeline}/{_COUNTED}") or b"{}")
            return cls({window: (str(digest), int(count)) for window, (digest, count) in kept.items()})
        except (ValueError, TypeError, AttributeError):
            return cls({})

    def write(self, lake: Lake, pipeline: str) -> None:
        """Write it for the next who counts."""
        lake.write(f"{pipeline}/{_COUNTED}", json.dumps(self.windows).encode())


def open_failures(lake: Lake, paths: Sequence[str]) -> pa.Table:
    """The open failures in all files of one window: `source`, `message_id` and `attempt` of the latest event."""
    events = []
    for path in paths:
        with lake.open_input(path) as file:
            events.append(_ranked(pq.read_table(file, columns=list(_KEY))))
    latest = pa.concat_tables(events).group_by(["source", "message_id"]).aggregate([("rank", "max")])
    latest = latest.filter(pc.equal(pc.bit_wise_and(latest["rank_max"], 1), 0))
    return latest.append_column("attempt", pc.shift_right(latest["rank_max"], 1)).drop_columns("rank_max")


def _ranked(events: pa.Table) -> pa.Table:
    """Number the events of a message: a later attempt wins, and at the same attempt its end."""
    closed = pc.cast(pc.equal(events["state"], "closed"), pa.int32())
    rank = pc.add(pc.multiply(events["attempt"], 2), closed)
    return pa.table({"source": events["source"], "message_id": events["message_id"], "rank": pc.cast(rank, pa.int32())})


def _identity(rows: pa.Table) -> pa.Array:
    attempt = pc.cast(rows["attempt"], pa.string())
    return pc.binary_join_element_wise(rows["source"], rows["message_id"], attempt, "\0").combine_chunks()
