"""Full replay: all decided messages of some windows, read from the raw log to be handled again; and its preview."""

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from pipeline_platform.lake.failures.failed import NONE, FailedMessages, LakeSource
from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.reader import keys_of, only, receive_ids, stored_file
from pipeline_platform.lake.removed_batchers import removed_batchers
from pipeline_platform.lake.tables import DECISIONS, ERASED, OUTCOMES, Table, Tables
from pipeline_platform.model.message import ATTEMPT_KEY, DELIVERIES, MESSAGE_KEY, MESSAGES
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.contract import Share, SourceError

BUCKET_ROWS = 500_000
"""Approximate number of ids in a task's memory: 100 MB. Each bucket reads all files of its window once more."""

SPLIT_ROWS = 10_000
"""Smallest number of rows for which a window is divided: each part reads all files of the window."""

REPLAYED = pa.schema([*DELIVERIES, MESSAGES.field("received_at"), MESSAGES.field("first_receive_id")])
"""Deliveries of a replay keep the time and the receive of their first delivery."""

_BATCH_ROWS = 8_192
_KEYS = (*ATTEMPT_KEY, "receive_id")
_REPLAYED = [outcome for outcome in DECISIONS if outcome != ERASED]


class ReplayedMessages(LakeSource):
    """Decided messages of some windows, read from the raw log: each message once, at its last attempt.

    The receive of a replay replaces the rows of the receives that it reads (`finished`) in every table.
    """

    windows: tuple[str, ...] = Field(description="Windows to replay.")
    version: int = Field(description="Version of `outcomes` to read.")

    def _outcomes(self) -> dict[str, list[File]]:
        return self._files("outcomes", OUTCOMES, self.version)

    def _batches(self, path: str, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
        with stored_file(self.lake, path, columns) as file:
            yield from file.batches(_BATCH_ROWS)

    def _decided(self, paths: Iterable[str], bucket: int, of: int) -> pa.Table:
        """Return the messages decided in files of one window, each once: its last attempt and the receive of that."""
        columns = only(OUTCOMES, *_KEYS, "outcome")
        rows = [columns.empty_table()]
        for path in paths:
            for batch in self._batches(path, columns):
                decided = batch.filter(pc.is_in(batch["outcome"], pa.array(_REPLAYED)))
                rows.append(pa.table(decided.filter(_are_in(decided, bucket, of))))
        # The last row after a sort by attempt; an attempt is decided by one receive.
        decided = pa.concat_tables(rows).sort_by("attempt").group_by(list(MESSAGE_KEY), use_threads=False)
        return decided.aggregate([("attempt", "last"), ("receive_id", "last")]).rename_columns(list(_KEYS))

    def finished(self) -> tuple[str, ...]:
        """Return the receives that have outcomes in the windows, which a replay replaces."""
        return tuple(sorted(self._receives(file for files in self._outcomes().values() for file in files)))

    def _receives(self, files: Iterable[File]) -> set[str]:
        return {id_ for file in files for id_ in receive_ids(self.lake, file.path)} - {ERASED}

    def backlog(self) -> Backlog:
        """Return an upper bound, which includes duplicates and returned messages, without reading the files."""
        return Backlog(sum(stored.rows for files in self._outcomes().values() for stored in files))

    def by_window(self) -> dict[str, int]:
        """Return the number of messages of each window; windows without messages are left out. All ids are read."""
        counts = {}
        for window, outcomes in sorted(self._outcomes().items()):
            paths = [stored.path for stored in outcomes]
            of = max(1, -(-sum(stored.rows for stored in outcomes) // BUCKET_ROWS))
            if count := sum(self._decided(paths, bucket, of).num_rows for bucket in range(of)):
                counts[window] = count
        return counts

    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """Divide each window by a hash of the message's id; `demand` is ignored.

        A replay of half a window would lose the other half, because it replaces the whole window.
        """
        messages = self._files("messages", MESSAGES)
        shares = []
        for window, outcomes in sorted(self._outcomes().items()):
            rows = sum(stored.rows for stored in outcomes)
            of = max(1, min(concurrency, rows // SPLIT_ROWS), -(-rows // BUCKET_ROWS))
            raw = [stored.path for stored in messages.get(window, [])]
            at = {"outcomes": [stored.path for stored in outcomes], "messages": raw, "of": of}
            # The size of a bucket is unknown before it is read, but at most the size of the window.
            shares += [Share(at={**at, "bucket": n}, window=window, messages=rows) for n in range(of)]
        return shares

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Read one bucket of one window; messages of other buckets are skipped batch by batch.

        A message without a `sequence` of its source gets its place in the window's raw log, because other tasks read
        the other buckets.

        Raises:
            SourceError: Messages of the bucket are missing from the raw log.
        """
        decided = self._decided(share.at["outcomes"], share.at["bucket"], share.at["of"])
        mine, first = set(keys_of(decided, *_KEYS).to_pylist()), 0
        for path in share.at["messages"]:
            for batch in self._batches(path, only(MESSAGES, *REPLAYED.names, "receive_id")):
                chosen = []
                for row, key in enumerate(keys_of(batch, *_KEYS).to_pylist()):
                    if key in mine:  # the raw log may contain a message twice
                        mine.remove(key)
                        chosen.append(row)
                if chosen:
                    rows = pa.table(batch.take(pa.array(chosen, pa.int64())))
                    place = pa.array([first + n for n in chosen])
                    yield from self._deliveries(
                        rows,
                        REPLAYED,
                        sequence=pc.coalesce(rows["sequence"], place),
                        first_receive_id=pc.coalesce(rows["first_receive_id"], rows["receive_id"]),
                    )
                first += batch.num_rows
        if not mine:
            return
        now = self._receives(self._files("outcomes", OUTCOMES).get(str(share.window), []))
        if {key.rpartition("\0")[2] for key in mine} - now:
            raise SourceError(
                f"window {share.window}: another replay has replaced messages since this replay started. Start this "
                "replay again if it is still needed"
            )
        raise SourceError(
            f"window {share.window}: {len(mine)} decided messages are missing from the raw log, in one of "
            f"{share.at['of']} parts. Retention removed them, and a replay would lose their results. Choose later "
            "windows"
        )


def _are_in(rows: pa.RecordBatch, bucket: int, of: int) -> pa.Array:
    """Return whether each message belongs to a bucket; all attempts of a message are in one bucket."""
    if of == 1:
        return pa.repeat(True, rows.num_rows)
    keys = keys_of(rows, *MESSAGE_KEY).to_pylist()
    return pa.array([zlib.crc32(key.encode()) % of == bucket for key in keys], pa.bool_())


class ReplayedWindow(NamedTuple):
    """A window of a replay.

    Attributes:
        window: Its key.
        messages: Messages that the replay handles again.
        rows: Rows that the replay replaces, by table; tables without rows are left out.
        open_failures: Open failures that the replay replaces.
        missing: Messages that the raw log lacks at least; if any, the replay fails.
    """

    window: str
    messages: int
    rows: dict[str, int]
    open_failures: int
    missing: int


def decided_messages(tables: Tables, windows: Iterable[str]) -> dict[str, int]:
    """Return the number of messages that a replay of each window handles again; windows without messages are left out.

    The ids of all outcomes of the windows are read.
    """
    name = tables.pipeline.name
    source = ReplayedMessages(
        name=name, lake=tables.lake, pipeline=name, windows=tuple(windows), version=tables["outcomes"].version()
    )
    return source.by_window()


def preview(tables: Tables, messages: dict[str, int]) -> Iterator[ReplayedWindow]:
    """Yield what a replay of each window replaces, oldest window first, by the windows' `decided_messages`."""
    name = tables.pipeline.name
    names = [*tables.pipeline.batchers_with_tables(), *removed_batchers(tables)]
    rows = {table: rows_by_window(tables[table], messages) for table in names}
    stored = rows_by_window(tables["messages"], messages)
    failed = FailedMessages(name=name, lake=tables.lake, pipeline=name, windows=tuple(messages)).by_window()
    for window, count in sorted(messages.items()):
        replaced = {table: rows[table][window] for table in names if rows[table][window]}
        missing = max(0, count - stored[window])
        yield ReplayedWindow(window, count, replaced, failed.get(window, NONE).open, missing)


def rows_by_window(table: Table, windows: Iterable[str]) -> Counter[str]:
    """Return the number of stored rows by window."""
    from deltalake.exceptions import TableNotFoundError

    rows: Counter[str] = Counter()
    with suppress(TableNotFoundError), table.look() as handle:
        for file in table.files(handle, list(windows)):
            rows[file.window] += file.rows
    return rows
