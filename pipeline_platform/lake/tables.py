"""The tables of a pipeline: their columns, their commits, and what was added to them since."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.file_times import time_of_files
from pipeline_platform.lake.kept_decimals import as_stored
from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.refused_changes import SchemaChangeError, check_windows, refuse_changes
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.message import MESSAGES
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.schema import arrow_schema

if TYPE_CHECKING:
    from deltalake import DeltaTable

_TEXT = pa.string()
_MESSAGE = {"source": _TEXT, "message_id": _TEXT, "attempt": pa.int32()}


def _schema(columns: dict[str, pa.DataType], *texts: str) -> pa.Schema:
    return pa.schema([*columns.items(), *((name, _TEXT) for name in texts)])


OUTCOMES = _schema(_MESSAGE, "receive_id", "outcome", "ack_ref", "ack_id", "action", "window")
"""What became of every message. `outcome` is `handled` or `failed`, which decide it, or `returned` (given back to the
source on failure) or `duplicate` (another receive decided it), which do not. `action` is the word for the source, or
`told early`."""

_FAILURE = _schema(_MESSAGE, "state", "stage", "kind", "reason", "traceback", "batcher", "batch_key")
_PAYLOAD = pa.schema({"data": pa.binary(), "metadata": _TEXT, "at": pa.timestamp("us", "UTC")})
_ORDER = pa.schema({"partition": _TEXT, "sequence": pa.int64()})
_DUE = ("due_at", pa.timestamp("us", "UTC"))
FAILED = pa.schema([*_FAILURE, *_PAYLOAD, ("receive_id", _TEXT), ("window", _TEXT), _DUE, *_ORDER])
"""Failures and their ends, append only. The event of a message with the highest `attempt` counts: `open`, `dead` (open,
without automatic retry) or `closed`. An `open` or `dead` event contains the payload as it was delivered, its partition
and sequence; `due_at` is when an `open` event is retried, or null."""

SYSTEM = _schema(_MESSAGE, "batch_key", "batch_id", "receive_id", "window").append(pa.field("child", pa.int32()))
"""What every batcher's table has beside the data. `child` numbers the rows of one message, from 0; it is null where
`handle_message` returned no list."""

DECIDED, FENCED = 1, 2
"""States of a receive in `outcomes`. Release 0.3 wrote 3 for a receive that a re-execution took over: undecided."""

_CUT = "error sending request"
"""What delta-rs says of a store that it lost in the middle of a request which it does not send twice by itself."""

_COLOUR = re.compile(r"\x1b\[[\d;]*m")

RETENTION = "delta.setTransactionRetentionDuration"
"""A table property of every table that runs make."""
KEEP_TRANSACTIONS = timedelta(days=30)
"""How long a table remembers the transaction of a receive. The rows of an older receive show whether it decided."""


class CommitConflictError(Exception):
    """Another commit came first: look again."""


class CommitError(Exception):
    """A table refuses a commit, and would refuse it again. Names the table and what Delta said."""


class LogExpiredError(Exception):
    """The log no longer shows what happened since a version."""


def columns_of(pipeline: type[Pipeline], table: str) -> pa.Schema:
    """The columns of one of the pipeline's tables."""
    fixed = {"messages": MESSAGES, "outcomes": OUTCOMES, "failed": FAILED}
    if table in fixed:
        return fixed[table]
    model = pipeline.batchers[table].table_schema
    data = pa.schema([("data", pa.string())]) if model is None else arrow_schema(model)
    return pa.schema([*data, *SYSTEM])


class Table:
    """One Delta table, partitioned by `window`.

    It keeps the handles that it opened: to open a table reads its whole log, to look again only what is new.
    """

    def __init__(self, lake: Lake, pipeline: str, name: str, schema: pa.Schema) -> None:
        self.lake, self.pipeline, self.name, self.schema = lake, pipeline, name, schema
        self.uri = lake.uri(pipeline, name)
        self._idle: list[DeltaTable] = []
        self._transactions: dict[str, tuple[int, int | None]] = {}

    def path(self, file: str) -> str:
        """A file's path under the lake's root."""
        return f"{self.pipeline}/{self.name}/{file}"

    def open(self) -> DeltaTable:
        """Open the table as it is now, by a handle that is the caller's alone."""
        from deltalake import DeltaTable

        return DeltaTable(self.uri, storage_options=self.lake.patient_options)

    @contextmanager
    def look(self) -> Iterator[DeltaTable]:
        """Lend a handle that shows the table as it is now. Nobody else has this handle meanwhile.

        A commit by it fails if another commit came since the look: loop over this, and `suppress(CommitConflictError)`.
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
        """Its newest version."""
        with self.look() as handle:
            return handle.version()

    def exists(self) -> bool:
        """Whether a receive ever made it."""
        from deltalake.exceptions import TableNotFoundError

        # Not `is_deltatable`: no other thread runs until it has its answer, none that renews a lease either.
        with suppress(TableNotFoundError), self.look():
            return True
        return False

    def ensure(self) -> None:
        """Make it, or add the columns that its model has gained; a `SchemaChangeError` where a type has changed."""
        from deltalake.exceptions import TableNotFoundError

        while True:
            with suppress(CommitConflictError):  # another receive made or widened it just now
                try:
                    with self.look() as handle:
                        self._widen(handle)
                    return
                except TableNotFoundError:
                    self._create()

    def _create(self) -> None:
        from deltalake import DeltaTable, Schema

        days = f"interval {KEEP_TRANSACTIONS.days} days"
        # To read a checkpoint takes as many requests as some seven commits.
        often = {} if self.lake.is_local else {"delta.checkpointInterval": "10"}
        with self._committing(-1):
            DeltaTable.create(
                self.uri,
                schema=Schema.from_arrow(self.schema),
                mode="ignore",
                partition_by=["window"],
                configuration={RETENTION: days, **often},
                storage_options=self.lake.patient_options,
            )

    def check_types(self, handle: DeltaTable) -> None:
        """Refuse columns that changed their type, with a `SchemaChangeError`."""
        refuse_changes(f"{self.pipeline}/{self.name}", handle.schema().fields, as_stored(self.schema, handle).fields)

    def _widen(self, handle: DeltaTable) -> None:
        self.check_types(handle)
        there = {field.name for field in handle.schema().fields}
        if added := [field for field in as_stored(self.schema, handle).fields if field.name not in there]:
            with self._committing(handle.version()):
                handle.alter.add_columns(added)

    def files(self, handle: DeltaTable, windows: Iterable[str] | None = None) -> list[File]:
        """The files of some windows, or of all, as of this handle."""
        adds = pa.RecordBatchReader.from_stream(handle.get_add_actions(flatten=True)).read_all()  # needs no pandas
        if windows is not None:  # before a value is made of each: a table may have files of years
            adds = adds.filter(pc.is_in(adds["partition.window"], pa.array(windows, pa.string())))
        names = ["path", "partition.window", "num_records", "size_bytes", "modification_time"]
        return [
            File(self.name, window, path, rows, size, committed_at=datetime.fromtimestamp(at / 1000, UTC))
            for path, window, rows, size, at in zip(*(adds[name].to_pylist() for name in names), strict=True)
        ]

    def added_since(self, handle: DeltaTable, version: int) -> list[str]:
        """Paths of the files that commits after `version` added, up to this handle. Compaction adds no data.

        Raises:
            LogExpiredError: The log does not reach back to `version` any more.
        """
        adds = (action.get("add") for action in self._actions_since(handle, version))
        return [str(add["path"]) for add in adds if add and add["dataChange"]]

    def lost_rows_since(self, handle: DeltaTable, version: int) -> bool:
        """Whether a commit after `version` took rows out, up to this handle. Compaction takes none."""
        removes = (action.get("remove") for action in self._actions_since(handle, version))
        return any(remove and remove["dataChange"] for remove in removes)

    def begins(self, receive_id: str) -> None:
        """Note that nobody knows a receive yet: its transaction can only be in commits that come."""
        if self._idle:
            self._transactions[receive_id] = self._idle[-1].version(), None

    def known(self, receive_id: str) -> int | None:
        """What the transaction of a receive that began here said when it was last looked at, or committed."""
        return self._transactions.get(receive_id, (0, None))[1]

    def transaction_version(self, handle: DeltaTable, receive_id: str) -> int | None:
        """What the transaction of a receive says, as of this handle; of one that began here, by new commits alone."""
        with suppress(LogExpiredError, KeyError):
            version, state = self._transactions[receive_id]
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
                    f"{self.pipeline}/{self.name} has no commit {later} in its log any more: what was added since "
                    f"version {version} is unknown"
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
        """Commit files, and remove others from the table, if nothing was committed since the look.

        A receive's id names its transaction, and `state` is what that says. `not_before` is for `time_of_files`.
        `is_new` is false if the rows are the same.

        Raises:
            CommitConflictError: Something was committed since.
            CommitError: The table refuses it.
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
        schema, version = as_stored(self.schema, handle), handle.version()
        # Maintenance cleans the log up: to look what has expired lists all of it.
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
        """The columns of its files: those of the schema, and those that the model has no more."""
        ours, there = {field.name: field for field in self.schema}, pa.schema(handle.schema().to_arrow())
        return pa.schema([ours.get(field.name, field) for field in there if field.name != "window"])

    def shorten_log(self, handle: DeltaTable) -> None:
        """Let readers begin at a checkpoint, which leaves out transactions that are over."""
        handle.create_checkpoint()
        self._sync_log(handle.version())  # before the commits that it stands for are removed
        handle.cleanup_metadata()

    @contextmanager
    def _committing(self, version: int) -> Iterator[None]:
        """Have a commit on top of a version on disk when it is done; name the table in its errors."""
        from deltalake.exceptions import CommitFailedError, DeltaError

        # What another has committed a moment ago may not be on disk yet, and this commit builds on it.
        self._sync_log(version)
        try:
            yield
        except OSError as error:
            if not self.lake.is_local and _CUT in str(error):
                # It may have come through: whoever commits looks again, once the store is back, and finds it.
                raise CommitConflictError(f"{self.uri} was cut off at version {self.version() + 1}") from error
            raise OSError(f"{self.uri} cannot be written to: {_plain(error)}") from error
        except DeltaError as error:
            # As conflicts, Delta reports also what it refuses for good: what only appends, a feature that it lacks.
            if self.exists() and self.version() > version:
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
        log = self.path("_delta_log")
        while self.lake.is_local and version >= 0 and os.path.exists(self.lake.uri(log, f"{version:020d}.json")):
            names = [f"{version:020d}.json"]
            checkpoint = [f"{version:020d}.checkpoint.parquet", "_last_checkpoint"]
            if all(os.path.exists(self.lake.uri(log, name)) for name in checkpoint):  # else another is at it
                names += checkpoint
            self.lake.sync(*(f"{log}/{name}" for name in names))
            version += 1


def _plain(error: Exception) -> str:
    """Return what delta-rs says in coloured lines as one line without colours."""
    return " ".join(_COLOUR.sub("", str(error)).split())


def side_by_side(work: Callable[[Table], None], tables: Iterable[Table]) -> None:
    """Do something to several tables at once: each waits for many answers of an object store."""
    with ThreadPoolExecutor() as threads:
        for _ in threads.map(work, tables):
            pass


class Tables:
    """All tables of one pipeline."""

    def __init__(self, lake: Lake, pipeline: type[Pipeline]) -> None:
        self.lake, self.pipeline = lake, pipeline
        self.names = ("messages", "outcomes", "failed", *pipeline.batchers)
        self._tables = {name: Table(lake, pipeline.name, name, columns_of(pipeline, name)) for name in self.names}

    def __getitem__(self, name: str) -> Table:
        """One table, by name; of a batcher that is gone since, as it lies in the lake."""
        if name not in self._tables:
            gone = Table(self.lake, self.pipeline.name, name, pa.schema([]))
            with gone.look() as handle:
                gone.schema = pa.schema(handle.schema().to_arrow())
            self._tables[name] = gone
        return self._tables[name]

    def ensure(self) -> None:
        """Make or widen every table, by `check_windows` and `Table.ensure`. A run does it before it leases anything."""
        check_windows(self.lake, self.pipeline, self.windows_with_data)
        side_by_side(Table.ensure, map(self.__getitem__, self.names))

    def refusals(self) -> dict[str, str]:
        """Why runs would refuse the models of batchers, by batcher; empty where all fit their tables."""
        refused = {}
        for table in (self[name] for name in self.pipeline.batchers):
            if table.exists():
                with table.look() as handle:
                    try:
                        table.check_types(handle)
                    except SchemaChangeError as error:
                        refused[table.name] = str(error)
        return refused

    def begins(self, receive_id: str) -> None:
        """Note a receive that nobody knows yet; see `Table.begins`."""
        for name in self.names:
            self[name].begins(receive_id)

    def windows_with_data(self) -> set[str]:
        """The windows that any table has files of."""
        found = set()
        for table in map(self.__getitem__, self.names):
            if table.exists():
                with table.look() as handle:
                    found |= {file.window for file in table.files(handle)}
        return found
