"""A full replay: every message of some windows, as their finished receives left it, given out once more."""

import zlib
from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from pipeline_platform.lake.failed import LakeSource
from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.reader import keys_of, only, receive_ids, stored_file
from pipeline_platform.lake.tables import OUTCOMES
from pipeline_platform.model.message import DELIVERIES, MESSAGES
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.contract import Share, SourceError

BUCKET_ROWS = 500_000
"""Ids that one task holds, more or less: 100 MB. Each bucket is another look at all files of its window."""

SPLIT_ROWS = 10_000
"""A window of fewer is not worth a second look at its files, whatever the concurrency."""

REPLAYED = pa.schema([*DELIVERIES, MESSAGES.field("received_at"), MESSAGES.field("first_receive_id")])
"""Deliveries of a replay keep the time and the receive of their first delivery."""

_BATCH_ROWS = 8_192
_IDENTITY = ("source", "message_id", "attempt", "receive_id")


class ReplayedMessages(LakeSource):
    """What was decided in some windows, read from the raw log: each message once, at its last attempt.

    A receive on it replaces the rows of the receives it read (`finished`) in every table.
    """

    windows: tuple[str, ...] = Field(description="Of these windows.")
    version: int = Field(description="Version of `outcomes` to go by.")

    def _outcomes(self) -> dict[str, list[File]]:
        return self._files("outcomes", OUTCOMES, self.version)

    def _batches(self, path: str, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
        with stored_file(self.lake, path, columns) as file:
            yield from file.batches(_BATCH_ROWS)

    def _decided(self, paths: Iterable[str], bucket: int, of: int) -> pa.Table:
        """The messages decided in files of one window, each once: at its last attempt, by its receive."""
        columns = only(OUTCOMES, *_IDENTITY, "outcome")
        rows = [columns.empty_table()]
        for path in paths:
            for batch in self._batches(path, columns):
                decided = batch.filter(pc.is_in(batch["outcome"], pa.array(["handled", "failed"])))
                rows.append(pa.table(decided.filter(_are_in(decided, bucket, of))))
        # The last of those that sort by attempt; one attempt is decided by one receive.
        decided = pa.concat_tables(rows).sort_by("attempt").group_by(["source", "message_id"], use_threads=False)
        return decided.aggregate([("attempt", "last"), ("receive_id", "last")]).rename_columns(list(_IDENTITY))

    def finished(self) -> tuple[str, ...]:
        """The receives that have outcomes in the windows: those that a replay replaces."""
        return tuple(sorted(self._receives(file for files in self._outcomes().values() for file in files)))

    def _receives(self, files: Iterable[File]) -> set[str]:
        return {id_ for file in files for id_ in receive_ids(self.lake, file.path)}

    def backlog(self) -> Backlog:
        """How many messages it may come to, without a look at them: duplicates and what was returned count, too."""
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
        """Share out each window by a hash of the message's id; `demand` does not cut a window short.

        A replay of half a window would lose the other half, for it replaces them all.
        """
        messages = self._files("messages", MESSAGES)
        shares = []
        for window, outcomes in sorted(self._outcomes().items()):
            rows = sum(stored.rows for stored in outcomes)
            of = max(1, min(concurrency, rows // SPLIT_ROWS), -(-rows // BUCKET_ROWS))
            raw = [stored.path for stored in messages.get(window, [])]
            at = {"outcomes": [stored.path for stored in outcomes], "messages": raw, "of": of}
            # How many are in a bucket is not known before they are read: no more than there are.
            shares += [Share(at={**at, "bucket": n}, window=window, messages=rows) for n in range(of)]
        return shares

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Read one bucket of one window; of the others' messages no more than a batch at a time.

        A message that its source gave no `sequence` gets its place in the window's raw log: other buckets are read by
        other tasks.

        Raises:
            SourceError: The raw log does not hold all of it.
        """
        decided = self._decided(share.at["outcomes"], share.at["bucket"], share.at["of"])
        mine, first = set(keys_of(decided, *_IDENTITY).to_pylist()), 0
        for path in share.at["messages"]:
            for batch in self._batches(path, only(MESSAGES, *REPLAYED.names, "receive_id")):
                chosen = []
                for row, key in enumerate(keys_of(batch, *_IDENTITY).to_pylist()):
                    if key in mine:  # the raw log may hold a message twice
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
                f"another replay replaced messages of {share.window} after this one began, and published its results. "
                "Start this replay again if it is still needed"
            )
        raise SourceError(
            f"of the messages decided in {share.window} the raw log lacks {len(mine)} in one of {share.at['of']} "
            "parts: retention took them, and a replay would lose what became of them. Choose later windows"
        )


def _are_in(rows: pa.RecordBatch, bucket: int, of: int) -> pa.Array:
    """Which messages belong to a bucket, by their id: all attempts of a message are in one."""
    if of == 1:
        return pa.repeat(True, rows.num_rows)
    keys = keys_of(rows, "source", "message_id").to_pylist()
    return pa.array([zlib.crc32(key.encode()) % of == bucket for key in keys], pa.bool_())
