"""A full replay: every message of some windows, as their finished receives left it, given out once more."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field

from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import OUTCOMES, Table
from pipeline_platform.message import DELIVERIES, MESSAGES
from pipeline_platform.source import Backlog, Refused, Share, Source, SourceError


class ReceivedMessages(Source):
    """What was decided in some windows, read from the raw log: each message once, at its last attempt.

    A receive on it replaces the rows of the receives it read (`finished`) in every table.
    """

    lake: Lake = Field(description="Where the tables are.")
    pipeline: str = Field(description="Whose messages.")
    windows: tuple[str, ...] = Field(description="Of these windows.")
    version: int = Field(description="Version of `outcomes` to go by.")

    def _files(self, name: str, schema: pa.Schema, version: int | None = None) -> dict[str, list[str]]:
        table = Table(self.lake, self.pipeline, name, schema)
        files: dict[str, list[str]] = {}
        handle = table.open()
        if version is not None:
            handle.load_as_version(version)
        for file in table.files(handle, self.windows):
            files.setdefault(file.window, []).append(f"{self.pipeline}/{name}/{file.path}")
        return files

    def _decided(self, paths: Sequence[str]) -> pa.Table:
        """The messages decided in some files of one window, each once: at its last attempt, by its receive."""
        rows = []
        for path in paths:
            with self.lake.open_input(path) as file:
                found = pq.read_table(file, columns=["source", "message_id", "attempt", "receive_id", "outcome"])
            rows.append(found.filter(pc.is_in(found["outcome"], pa.array(["handled", "failed"]))))
        # The last of those that sort by attempt; one attempt is decided by one receive.
        decided = pa.concat_tables(rows).sort_by("attempt").group_by(["source", "message_id"], use_threads=False)
        return decided.aggregate([("attempt", "last"), ("receive_id", "last")]).rename_columns(
            ["source", "message_id", "attempt", "receive_id"]
        )

    def finished(self) -> tuple[str, ...]:
        """The receives that have outcomes in the windows: those that a replay replaces."""
        found: set[str] = set()
        for paths in self._files("outcomes", OUTCOMES, self.version).values():
            for path in paths:
                with self.lake.open_input(path) as file:
                    # By the few ids that there are, not by row: the driver calls this.
                    ids = pq.read_table(file, columns=["receive_id"], read_dictionary=["receive_id"])["receive_id"]
                found.update(pc.unique(ids.cast(pa.string())).to_pylist())
        return tuple(sorted(found))

    def at_most(self) -> int:
        """How many messages it may come to, without a look at them: duplicates and what was returned count, too."""
        table = Table(self.lake, self.pipeline, "outcomes", OUTCOMES)
        handle = table.open()
        handle.load_as_version(self.version)
        return sum(file.rows for file in table.files(handle, self.windows))

    def backlog(self) -> Backlog:
        """Count the messages that were decided."""
        outcomes = self._files("outcomes", OUTCOMES, self.version)
        return Backlog(sum(self._decided(paths).num_rows for paths in outcomes.values()))

    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """Share out each window by a hash of the message's id; `demand` does not cut a window short.

        A replay of half a window would lose the other half, for it replaces them all.
        """
        del demand, receive_id
        outcomes = self._files("outcomes", OUTCOMES, self.version)
        messages = self._files("messages", MESSAGES)
        return [
            Share(
                at={"outcomes": outcomes[window], "messages": messages.get(window, []), "bucket": n, "of": concurrency},
                window=window,
                messages=0,
            )
            for window in sorted(outcomes)
            for n in range(concurrency)
        ]

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Read one bucket of one window.

        Raises:
            SourceError: The raw log does not hold all of it.
        """
        del receive_id
        decided = _identity(self._decided(share.at["outcomes"])).to_pylist()
        mine = {key for key in decided if zlib.crc32(key.encode()) % share.at["of"] == share.at["bucket"]}
        wanted = pa.array(mine, pa.string())
        for path in share.at["messages"]:
            with self.lake.open_input(path) as file:
                parquet = pq.ParquetFile(file)
                for group in range(parquet.metadata.num_row_groups):
                    rows = parquet.read_row_group(group)
                    keys = _identity(rows)
                    chosen = []
                    for row in pc.indices_nonzero(pc.is_in(keys, wanted)).to_pylist():
                        key = keys[row].as_py()
                        if key in mine:  # the raw log may hold a message twice
                            mine.remove(key)
                            chosen.append(row)
                    if chosen:
                        yield from self._deliveries(rows.take(pa.array(chosen, pa.int64())))
        if mine:
            raise SourceError(
                f"of the messages decided in {share.window} the raw log lacks {len(mine)} in one of {share.at['of']} "
                "parts: retention took them, and a replay would lose what became of them. Choose later windows"
            )

    def _deliveries(self, rows: pa.Table) -> list[pa.RecordBatch]:
        columns: dict[str, Any] = {name: rows[name] for name in DELIVERIES.names}
        columns["redelivered"] = pa.repeat(False, rows.num_rows)
        batches: list[pa.RecordBatch] = pa.table(columns, schema=DELIVERIES).combine_chunks().to_batches()
        return batches

    def ack(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Nothing to do: the source was told long ago."""
        del ack_ref, ack_ids
        return []

    def release(self, ack_ref: str, ack_ids: Sequence[str], delay_s: int = 0) -> list[Refused]:
        """Nothing to do, as for `ack`."""
        del ack_ref, ack_ids, delay_s
        return []


def _identity(rows: pa.Table) -> pa.Array:
    attempt = pc.cast(rows["attempt"], pa.string())
    key = pc.binary_join_element_wise(rows["source"], rows["message_id"], attempt, rows["receive_id"], "\0")
    return key.combine_chunks()
