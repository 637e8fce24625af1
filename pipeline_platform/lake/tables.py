"""The tables of a pipeline: columns, commits, and changes since a version."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake import schema_changes
from pipeline_platform.lake.file_times import time_of_files
from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.table_properties import outdated, properties
from pipeline_platform.model.columns.schema import described
from pipeline_platform.model.message import MESSAGES
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.sinks.contract import Sink

if TYPE_CHECKING:
    from deltalake import DeltaTable

_TEXT = pa.string()
_MESSAGE = {"source": _TEXT, "message_id": _TEXT, "attempt": pa.int32()}


def _schema(columns: dict[str, pa.DataType], *texts: str) -> pa.Schema:
    return pa.schema([*columns.items(), *((name, _TEXT) for name in texts)])


OUTCOMES = _schema(_MESSAGE, "receive_id", "outcome", "ack_ref", "ack_id", "action", "window")
"""Columns of all outcomes. `outcome` is one of `DECISIONS`, `returned` (a failure that the source redelivers) or
`duplicate` (decided by another receive). `action` is the ack action, or a marker for an early acknowledgement."""
DECISIONS = ("handled", "skipped", "failed", ERASED := "erased")
"""Outcomes that decide a message. ERASED is also the `receive_id` of an erased message: no replay replaces it."""

_FAILURE = _schema(_MESSAGE, "state", "stage", "kind", "reason", "traceback", "batcher", "batch_key")
_TIME = pa.timestamp("us", "UTC")
_PAYLOAD = pa.schema({"data": pa.binary(), "metadata": _TEXT, "at": _TIME, "receive_id": _TEXT, "window": _TEXT})
_ORDER = pa.schema({"due_at": _TIME, "partition": _TEXT, "sequence": pa.int64(), "own_partition": _TEXT})
FAILED = pa.schema([*_FAILURE, *_PAYLOAD, *_ORDER])
"""Failures and their ends, append only. The event of a message with the highest `attempt` counts: `open`, `dead` (open,
without automatic retry) or `closed`. An `open` or `dead` event contains the payload as it was delivered, its partition
and sequence; `due_at` is when an `open` event is retried, or null. `own_partition` is the partition from
`partition_by`; null in a pipeline that does not hold partitions. One that does numbers messages without a sequence."""

SYSTEM = _schema(_MESSAGE, "batch_key", "batch_id", "receive_id", "window").append(pa.field("child", pa.int32()))
"""Columns of every batcher's table beside the data. `child` numbers the rows of a message from 0; it is null if
`handle_message` did not return a list."""

DECIDED, FENCED = 1, 2
"""States of a receive in `outcomes`."""

_CUT = "error sending request"
"""Text of delta-rs's error for a connection lost during a request that it does not retry."""

_COLOUR = re.compile(r"\x1b\[[\d;]*m")


class CommitConflictError(Exception):
    """Another commit came first: read the table again, and retry."""


class CommitError(Exception):
    """A table rejects a commit permanently. The message contains the table and Delta's error."""


class LogExpiredError(Exception):
    """Commits since a version are no longer in the table's log."""


def columns_of(pipeline: type[Pipeline], table: str) -> pa.Schema:
    """Return the columns of one of the pipeline's tables."""
    fixed = {"messages": MESSAGES, "outcomes": OUTCOMES, "failed": FAILED}
    if table in fixed:
        return fixed[table]
    model = pipeline.batchers[table].table_schema
    data = pa.schema([("data", pa.string())]) if model is None else described(model)
    return pa.schema([*data, *SYSTEM])


class Table:
    """A Delta table, partitioned by `window`.

    Handles are kept open, because opening a table reads its whole log, and an update reads only new commits.
    """

    def __init__(self, lake: Lake, pipeline: str, name: str, schema: pa.Schema) -> None:
        self.lake, self.pipeline, self.name, self.schema = lake, pipeline, name, schema
        self.uri = lake.uri(pipeline, name)
        self._idle: list[DeltaTable] = []
        self._transactions: dict[str, tuple[int, int | None]] = {}

    def path(self, file: str) -> str:
        """Return a file's path under the lake's root."""
        return f"{self.pipeline}/{self.name}/{file}"

    def open(self) -> DeltaTable:
        """Open a new handle at the newest version, for the caller only."""
        from deltalake import DeltaTable

        return DeltaTable(self.uri, storage_options=self.lake.patient_options)

    @contextmanager
    def look(self) -> Iterator[DeltaTable]:
        """Return a kept handle, updated to the newest version, for exclusive use inside the context.

        A commit with it fails if another commit came first: call this in a loop, and `suppress(CommitConflictError)`.
        """
        try:
            handle = self._idle.pop()
        except IndexError:
            handle = self.open()
        else:
            handle.update_incremental()
        try:
            yield handle
        finally:
            self._idle.append(handle)

    def version(self) -> int:
        """Return the newest version."""
        with self.look() as handle:
            return handle.version()

    def exists(self) -> bool:
        """Whether the table exists."""
        from deltalake.exceptions import TableNotFoundError

        # Not `is_deltatable`, which blocks all other threads, including lease renewal.
        with suppress(TableNotFoundError), self.look():
            return True
        return False

    def ensure(self) -> None:
        """Create the table, or add new columns of its model; raise `SchemaChangeError` if a type has changed."""
        from deltalake.exceptions import TableNotFoundError

        while True:
            with suppress(CommitConflictError):  # another receive created or widened it at the same time
                try:
                    with self.look() as handle:
                        return self._widen(handle)
                except TableNotFoundError:
                    self._create()

    def _create(self) -> None:
        from deltalake import DeltaTable, Schema

        with self._committing(-1):
            DeltaTable.create(
                self.uri,
                schema=Schema.from_arrow(self.schema),
                mode="ignore",
                partition_by=["window"],
                configuration=properties(is_local=self.lake.is_local),
                storage_options=self.lake.patient_options,
            )

    def check_types(self, handle: DeltaTable) -> None:
        """Raise `SchemaChangeError` if the type of a column has changed."""
        ours = schema_changes.as_stored(self.schema, handle)
        schema_changes.refuse_changes(f"{self.pipeline}/{self.name}", handle.schema().fields, ours.fields)

    def _widen(self, handle: DeltaTable) -> None:
        self.check_types(handle)
        schema_changes.widen(handle, schema_changes.as_stored(self.schema, handle), self._committing)
        self._update_properties(handle)

    def _update_properties(self, handle: DeltaTable) -> None:
        if changed := outdated(handle.metadata().configuration):
            with self._committing(handle.version()):
                # delta-rs applies the retention of transactions, but does not know the name here.
                handle.alter.set_table_properties(changed, raise_if_not_exists=False)

    def files(self, handle: DeltaTable, windows: Iterable[str] | None = None) -> list[File]:
        """Return the files of some windows, or of all, as of this handle."""
        adds = pa.RecordBatchReader.from_stream(handle.get_add_actions(flatten=True)).read_all()  # works without pandas
        if windows is not None:  # filter before the conversion to Python: a table may have files of years
            adds = adds.filter(pc.is_in(adds["partition.window"], pa.array(windows, pa.string())))
        names = ["path", "partition.window", "num_records", "size_bytes", "modification_time"]
        return [
            File(self.name, window, path, rows, size, committed_at=datetime.fromtimestamp(at / 1000, UTC))
            for path, window, rows, size, at in zip(*(adds[name].to_pylist() for name in names), strict=True)
        ]

    def added_since(self, handle: DeltaTable, version: int) -> list[str]:
        """Return the paths of files added by commits after `version`, up to this handle, except by compaction.

        Raises:
            LogExpiredError: Commits since `version` are no longer in the log.
        """
        adds = (action.get("add") for action in self._actions_since(handle, version))
        return [str(add["path"]) for add in adds if add and add["dataChange"]]

    def lost_rows_since(self, handle: DeltaTable, version: int) -> bool:
        """Whether a commit after `version` removed rows, up to this handle. Compaction does not."""
        removes = (action.get("remove") for action in self._actions_since(handle, version))
        return any(remove and remove["dataChange"] for remove in removes)

    def begins(self, receive_id: str) -> None:
        """Record the start of a receive, and forget earlier ones: its transaction can only be in later commits."""
        if self._idle:
            self._transactions = {receive_id: (self._idle[-1].version(), None)}

    def known(self, receive_id: str) -> int | None:
        """Return the last known state of a receive that started in this process, without reading the table."""
        return self._transactions.get(receive_id, (0, None))[1]

    def has_seen_all_of(self, receive_id: str) -> bool:
        """Whether `transaction_version` has read all commits since the start of a receive."""
        return receive_id in self._transactions

    def transaction_version(self, handle: DeltaTable, receive_id: str) -> int | None:
        """Return the state of a receive as of this handle; reads only new commits if it started in this process."""
        with suppress(LogExpiredError, KeyError):
            version, state = self._transactions.pop(receive_id)
            for action in self._actions_since(handle, version):
                if (txn := action.get("txn")) and txn["appId"] == receive_id:
                    state = txn["version"]
            self._transactions[receive_id] = handle.version(), state
            return state
        return handle.transaction_version(receive_id)

    def _actions_since(self, handle: DeltaTable, version: int) -> Iterator[dict[str, Any]]:
        for later in range(version + 1, handle.version() + 1):
            log = self.lake.read(self.path(f"_delta_log/{later:020d}.json"))
            if log is None:
                raise LogExpiredError(
                    f"{self.pipeline}/{self.name}: commit {later} is no longer in the log, so changes since version "
                    f"{version} are unknown"
                )
            yield from map(json.loads, log.splitlines())

    def swap(
        self,
        handle: DeltaTable,
        transaction: str,
        files: Sequence[File],
        *,
        removed: Sequence[File] = (),
        state: int = DECIDED,
        not_before: datetime | None = None,
        is_new: bool = True,
    ) -> None:
        """Add files to the table and remove others, in one commit on top of the handle's version.

        The transaction of a receive has the receive's id, and `state` as its version. `not_before` is the least time of
        the new files; see `time_of_files`. `is_new` is False if rows are only moved to other files.

        Raises:
            CommitConflictError: Another commit came first.
            CommitError: The table rejects the commit permanently.
        """
        from deltalake import CommitProperties, PostCommitHookProperties, Transaction
        from deltalake.transaction import AddAction, RemoveAction

        now = int(time.time() * 1000)
        at = time_of_files(now, [not_before, *(file.committed_at for file in removed)])
        add = partial(AddAction, modification_time=at, data_change=is_new)
        adds = [add(file.path, file.bytes, {"window": file.window}, stats=file.stats) for file in files]
        removes = [RemoveAction(file.path, is_new, now, file.bytes, {"window": file.window}) for file in removed]
        properties = CommitProperties(
            max_commit_retries=0,
            app_transactions=[Transaction(transaction, state, now)],
            custom_metadata={"by": transaction},
        )
        schema, version = schema_changes.as_stored(self.schema, handle), handle.version()
        # Maintenance removes expired commits, because that lists the whole log.
        hooks = PostCommitHookProperties(cleanup_expired_logs=False)
        with self._committing(version):
            handle.create_write_transaction(
                [*adds, *removes],
                "append",
                schema,
                ["window"],
                commit_properties=properties,
                post_commithook_properties=hooks,
            )
        if transaction in self._transactions:
            self._transactions[transaction] = version + 1, state

    def stored_columns(self, handle: DeltaTable) -> pa.Schema:
        """Return the columns of its files, including columns removed from the model."""
        ours = {field.name: field for field in schema_changes.merged(self.schema, handle)}
        there = pa.schema(handle.schema().to_arrow())
        return pa.schema([ours.get(field.name, field) for field in there if field.name != "window"])

    def shorten_log(self, handle: DeltaTable, *, keeps_commits: bool = False) -> None:
        """Create a checkpoint, which omits expired transactions, and remove expired commits unless they are needed."""
        handle.create_checkpoint()
        self.sync_log(handle.version())  # before the commits that it replaces are removed
        if not keeps_commits:
            handle.cleanup_metadata()

    @contextmanager
    def _committing(self, version: int) -> Iterator[None]:
        """Sync a commit on top of a version to disk, and translate its errors."""
        from deltalake.exceptions import CommitFailedError, DeltaError

        # The previous commit may not be on disk yet, and this commit depends on it.
        self.sync_log(version)
        try:
            yield
        except OSError as error:
            if not self.lake.is_local and _CUT in str(error):
                # The commit may have succeeded: the caller reads the table again, and finds it.
                raise CommitConflictError(f"{self.uri}: connection lost at version {self.version() + 1}") from error
            raise OSError(f"{self.uri} cannot be written: {_plain(error)}") from error
        except DeltaError as error:
            if self.exists() and self.version() > version:
                raise CommitConflictError(f"{self.pipeline}/{self.name} changed since version {version}") from error
            if not isinstance(error, CommitFailedError):
                raise
            raise CommitError(
                f"{self.uri} rejects commits: {_plain(error)}. No other commit came first, so a retry would fail, too. "
                "Remove the table property or feature named above"
            ) from error
        self.sync_log(version + 1)

    def sync_log(self, version: int) -> None:
        """Sync commits and checkpoints from a version on to disk, because delta-rs does not."""
        log = self.path("_delta_log")
        while self.lake.is_local and version >= 0 and os.path.exists(self.lake.uri(log, f"{version:020d}.json")):
            names = [f"{version:020d}.json"]
            checkpoint = [f"{version:020d}.checkpoint.parquet", "_last_checkpoint"]
            if all(os.path.exists(self.lake.uri(log, name)) for name in checkpoint):  # else it is being written
                names += checkpoint
            self.lake.sync(*(f"{log}/{name}" for name in names))
            version += 1


def _plain(error: Exception) -> str:
    """Return the coloured lines of a delta-rs error as one line without colours."""
    return " ".join(_COLOUR.sub("", str(error)).split())


def side_by_side(work: Callable[[Table], None], tables: Iterable[Table]) -> None:
    """Call `work` for several tables in parallel, because each call waits for many requests to an object store."""
    with ThreadPoolExecutor() as threads:
        for _ in threads.map(work, tables):
            pass


class Tables:
    """All tables of one pipeline. `sinks` get the rows of batchers, by the batcher's name, beside its table."""

    def __init__(self, lake: Lake, pipeline: type[Pipeline], sinks: Mapping[str, Sink] | None = None) -> None:
        self.lake, self.pipeline, self.sinks = lake, pipeline, sinks or {}
        self.names = ("messages", "outcomes", "failed", *pipeline.batchers_with_tables())
        self._tables = {name: Table(lake, pipeline.name, name, columns_of(pipeline, name)) for name in self.names}

    def __getitem__(self, name: str) -> Table:
        """Return a table by name; for a removed batcher, with the columns of the stored table."""
        if name not in self._tables:
            gone = Table(self.lake, self.pipeline.name, name, pa.schema([]))
            with gone.look() as handle:
                gone.schema = pa.schema(handle.schema().to_arrow())
            self._tables[name] = gone
        return self._tables[name]

    def ensure(self) -> None:
        """Check the windows, and create or widen every table; a run calls it before it leases messages."""
        schema_changes.check_windows(self.lake, self.pipeline, self.windows_with_data)
        side_by_side(Table.ensure, map(self.__getitem__, self.names))

    def refusals(self) -> dict[str, str]:
        """Return errors of models that do not fit their tables, by batcher."""
        refused = {}
        for table in (self[name] for name in self.pipeline.batchers_with_tables()):
            if table.exists():
                with table.look() as handle:
                    try:
                        table.check_types(handle)
                    except schema_changes.SchemaChangeError as error:
                        refused[table.name] = str(error)
        return refused

    def begins(self, receive_id: str) -> None:
        """Record the start of a receive; see `Table.begins`."""
        for name in self.names:
            self[name].begins(receive_id)

    def windows_with_data(self) -> set[str]:
        """Return the windows that have files in any table."""
        found = set()
        for table in map(self.__getitem__, self.names):
            if table.exists():
                with table.look() as handle:
                    found |= {file.window for file in table.files(handle)}
        return found
