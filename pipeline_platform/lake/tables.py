"""The tables of a pipeline: their columns, their commits, and what was added to them since."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from pipeline_platform.lake.kept_windows import check_windows
from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.message import MESSAGES
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.schema import arrow_schema

if TYPE_CHECKING:
    from deltalake import DeltaTable, Transaction, WriterProperties
    from deltalake.transaction import AddAction, RemoveAction

OUTCOMES = pa.schema(
    [
        ("source", pa.string()),
        ("message_id", pa.string()),
        ("attempt", pa.int32()),
        ("receive_id", pa.string()),
        ("outcome", pa.string()),
        ("ack_ref", pa.string()),
        ("ack_id", pa.string()),
        ("action", pa.string()),
        ("window", pa.string()),
    ]
)
"""What became of every message. `outcome` is `handled` or `failed`, which decide it, or `returned` (given back to the
source on failure) or `duplicate` (another receive decided it), which do not."""

FAILED = pa.schema(
    [
        ("source", pa.string()),
        ("message_id", pa.string()),
        ("attempt", pa.int32()),
        ("state", pa.string()),
        ("stage", pa.string()),
        ("kind", pa.string()),
        ("reason", pa.string()),
        ("traceback", pa.string()),
        ("batcher", pa.string()),
        ("batch_key", pa.string()),
        ("data", pa.binary()),
        ("metadata", pa.string()),
        ("at", pa.timestamp("us", "UTC")),
        ("receive_id", pa.string()),
        ("window", pa.string()),
    ]
)
"""Failures and their ends, append only: the event with the highest `attempt` says whether a message is `open` or
`closed`. An `open` event holds the payload as it was delivered."""

SYSTEM = pa.schema(
    [
        ("source", pa.string()),
        ("message_id", pa.string()),
        ("attempt", pa.int32()),
        ("batch_key", pa.string()),
        ("batch_id", pa.string()),
        ("receive_id", pa.string()),
        ("window", pa.string()),
    ]
)
"""What every batcher's table has beside the data."""

DECIDED, FENCED, TAKEN = 1, 2, 3
"""What the transaction of a receive says in `outcomes`: it decided, it never may, or another run has taken it over."""

_COLOUR = re.compile(r"\x1b\[[\d;]*m")

_KEEP_TRANSACTIONS = "interval 30 days"
"""For how long a receive that died can still be finished by its transaction; then by its rows."""


class SchemaChangeError(Exception):
    """A column changed its type: names table, column, both types and the way out."""


class CommitConflictError(Exception):
    """Another commit came first: look again."""


class CommitError(Exception):
    """A table refuses a commit, and would again: names it, and says what Delta said."""


class LogExpiredError(Exception):
    """The log no longer tells what happened since a version: it was looked at too long ago."""


class Stored(NamedTuple):
    """A file of a table.

    Attributes:
        path: Under the table's folder.
        window: Whose rows it holds.
        rows: How many.
        bytes: Its size.
        committed_at: When it became part of the table; of a compacted one, when its rows came to lie together.
    """

    path: str
    window: str
    rows: int
    bytes: int
    committed_at: datetime


def columns_of(pipeline: type[Pipeline], table: str) -> pa.Schema:
    """The columns of one of the pipeline's tables."""
    fixed = {"messages": MESSAGES, "outcomes": OUTCOMES, "failed": FAILED}
    if table in fixed:
        return fixed[table]
    model = pipeline.batchers[table].table_schema
    data = pa.schema([("data", pa.string())]) if model is None else arrow_schema(model)
    return pa.schema([*data, *SYSTEM])


class Table:
    """One Delta table, partitioned by `window`."""

    def __init__(self, lake: Lake, pipeline: str, name: str, schema: pa.Schema) -> None:
        self.lake, self.pipeline, self.name, self.schema = lake, pipeline, name, schema

    @property
    def uri(self) -> str:
        """Its address."""
        return self.lake.uri(self.pipeline, self.name)

    @cached_property
    def stored_schema(self) -> pa.Schema:
        """The columns that are in files: all but the partition."""
        return pa.schema([field for field in self.schema if field.name != "window"])

    def open(self) -> DeltaTable:
        """Look at it as it is now.

        Raises:
            deltalake.exceptions.TableNotFoundError: It is not there yet.
        """
        from deltalake import DeltaTable

        return DeltaTable(self.uri, storage_options=self.lake.storage_options or None)

    def exists(self) -> bool:
        """Whether a receive ever made it."""
        from deltalake import DeltaTable

        return DeltaTable.is_deltatable(self.uri, storage_options=self.lake.storage_options or None)

    def ensure(self) -> None:
        """Make it, or add the columns that its model has gained.

        Raises:
            SchemaChangeError: A column has another type than the table's.
        """
        while True:
            try:
                if not self.exists():
                    self._create()
                self._widen(self.open())
            except CommitConflictError:
                continue  # another receive made or widened it just now: look again
            else:
                return

    def _create(self) -> None:
        from deltalake import DeltaTable, Schema

        with self._committing(-1):
            DeltaTable.create(
                self.uri,
                schema=Schema.from_arrow(self.schema),
                mode="ignore",
                partition_by=["window"],
                configuration={"delta.setTransactionRetentionDuration": _KEEP_TRANSACTIONS},
                storage_options=self.lake.storage_options or None,
            )

    def _widen(self, handle: DeltaTable) -> None:
        from deltalake import Schema

        there = {field.name: field for field in handle.schema().fields}
        ours = Schema.from_arrow(self.schema).fields
        for field in ours:
            before = there.get(field.name)
            if before is not None and before.type != field.type:
                raise SchemaChangeError(
                    f"{self.pipeline}/{self.name}.{field.name} is {before.type} in the table and {field.type} in the "
                    "model: give the field a new name, or write the batcher to a table of another name"
                )
        if added := [field for field in ours if field.name not in there]:
            with self._committing(handle.version()):
                handle.alter.add_columns(added)

    def files(self, handle: DeltaTable, windows: Iterable[str] | None = None) -> list[Stored]:
        """The files of some windows, or of all, as of this handle."""
        adds = pa.table(handle.get_add_actions(flatten=True))
        wanted = None if windows is None else set(windows)
        told = ["path", "partition.window", "num_records", "size_bytes", "modification_time"]
        rows = zip(*(adds[name].to_pylist() for name in told), strict=True)
        files = (
            Stored(path, window, count, size, datetime.fromtimestamp(at / 1000, UTC))
            for path, window, count, size, at in rows
        )
        return [file for file in files if wanted is None or file.window in wanted]

    def added_since(self, handle: DeltaTable, version: int) -> list[str]:
        """Paths of the files that commits after `version` added, up to this handle; compaction adds no data.

        Raises:
            LogExpiredError: The log does not reach back to `version` any more.
        """
        added = []
        for later in range(version + 1, handle.version() + 1):
            log = self.lake.read(f"{self.pipeline}/{self.name}/_delta_log/{later:020d}.json")
            if log is None:
                raise LogExpiredError(
                    f"{self.pipeline}/{self.name} has no commit {later} in its log any more: what was added since "
                    f"version {version} cannot be told"
                )
            for line in log.splitlines():
                action = json.loads(line).get("add")
                if action and action["dataChange"]:
                    added.append(str(action["path"]))
        return added

    def swap(
        self,
        handle: DeltaTable,
        receive_id: str,
        files: Sequence[File],
        *,
        removed: Sequence[Stored] = (),
        state: int = DECIDED,
    ) -> None:
        """Commit files under the receive's transaction, if nothing was committed since `handle` was opened.

        Raises:
            CommitConflictError: Something was.
        """
        from deltalake import Transaction
        from deltalake.transaction import AddAction

        now = int(time.time() * 1000)
        adds = [
            AddAction(file.path, file.bytes, {"window": file.window}, now, data_change=True, stats=file.stats)
            for file in files
        ]
        self._commit(handle, [*adds, *_removals(removed)], receive_id, [Transaction(receive_id, state, now)])

    def remove(self, handle: DeltaTable, removed: Sequence[Stored]) -> None:
        """Commit that files are no part of the table any more, if nothing was committed since `handle` was opened.

        Raises:
            CommitConflictError: Something was.
        """
        self._commit(handle, _removals(removed), "retention", [])

    def compact(self, handle: DeltaTable, writer_properties: WriterProperties) -> int:
        """Put the small files of each window together; return how many became part of larger ones.

        Raises:
            CommitConflictError: What was to be compacted was replaced meanwhile.
        """
        before = {file.path for file in self.files(handle)}
        with self._committing(handle.version()):
            metrics = handle.optimize.compact(max_concurrent_tasks=1, writer_properties=writer_properties)
        new = [file.path for file in self.files(self.open()) if file.path not in before]
        self.lake.sync(*(f"{self.pipeline}/{self.name}/{path}" for path in new))
        return int(metrics["numFilesRemoved"])

    def shorten_log(self, handle: DeltaTable) -> None:
        """Let readers begin at a checkpoint, which leaves out transactions that the table need not keep any more."""
        handle.create_checkpoint()
        self._sync_log(handle.version())  # before the commits that it stands for are removed
        handle.cleanup_metadata()

    def _commit(
        self,
        handle: DeltaTable,
        actions: Sequence[AddAction | RemoveAction],
        whose: str,
        transactions: list[Transaction],
    ) -> None:
        from deltalake import CommitProperties, Schema

        with self._committing(handle.version()):
            handle.create_write_transaction(
                list(actions),
                "append",
                Schema.from_arrow(self.schema),
                ["window"],
                commit_properties=CommitProperties(
                    max_commit_retries=0,
                    app_transactions=transactions,
                    custom_metadata={"by": whose},
                ),
            )

    @contextmanager
    def _committing(self, version: int) -> Iterator[None]:
        """Commit on top of a version: on disk when it is done, and with errors that name the table.

        Raises:
            CommitConflictError: Another commit came first.
            CommitError: The table refuses it, whoever comes first.
        """
        from deltalake.exceptions import CommitFailedError, DeltaError

        # What another has committed a moment ago may not be on disk yet, and this commit builds on it.
        self._sync_log(version)
        try:
            yield
        except OSError as error:
            raise OSError(f"{self.uri} cannot be written to: {_plain(error)}") from error
        except DeltaError as error:
            # As conflicts, Delta reports also what it refuses for good: what only appends, a feature that it lacks.
            if self.exists() and self.open().version() > version:
                raise CommitConflictError(f"{self.pipeline}/{self.name} changed since version {version}") from error
            if not isinstance(error, CommitFailedError):
                raise
            raise CommitError(
                f"{self.uri} refuses to be committed to: {_plain(error)}. Nobody else committed meanwhile, so it would "
                "again: take back the table property or feature that it names"
            ) from error
        self._sync_log(version + 1)

    def _sync_log(self, version: int) -> None:
        """Have commits on disk from a version on, which delta-rs leaves to the system, and checkpoints with them."""
        folder = f"{self.pipeline}/{self.name}/_delta_log"
        while self.lake.is_local and version >= 0 and os.path.exists(self.lake.uri(folder, f"{version:020d}.json")):
            names = [f"{version:020d}.json"]
            checkpoint = [f"{version:020d}.checkpoint.parquet", "_last_checkpoint"]
            if all(os.path.exists(self.lake.uri(folder, name)) for name in checkpoint):  # else another is at it
                names += checkpoint
            self.lake.sync(*(f"{folder}/{name}" for name in names))
            version += 1


def _plain(error: Exception) -> str:
    """What delta-rs says in coloured lines, and without a path."""
    return " ".join(_COLOUR.sub("", str(error)).split())


def _removals(files: Sequence[Stored]) -> list[RemoveAction]:
    from deltalake.transaction import RemoveAction

    now = int(time.time() * 1000)
    return [RemoveAction(file.path, True, now, file.bytes, {"window": file.window}) for file in files]


class Tables:
    """All tables of one pipeline."""

    def __init__(self, lake: Lake, pipeline: type[Pipeline]) -> None:
        self.lake, self.pipeline = lake, pipeline
        self.names = ("messages", "outcomes", "failed", *pipeline.batchers)
        self._tables = {name: Table(lake, pipeline.name, name, columns_of(pipeline, name)) for name in self.names}

    def __getitem__(self, name: str) -> Table:
        """One table, by name."""
        return self._tables[name]

    def get(self, name: str) -> Table:
        """One table, by name; of a batcher that is gone since, as it lies in the lake."""
        if name in self._tables:
            return self._tables[name]
        stored = Table(self.lake, self.pipeline.name, name, pa.schema([]))
        return Table(self.lake, self.pipeline.name, name, pa.schema(stored.open().schema().to_arrow()))

    def __iter__(self) -> Iterator[Table]:
        """All tables."""
        return iter(self._tables.values())

    def ensure(self) -> None:
        """Make or widen every table; see `Table.ensure`. Done before anything is leased.

        Raises:
            PipelineError: What lies in them would be in other windows, or in none; see `check_windows`.
        """
        check_windows(self.lake, self.pipeline, self._windows_with_data)
        for table in self._tables.values():
            table.ensure()

    def _windows_with_data(self) -> set[str]:
        return {file.window for table in self if table.exists() for file in table.files(table.open())}
