"""The newest row of each key: merges new rows of a batcher's table into a table with one row per key.

A merge keeps the greatest row of each key, so it makes no difference how often and in which order rows are merged. The
greatest deleted row of a key, its tombstone, is in a table of its own: readers see living rows only, and an older row
that arrives late finds the tombstone. A tombstone is committed before the row that it removes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.latest.keyed_table import MESSAGE, KeyedTable
from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.reader import only, scan, stored_file
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import CommitConflictError, Table, Tables
from pipeline_platform.model.pipeline import Pipeline

if TYPE_CHECKING:
    from deltalake import DeltaTable

MOST_BYTES = 128 * 2**20
"""Size of rows, in memory, from which they are merged. Fewer are merged together, because a merge reads the table."""
TOMBSTONES = "_deleted"
"""Folder of the tombstones in the folder of the table. Readers and vacuum ignore folders that start with `_`."""
_BATCH_ROWS = 65_536
_TRIES = 20


class MergeError(Exception):
    """Rows cannot be merged. The message contains the table, the reason and the fix."""


class Merged(NamedTuple):
    """Results of a merge.

    Attributes:
        read: Rows read from the batcher's table.
        changes: Numbers of rows `inserted`, `updated` and `deleted`.
        rows: Rows in the table with one row per key.
        version: Version of the batcher's table up to which all rows are merged.
    """

    read: int
    changes: Counter[str]
    rows: int
    version: int


@dataclass(frozen=True)
class Latest:
    """A table with the newest row of each key of a batcher's table; see `latest_of`."""

    pipeline: type[Pipeline]
    batcher: str
    name: str
    key: tuple[str, ...]
    order: tuple[str, ...]
    deleted: str | None

    def merge(self, lake: Lake) -> Merged:
        """Merge the rows that were committed since the last merge. Safe to repeat, and beside other merges.

        Raises:
            MergeError: A row has no key or no order, or other runs merged all the time.
            PipelineError: The table was created with other options, or the type of a column has changed.
        """
        for _ in range(_TRIES):
            # After a conflict, the rows are read again: another run may have merged newer rows of a replay.
            with suppress(CommitConflictError):
                return _Merge(self, lake).run()
        raise MergeError(
            f"{self.pipeline.name}/{self.name}: other runs committed to it during {_TRIES} merges. Materialise it "
            "again when they have ended"
        )


class _Merge:
    """One attempt. Only its own commits come between the versions that it looks at and its last commit."""

    def __init__(self, latest: Latest, lake: Lake) -> None:
        self.latest, self.lake = latest, lake
        self.source = Tables(lake, latest.pipeline)[latest.batcher]
        self.source.ensure()
        with self.source.look() as handle:
            stored = self.stored = pa.schema(handle.schema().to_arrow())
        self.columns = pa.schema([field for field in stored if field.name != latest.deleted])
        self.read = pa.schema([field for field in stored if field.name != "window"])
        self.target = self._table(latest.name, self.columns)
        self.tombstones: KeyedTable | None = None
        if latest.deleted:
            ids = dict.fromkeys([*latest.key, *latest.order, *MESSAGE, "receive_id"])
            self.tombstones = self._table(f"{latest.name}/{TOMBSTONES}", only(stored, *ids))

    def _table(self, name: str, schema: pa.Schema) -> KeyedTable:
        latest = self.latest
        about = f"key={list(latest.key)}, order={list(latest.order)}, deleted={latest.deleted!r}"
        table = KeyedTable(self.lake, latest.pipeline.name, name, schema, latest.key, latest.order, about)
        table.ensure()
        return table

    def run(self) -> Merged:
        changes, transaction = Counter[str](), f"{self.latest.pipeline.name}/{self.latest.batcher}"
        with self.target.look() as handle, self.source.look() as there:
            if pa.schema(there.schema().to_arrow()) != self.stored:
                raise CommitConflictError(f"{self.source.name}: another run added a column")
            before, until = handle.version(), there.version()
            done = handle.transaction_version(transaction)
            files = _new_files(self.source, there, done)
            for rows in self._portions(files):
                changes += self._merge(handle, rows)
            if files:
                self.target.record(handle, transaction, until)
                self.target.tidy(handle, before)
            version = until if files or done is None else done
            return Merged(sum(file.rows for file in files), changes, self.target.count(handle), version)

    def _portions(self, files: Sequence[File]) -> Iterator[pa.Table]:
        """Yield the newest rows, in tables of at most about `MOST_BYTES` with different keys each."""
        some, size = list[pa.Table](), 0
        for file in files:
            for rows in self._rows(file):
                some.append(rows)
                size += rows.nbytes
                if size >= MOST_BYTES:
                    some = [self.target.newest(pa.concat_tables(some))]
                    if (size := some[0].nbytes) >= MOST_BYTES // 2:
                        yield some.pop()
                        size = 0
        if some:
            yield self.target.newest(pa.concat_tables(some))

    def _rows(self, file: File) -> Iterator[pa.Table]:
        """Yield the rows of a file, with their window, and without nulls in `deleted`."""
        with stored_file(self.lake, self.source.path(file.path), self.read) as stored:
            for batch in stored.batches(_BATCH_ROWS):
                rows = pa.Table.from_batches([batch]).cast(self.read)
                rows = rows.append_column("window", pa.repeat(file.window, rows.num_rows))
                self._refuse_nulls(rows)
                if deleted := self.latest.deleted:
                    place = rows.column_names.index(deleted)
                    rows = rows.set_column(place, deleted, pc.fill_null(rows[deleted], False))
                yield rows

    def _refuse_nulls(self, rows: pa.Table) -> None:
        options = {"key": self.latest.key, "order": self.latest.order}
        for option, name in ((option, name) for option, names in options.items() for name in names):
            found = rows.filter(pc.is_null(rows[name], nan_is_null=True)).slice(0, 1).to_pylist()
            for row in found:
                pipeline, window = self.latest.pipeline.name, row["window"]
                raise MergeError(
                    f"{pipeline}/{self.latest.batcher}: {name} is null in the row of message {row['message_id']!r} of "
                    f"{row['source']!r}, window {window}, and latest_of({option}=...) contains {name}. Let "
                    "handle_message fail or skip such messages, and replay the window: "
                    f"pipeline-platform replay {pipeline} --window {window}"
                )

    def _merge(self, handle: DeltaTable, rows: pa.Table) -> Counter[str]:
        deleted = self.latest.deleted
        if deleted is None or self.tombstones is None:
            return self.target.merge(handle, rows)
        with self.tombstones.look() as stones:
            before, gone = stones.version(), rows.filter(rows[deleted])
            if gone.num_rows:
                self.tombstones.merge(stones, gone.select(self.tombstones.schema.names))
            # Of equal rows the last counts: a message that a replay no longer deletes.
            known = self._known(self.tombstones, stones, rows)
            rows = self.target.newest(pa.concat_tables([known, rows], promote_options="default"))
            # A tombstone only hides older rows. Its message may have a row in the table by now.
            rows = rows.filter(pc.is_valid(rows[deleted]))
            self.tombstones.tidy(stones, before)
        return self.target.merge(handle, rows, deleted) if rows.num_rows else Counter()

    def _known(self, tombstones: KeyedTable, handle: DeltaTable, rows: pa.Table) -> pa.Table:
        """Return the tombstones of the keys of rows; the columns of other rows are null."""
        import polars as pl

        keys = pl.LazyFrame(pl.from_arrow(rows.select(self.latest.key)))
        found = scan(self.lake, handle).join(keys, on=list(self.latest.key), how="semi").collect(engine="streaming")
        return found.to_arrow().select(tombstones.schema.names).cast(tombstones.schema)


def _new_files(source: Table, handle: DeltaTable, done: int | None) -> list[File]:
    """Return the files that were added after a version, in order; all files if this version is unknown.

    Files that compaction created are among them. Their rows may have been merged before, and change nothing.
    """
    from deltalake.exceptions import DeltaError

    files = sorted(source.files(handle), key=lambda file: (file.window, file.path))
    if done is None or done > handle.version():
        return files
    earlier = source.open()
    try:
        earlier.load_as_version(done)
    except DeltaError:  # the log no longer contains it
        return files
    merged = {file.path for file in source.files(earlier)}
    return [file for file in files if file.path not in merged]
