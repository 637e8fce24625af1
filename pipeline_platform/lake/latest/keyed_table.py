"""Delta tables with one row per key, changed by `MERGE` of delta-rs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import CommitConflictError, Table
from pipeline_platform.model.pipeline import PipelineError

if TYPE_CHECKING:
    from deltalake import CommitProperties, DeltaTable

MESSAGE = ("source", "message_id", "child")
"""Columns that identify a row of a batcher's table, and decide between rows that `order` does not distinguish."""
KEEP_HOURS = 24
"""Age from which files that a merge replaced are removed. Each merge may replace the whole table."""
TIDY_EVERY = 32
"""Number of commits after which small files are compacted and old files removed."""
_ROW = "row number"
_ABOUT = "key="
_BOUNDS = "delta.dataSkippingStatsColumns"
_PLAIN = re.compile("[A-Za-z0-9_]+")
"""Names that delta-rs accepts in this property. Another name would make it ignore the property."""


def keyed_tables(lake: Lake, pipeline: str) -> list[str]:
    """Return the names of the tables with one row per key in a pipeline's folder."""
    return [name for name in lake.folders(pipeline) if not name.startswith("_") and _is_keyed(lake, pipeline, name)]


def _is_keyed(lake: Lake, pipeline: str, name: str) -> bool:
    table = Table(lake, pipeline, name, pa.schema([]))
    if not table.exists():
        return False
    with table.look() as handle:
        return (handle.metadata().description or "").startswith(_ABOUT)


class KeyedTable(Table):
    """A Delta table with the greatest row of each key: by the columns of `order`, then by `MESSAGE`.

    `about` describes the options with which the table was created. It starts with `key=`.
    """

    def __init__(
        self,
        lake: Lake,
        pipeline: str,
        name: str,
        schema: pa.Schema,
        key: Sequence[str],
        order: Sequence[str],
        about: str,
    ) -> None:
        super().__init__(lake, pipeline, name, schema)
        self.key, self.order, self.about = tuple(key), (*order, *MESSAGE), about

    def _create(self) -> None:
        from deltalake import DeltaTable, Schema

        keep = f"interval {KEEP_HOURS} hours"
        kept = {"delta.logRetentionDuration": keep, "delta.deletedFileRetentionDuration": keep}
        with self._committing(-1):
            DeltaTable.create(
                self.uri,
                schema=Schema.from_arrow(self.schema),
                mode="ignore",
                description=self.about,
                configuration={**kept, **self._bounds()},
                storage_options=self.lake.patient_options,
            )

    def _bounds(self) -> dict[str, str]:
        """Return the property of a table with decimals, whose bounds delta-rs rounds: readers would skip files."""
        exact = [field.name for field in self.schema if "decimal" not in str(field.type)]
        if len(exact) == len(self.schema):
            return {}
        return {_BOUNDS: ",".join(filter(_PLAIN.fullmatch, exact))}

    def _update_properties(self, handle: DeltaTable) -> None:
        if _BOUNDS not in handle.metadata().configuration and (bounds := self._bounds()):
            with self._committing(handle.version()):
                handle.alter.set_table_properties(bounds)

    def check_types(self, handle: DeltaTable) -> None:
        """Raise `PipelineError` if the table was created with other options, or the type of a column has changed."""
        if (before := handle.metadata().description) != self.about:
            raise PipelineError(
                f"latest_of: must have the options of the table {self.pipeline}/{self.name}, {before or 'none'}, got "
                f"{self.about}. Restore the options, or set another name for a new table"
            )
        super().check_types(handle)

    def newest(self, rows: pa.Table) -> pa.Table:
        """Return the greatest row of each key; the last of equal rows."""
        ranked = {name: rows[name] for name in (*self.key, *self.order)}
        ranked |= {"child": pc.fill_null(rows["child"], -1), _ROW: pa.array(np.arange(rows.num_rows))}
        ascending = pa.table(ranked).sort_by([(name, "ascending") for name in self.order])
        last = ascending.group_by(list(self.key), use_threads=False).aggregate([(_ROW, "last")])
        return rows.take(last[f"{_ROW}_last"])

    def merge(self, handle: DeltaTable, rows: pa.Table, deleted: str | None = None) -> Counter[str]:
        """Merge rows with different keys, in one commit on top of the handle's version.

        A row replaces the row of its key if it is greater, or if another receive stored the same message, as a replay
        does. If it is `deleted`, it removes an equal or smaller row. This column is not stored.

        Returns:
            Numbers of rows `inserted`, `updated` and `deleted`.

        Raises:
            CommitConflictError: Another commit came first.
            CommitError: The table rejects the commit permanently.
        """
        values = {_named("t", name): _named("s", name) for name in rows.column_names if name != deleted}
        is_deleted = "false" if deleted is None else _named("s", deleted)
        after, same = self._compared()
        other = f"{_named('s', 'receive_id')} <> {_named('t', 'receive_id')}"
        has_decimals = any(pa.types.is_decimal(self.schema.field(name).type) for name in self.key)
        with self._committing(handle.version()):
            before = set(self._adds(handle)["path"].to_pylist())
            merger = handle.merge(
                rows,
                " AND ".join(f"{_named('t', name)} = {_named('s', name)}" for name in self.key),
                source_alias="s",
                target_alias="t",
                streamed_exec=has_decimals,  # False: files without a key of the rows, by their bounds, are not read
                commit_properties=self._alone(),
            )
            merger = merger.when_matched_delete(f"{is_deleted} AND ({after} OR {same})") if deleted else merger
            done = (
                merger.when_matched_update(values, f"NOT {is_deleted} AND ({after} OR ({same} AND {other}))")
                .when_not_matched_insert(values, f"NOT {is_deleted}")
                .execute()
            )
            # Before the commit is synced. Delta-rs syncs neither.
            self.lake.sync(*(self.path(path) for path in self._adds(handle)["path"].to_pylist() if path not in before))
        return Counter({name: done[f"num_target_rows_{name}"] for name in ("inserted", "updated", "deleted")})

    def _compared(self) -> tuple[str, str]:
        """Return the conditions that the new row is greater than the row of the table, and that both are equal."""
        after, equal = list[str](), list[str]()
        for name in self.order:
            source, target = _named("s", name), _named("t", name)
            if name == "child":
                source, target = f"coalesce({source}, -1)", f"coalesce({target}, -1)"
            after.append(" AND ".join([*equal, f"{source} > {target}"]))
            equal.append(f"{source} = {target}")
        return f"({' OR '.join(after)})", f"({' AND '.join(equal)})"  # flat: a parser limits the depth of parentheses

    def record(self, handle: DeltaTable, transaction: str, version: int) -> None:
        """Commit the version of a transaction, and nothing else."""
        from deltalake import Transaction

        with self._committing(handle.version()):
            handle.create_write_transaction(
                [], "append", handle.schema(), commit_properties=self._alone([Transaction(transaction, version)])
            )

    @staticmethod
    def _alone(transactions: Any = None) -> CommitProperties:
        """Return properties of a commit that fails if another commit came first."""
        from deltalake import CommitProperties

        return CommitProperties(max_commit_retries=0, app_transactions=transactions)

    def tidy(self, handle: DeltaTable, before: int) -> None:
        """Compact small files and remove old files, once per `TIDY_EVERY` commits; `before` is an earlier version."""
        handle.update_incremental()
        if handle.version() // TIDY_EVERY == before // TIDY_EVERY:
            return
        with suppress(CommitConflictError), self._committing(handle.version()):
            handle.optimize.compact(commit_properties=self._alone())
        handle.vacuum(KEEP_HOURS, dry_run=False, full=True)  # full, because files of crashed runs are not in any log

    def count(self, handle: DeltaTable) -> int:
        """Return the number of rows."""
        return sum(self._adds(handle)["num_records"].to_pylist())

    @staticmethod
    def _adds(handle: DeltaTable) -> pa.Table:
        return pa.RecordBatchReader.from_stream(handle.get_add_actions(flatten=True)).read_all()


def _named(alias: str, column: str) -> str:
    """Return a column in SQL. Quotes keep upper case."""
    return f'{alias}."{column}"'
