"""Failed messages as a source: the open failures of some windows, given out to be handled once more."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.reader import keys_of, row_groups
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import FAILED, Table
from pipeline_platform.model.message import DELIVERIES
from pipeline_platform.model.settling import Words
from pipeline_platform.source.contract import Backlog, Refused, Share, Source

_KEY = ("source", "message_id")
_EVENT = (*_KEY, "attempt", "state")
_DELIVERED = ("data", "metadata", "partition", "sequence")
_COUNTED = "_open_failures.json"


class LakeSource(Source):
    """Messages that lie in the lake. There is nothing to lease, and nobody to tell what became of them."""

    lake: Lake = Field(description="Where the tables are.")
    pipeline: str = Field(description="Whose messages.")
    windows: tuple[str, ...] | None = Field(None, description="Of these windows only; None for all.")

    def _files(self, name: str, schema: pa.Schema, version: int | None = None) -> dict[str, list[File]]:
        """The files of a table by window, oldest first, by their paths under the lake's root; none without a table."""
        table = Table(self.lake, self.pipeline, name, schema)
        files: dict[str, list[File]] = {}
        if table.exists():
            handle = table.open()
            if version is not None:
                handle.load_as_version(version)
            for file in sorted(table.files(handle, self.windows), key=lambda file: (file.committed_at, file.path)):
                files.setdefault(file.window, []).append(file._replace(path=table.path(file.path)))
        return files

    def _deliveries(self, rows: pa.Table, **others: pa.Array) -> list[pa.RecordBatch]:
        """Rows of a table, and columns in their place or beside them, as deliveries; null where there are none."""
        given = {name: rows[name] for name in rows.column_names} | others
        given["redelivered"] = pa.repeat(False, rows.num_rows)
        columns = [given.get(field.name, pa.nulls(rows.num_rows, field.type)) for field in DELIVERIES]
        return list(pa.table(columns, schema=DELIVERIES).combine_chunks().to_batches())

    @property
    def words(self) -> Words:
        """Whatever a callback says for the message's own source: nobody is told."""
        return {}

    def settle(self, action: str, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Do nothing: their outcome is in the tables."""
        del action, ack_ref, ack_ids
        return []


class FailedMessages(LakeSource):
    """The open failures of a pipeline: those whose latest event is a failure.

    The events that their next outcome commits acknowledge them: a failure with `attempt + 1` keeps one open, its end
    closes it. Of two receives that drive the same failure, one decides it.
    """

    def _paths(self) -> dict[str, list[str]]:
        return {window: [file.path for file in files] for window, files in self._files("failed", FAILED).items()}

    def open_by_window(self) -> dict[str, int]:
        """How many failures are open, by window; windows without any are left out."""
        return self._count(self._paths())

    def _count(self, files: Mapping[str, Sequence[str]]) -> dict[str, int]:
        """Count the open failures of each window whose files are not those that somebody counted before."""
        known = self._counted()
        counts = {}
        for window, paths in sorted(files.items()):
            digest = sha256("\0".join(sorted(paths)).encode()).hexdigest()
            counted, count = known.get(window, ("", 0))
            counts[window] = digest, count if counted == digest else open_failures(self.lake, paths).num_rows
        if counts.items() - known.items():
            others = {} if self.windows is None else known
            self.lake.write(f"{self.pipeline}/{_COUNTED}", json.dumps(others | counts).encode())
        return {window: count for window, (_, count) in counts.items() if count}

    def _counted(self) -> dict[str, tuple[str, int]]:
        """The count of each window when somebody last counted, under a digest of the files that were counted.

        Other files, another count: so the last one to write it is right, and it may be lost or unreadable.
        """
        try:
            counted = json.loads(self.lake.read(f"{self.pipeline}/{_COUNTED}") or b"{}")
            return {window: (str(digest), int(count)) for window, (digest, count) in counted.items()}
        except (ValueError, TypeError, AttributeError):
            return {}

    def backlog(self) -> Backlog:
        """Count the open failures."""
        return Backlog(sum(self.open_by_window().values()))

    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """Share out the windows with open failures, oldest first; a window is never divided."""
        del concurrency, receive_id
        shares = []
        paths = self._paths()
        for window, count in self._count(paths).items():
            taken = min(count, demand)
            if taken > 0:
                shares.append(Share(at={"paths": paths[window]}, window=window, messages=taken))
                demand -= taken
        return shares

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Read the payloads of a window's open failures, each with the attempt that is to come."""
        del receive_id
        wanted = keys_of(open_failures(self.lake, share.at["paths"]), *_EVENT[:3])
        left = share.messages
        for path in share.at["paths"]:
            for rows in row_groups(self.lake, path, *_EVENT, *_DELIVERED):
                mine = pc.and_(pc.equal(rows["state"], "open"), pc.is_in(keys_of(rows, *_EVENT[:3]), wanted))
                driven = rows.filter(mine).slice(0, left)
                left -= driven.num_rows
                yield from self._deliveries(
                    driven,
                    ack_ref=pa.repeat(self.name, driven.num_rows),
                    ack_id=driven["message_id"],
                    attempt=pc.add(driven["attempt"], pa.scalar(1, pa.int32())),
                )
                if not left:
                    return


def open_failures(lake: Lake, paths: Sequence[str]) -> pa.Table:
    """The open failures in all files of one window: `source`, `message_id` and `attempt` of the latest event."""
    events = (_ranked(rows) for path in paths for rows in row_groups(lake, path, *_EVENT))
    latest = pa.concat_tables(events).group_by(list(_KEY)).aggregate([("rank", "max")])
    latest = latest.filter(pc.equal(pc.bit_wise_and(latest["rank_max"], 1), 0))
    return latest.append_column("attempt", pc.shift_right(latest["rank_max"], 1)).drop_columns("rank_max")


def _ranked(events: pa.Table) -> pa.Table:
    """Number the events of a message: a later attempt wins, and at the same attempt its end."""
    closed = pc.cast(pc.equal(events["state"], "closed"), pa.int32())
    rank = pc.cast(pc.add(pc.multiply(events["attempt"], 2), closed), pa.int32())
    return events.select(list(_KEY)).append_column("rank", rank)
