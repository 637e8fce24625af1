"""Failed messages as a source: open failures of some windows, given out to be handled once more."""

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from pipeline_platform.lake import failure_events
from pipeline_platform.lake.failure_events import ALL, Selection, open_failures
from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.reader import filled
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import FAILED, Table
from pipeline_platform.model.actions import AckPolicy, Words
from pipeline_platform.model.message import DELIVERIES
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.contract import Refused, Share, Source

_COUNTED = "_open_failures.json"


class LakeSource(Source):
    """Messages that lie in the lake. There is nothing to lease, and nobody to acknowledge to."""

    lake: Lake = Field(description="Where the tables are.")
    pipeline: str = Field(description="Whose messages.")
    windows: tuple[str, ...] | None = Field(None, description="Of these windows only; None for all.")

    def _files(self, name: str, schema: pa.Schema, version: int | None = None) -> dict[str, list[File]]:
        """The files of a table by window, oldest first, by their paths under the lake's root; none without a table."""
        table = Table(self.lake, self.pipeline, name, schema)
        files: dict[str, list[File]] = {}
        if table.exists():
            with table.look() as handle:
                if version is not None:
                    handle.load_as_version(version)
                found = table.files(handle, self.windows)
            for file in sorted(found, key=lambda file: (file.committed_at, file.path)):
                files.setdefault(file.window, []).append(file._replace(path=table.path(file.path)))
        return files

    def _deliveries(self, rows: pa.Table, schema: pa.Schema = DELIVERIES, **others: Any) -> list[pa.RecordBatch]:
        """Return rows of a table as deliveries, with other columns in place of theirs; null where there are none."""
        deliveries = filled(rows, schema, redelivered=False, **others).cast(schema)
        return list(deliveries.combine_chunks().to_batches())

    @property
    def words(self) -> Words:
        """Whatever a callback says for the message's own source: nobody learns it."""
        return {}

    def acknowledge(self, action: str, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Do nothing: their outcome is in the tables."""
        return []


class Counts(NamedTuple):
    """The failures of a window.

    Attributes:
        open: Those that are not closed.
        dead: Those of them that nothing retries by itself.
        due: When the first of the others is due, as `failure_events.seconds`; None where none ever is.
        scheduled: Those of the others that have a time at which they are due.
    """

    open: int
    dead: int
    due: int | None
    scheduled: int

    def at_most(self, selection: Selection) -> int:
        """How many of them a selection may be about; that many, if it goes by the state alone and not by the time."""
        waiting = self.open - self.dead
        is_due = self.due is not None and self.due <= failure_events.seconds(selection.due_by)
        return {"open": self.open, "waiting": waiting, "due": waiting if is_due else 0, "dead": self.dead}[
            selection.state
        ]


NONE = Counts(0, 0, None, 0)


class FailedMessages(LakeSource):
    """The open failures of a pipeline: those whose latest event is a failure.

    The events that their next outcome commits acknowledge them: a failure with `attempt + 1` keeps one open, its end
    closes it. Of two receives that drive the same failure, one decides it.
    """

    selection: Selection = Field(ALL, description="Which of them.")

    @property
    def ack_policy(self) -> AckPolicy:
        """Without words, and its messages are failures."""
        return super().ack_policy._replace(closes_failures=True)

    def paths(self) -> dict[str, list[str]]:
        """The files of the table by window."""
        return {window: [file.path for file in files] for window, files in self._files("failed", FAILED).items()}

    def by_window(self) -> dict[str, Counts]:
        """The failures of each window with open ones, whatever the selection."""
        return {window: counts for window, counts in self._count(self.paths()).items() if counts.open}

    def open_by_window(self) -> dict[str, int]:
        """How many failures are open, dead ones included, by window; windows without any are left out."""
        return {window: counts.open for window, counts in self.by_window().items()}

    def chosen_by_window(self) -> dict[str, int]:
        """How many failures the selection is about, by window; windows without any are left out."""
        return self._chosen(self.paths())

    def sources(self) -> list[str]:
        """The sources of the failures that the selection is about."""
        rows = (rows for paths in self.paths().values() for rows in self._rows(paths))
        return sorted({source for some in rows for source in pc.unique(some["source"]).to_pylist()})

    def _chosen(self, files: Mapping[str, Sequence[str]]) -> dict[str, int]:
        selection, chosen = self.selection, {}
        for window, counts in self._count(files).items():
            count = counts.at_most(selection)
            by_key = selection.message_id is not None or selection.source is not None
            if count and (selection.by_words or by_key or selection.state == "due"):
                count = sum(rows.num_rows for rows in self._rows(files[window]))
            if count:
                chosen[window] = count
        return chosen

    def _rows(self, paths: Sequence[str], *columns: str) -> Iterator[pa.Table]:
        """Rows that the selection is about; ranks alone where nothing else is asked for."""
        some = failure_events.chosen(self.lake, paths, self.selection)
        if not columns and not self.selection.by_words:
            return iter([some])
        return failure_events.rows_of(self.lake, paths, some, self.selection, *columns)

    def _count(self, files: Mapping[str, Sequence[str]]) -> dict[str, Counts]:
        """Count the failures of each window whose files are not those that somebody counted before."""
        known = self._counted()
        counted = {}
        for window, paths in sorted(files.items()):
            digest = sha256("\0".join(sorted(paths)).encode()).hexdigest()
            before, counts = known.get(window, ("", NONE))
            if before != digest:
                counts = Counts(*failure_events.counts(open_failures(self.lake, paths)))
            counted[window] = digest, counts
        if counted.items() - known.items():
            others = {} if self.windows is None else known
            self.lake.write(f"{self.pipeline}/{_COUNTED}", json.dumps(others | counted).encode())
        return {window: counts for window, (_, counts) in counted.items()}

    def _counted(self) -> dict[str, tuple[str, Counts]]:
        """The counts of each window when somebody last counted, under a digest of the files that were counted.

        Other files, other counts: so the last one to write them is right, and they may be lost or unreadable.
        """
        try:
            counted = json.loads(self.lake.read(f"{self.pipeline}/{_COUNTED}") or b"{}")
            return {
                window: (str(digest), Counts(int(count), int(dead), None if due is None else int(due), int(scheduled)))
                for window, (digest, (count, dead, due, scheduled)) in counted.items()
            }
        except (ValueError, TypeError, AttributeError):
            return {}

    def backlog(self) -> Backlog:
        """Count the failures that the selection is about."""
        return Backlog(sum(self.chosen_by_window().values()))

    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """Share out the windows with such failures, oldest first; a window is never divided."""
        shares = []
        paths = self.paths()
        for window, count in self._chosen(paths).items():
            taken = min(count, demand)
            if taken > 0:
                shares.append(Share(at={"paths": paths[window]}, window=window, messages=taken))
                demand -= taken
        return shares

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Read the payloads of a window's failures, each with the attempt that is to come."""
        left = share.messages
        for rows in self._rows(share.at["paths"], "data", "metadata", "partition", "sequence"):
            driven = rows.slice(0, left)
            left -= driven.num_rows
            yield from self._deliveries(
                driven,
                ack_ref=self.name,
                ack_id=driven["message_id"],
                attempt=pc.add(driven["attempt"], pa.scalar(1, pa.int32())),
            )
            if not left:
                return
