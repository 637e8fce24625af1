"""Failed messages as a source: open failures of some windows, to be retried."""

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from pipeline_platform.lake.failures import failure_events
from pipeline_platform.lake.failures.failure_events import ALL, Failures, Selection, open_failures
from pipeline_platform.lake.failures.held import due_with, first_of, open_in_partitions
from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.reader import filled
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import FAILED, Table
from pipeline_platform.model.actions import AckActions, AckPolicy
from pipeline_platform.model.message import ATTEMPT_KEY, DELIVERIES, PAYLOAD
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.contract import Refused, Share, Source

_COUNTED = "_open_failures.json"


class LakeSource(Source):
    """Messages stored in the lake, which need no lease and no acknowledgement."""

    lake: Lake = Field(description="Lake with the tables.")
    pipeline: str = Field(description="Name of the pipeline.")
    windows: tuple[str, ...] | None = Field(None, description="Windows to read; None for all.")

    def _files(self, name: str, schema: pa.Schema, version: int | None = None) -> dict[str, list[File]]:
        """Return the files of a table by window, oldest first, with paths under the lake's root."""
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
        """Return rows of a table as deliveries; `others` replace columns, and missing columns are null."""
        deliveries = filled(rows, schema, redelivered=False, **others).cast(schema)
        return list(deliveries.combine_chunks().to_batches())

    @property
    def ack_actions(self) -> AckActions:
        """Accepts every ack action; the original source is not contacted."""
        return {}

    def acknowledge(self, action: str, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Do nothing: outcomes are in the tables."""
        return []


class Counts(NamedTuple):
    """Numbers of failures of a window.

    Attributes:
        open: Failures that are not closed, dead ones included.
        dead: Open failures without automatic retry.
        due: Earliest due time of the other open failures, as `failure_events.seconds`; None if they have none.
        scheduled: Open failures with a due time.
    """

    open: int
    dead: int
    due: int | None
    scheduled: int

    def at_most(self, selection: Selection) -> int:
        """Return the greatest number of failures that a selection can match; exact for a selection by state only."""
        waiting = self.open - self.dead
        is_due = self.due is not None and self.due <= failure_events.seconds(selection.due_by)
        return {"open": self.open, "waiting": waiting, "due": waiting if is_due else 0, "dead": self.dead}[
            selection.state
        ]


NONE = Counts(0, 0, None, 0)


class FailedMessages(LakeSource):
    """The open failures of a pipeline: the latest event of their message is a failure.

    The next event of a message acknowledges its failure: a failure with `attempt + 1` keeps it open, `closed` closes
    it. If two receives retry the same failure, one of them decides it.
    """

    selection: Selection = Field(ALL, description="Failures to read.")
    holds: bool = Field(False, description="Whether the pipeline holds partitions.")

    @property
    def ack_policy(self) -> AckPolicy:
        """The policy of a source whose messages are failures."""
        return super().ack_policy._replace(closes_failures=True)

    def paths(self) -> dict[str, list[str]]:
        """Return the paths of the table's files by window."""
        return {window: [file.path for file in files] for window, files in self._files("failed", FAILED).items()}

    def by_window(self) -> dict[str, Counts]:
        """Return the numbers of failures of each window with open failures, for any selection."""
        return {window: counts for window, counts in self._count(self.paths()).items() if counts.open}

    def chosen_by_window(self) -> dict[str, int]:
        """Return the number of selected failures by window; windows without any are omitted."""
        return self._chosen(self.paths())

    def sources(self) -> list[str]:
        """Return the sources of the selected failures."""
        also_due = self._also_due()
        rows = (rows for paths in self.paths().values() for rows in self._of(paths, also_due).rows("source"))
        return sorted({source for some in rows for source in pc.unique(some["source"]).to_pylist()})

    def _chosen(self, files: Mapping[str, Sequence[str]]) -> dict[str, int]:
        selection, chosen, also_due = self.selection, {}, self._also_due()
        for window, counts in self._count(files).items():
            count = counts.open if also_due is not None else counts.at_most(selection)
            by_key = selection.message_id is not None or selection.source is not None
            if count and (selection.columns or by_key or selection.state == "due"):
                count = self._of(files[window], also_due).count()
            if count:
                chosen[window] = count
        return chosen

    def open_files(self) -> dict[str, list[str]]:
        """Return the paths of the table's files by window, of all windows with open failures."""
        paths = self.paths()
        return {window: paths[window] for window, counts in self._count(paths).items() if counts.open}

    def _also_due(self) -> pa.Array | None:
        """Return `keys_of` the held failures whose partition waits for no failure; None if due times alone decide."""
        if not self.holds or self.selection.state != "due":
            return None
        everywhere = self.model_copy(update={"windows": None})
        return due_with(open_in_partitions(self.lake, everywhere.open_files()), self.selection.due_by)

    def _of(self, paths: Sequence[str], also_due: pa.Array | None) -> Failures:
        """Return the selected failures of a window's files."""
        return failure_events.chosen(self.lake, paths, self.selection, also_due)

    def _count(self, files: Mapping[str, Sequence[str]]) -> dict[str, Counts]:
        """Return the numbers of each window; count again only if its files differ from the stored count."""
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
        """Return the stored numbers of each window, with a digest of the counted files.

        The digest makes outdated numbers harmless, so the file may be overwritten, lost or unreadable.
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
        """Return the number of selected failures."""
        return Backlog(sum(self.chosen_by_window().values()))

    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """Return a share for each window with selected failures, oldest first; a window is never divided."""
        shares = []
        paths = self.paths()
        for window, count in self._chosen(paths).items():
            taken = min(count, demand)
            if taken > 0:
                shares.append(Share(at={"paths": paths[window]}, window=window, messages=taken))
                demand -= taken
        return shares

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Read the payloads of a window's failures, each with its next attempt and, as `ack_ref`, its stage."""
        left, found = share.messages, self._of(share.at["paths"], self._also_due())
        if self.holds:
            found = first_of(found, left)
        for rows in found.rows(*ATTEMPT_KEY, "stage", *PAYLOAD):
            retried = rows.slice(0, left)
            left -= retried.num_rows
            yield from self._deliveries(
                retried,
                ack_ref=pc.fill_null(retried["stage"], ""),
                ack_id=retried["message_id"],
                attempt=pc.add(retried["attempt"], pa.scalar(1, pa.int32())),
            )
            if not left:
                return
