"""A full replay: every message of some windows, as their finished receives left it, given out once more."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import OUTCOMES, Table
from pipeline_platform.message import DELIVERIES, MESSAGES
from pipeline_platform.source import Backlog, Refused, Share, Source


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

    def _decided(self, paths: Sequence[str]) -> Iterator[tuple[str, str, int, str]]:
        columns = ["source", "message_id", "attempt", "receive_id", "outcome"]
        for path in paths:
            with self.lake.open_input(path) as file:
                rows = pq.read_table(file, columns=columns)
            for *key, outcome in zip(*(rows[name].to_pylist() for name in columns), strict=True):
                if outcome in ("handled", "failed"):
                    yield key[0], key[1], key[2], key[3]

    def finished(self) -> tuple[str, ...]:
        """The receives that have outcomes in the windows: those that a replay replaces."""
        found: set[str] = set()
        for paths in self._files("outcomes", OUTCOMES, self.version).values():
            for path in paths:
                with self.lake.open_input(path) as file:
                    found.update(pq.read_table(file, columns=["receive_id"])["receive_id"].unique().to_pylist())
        return tuple(sorted(found))

    def backlog(self) -> Backlog:
        """Count what was decided; a message that was driven again counts for each time."""
        outcomes = self._files("outcomes", OUTCOMES, self.version)
        return Backlog(sum(1 for paths in outcomes.values() for _ in self._decided(paths)))

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
        """Read one bucket of one window."""
        del receive_id
        wanted: dict[tuple[str, str], tuple[int, str]] = {}
        for source, message_id, attempt, receive in self._decided(share.at["outcomes"]):
            key = (source, message_id)
            mine = zlib.crc32(message_id.encode()) % share.at["of"] == share.at["bucket"]
            if mine and (attempt, receive) > wanted.get(key, (0, "")):
                wanted[key] = (attempt, receive)
        columns = ["source", "message_id", "attempt", "receive_id"]
        for path in share.at["messages"]:
            with self.lake.open_input(path) as file:
                parquet = pq.ParquetFile(file)
                for group in range(parquet.metadata.num_row_groups):
                    rows = parquet.read_row_group(group)
                    mine = []
                    keys = zip(*(rows[name].to_pylist() for name in columns), strict=True)
                    for row, (source, message_id, attempt, receive) in enumerate(keys):
                        if wanted.get((source, message_id)) == (attempt, receive):
                            del wanted[source, message_id]
                            mine.append(row)
                    if mine:
                        yield from self._deliveries(rows.take(pa.array(mine, pa.int64())))

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
