"""Runs in Dagster's SQLite storage as months leave them: copies of one run with other ids, windows and times."""

from __future__ import annotations

import re
import shutil
import sqlite3
import uuid
from collections.abc import Iterable, Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
_TIME = re.compile(r'("timestamp": )\d+\.\d+')
"""The time of an event in its JSON."""


class CopiedRuns:
    """Copies of a finished run of one window.

    Args:
        home: Folder of the Dagster instance.
        run_id: The run.
        window: Its window.
    """

    def __init__(self, home: Path, run_id: str, window: str) -> None:
        self._history, self._run_id, self._window = home / "history", run_id, window
        with closing(self._open("runs.db")) as runs, closing(self._open("runs/index.db")) as index:
            self._runs = {name: _rows(runs, name, "run_id", [run_id]) for name in ("runs", "run_tags")}
            self._events = _rows(index, "event_logs", "run_id", [run_id])
            self._tags = _rows(index, "asset_event_tags", "event_id", [event["id"] for event in self._events])
            self._checks = _rows(index, "asset_check_executions", "run_id", [run_id])
        with closing(self._open(f"runs/{run_id}.db")) as events:
            events.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def add(self, window: str, at: datetime) -> None:
        """Add a run of a window that ended at a time."""
        run_id, time = str(uuid.uuid4()), at.astimezone(UTC)
        stamp = time.strftime("%Y-%m-%d %H:%M:%S.%f")

        def changed(row: Mapping[str, Any], **others: Any) -> dict[str, Any]:
            text = {key: self._renamed(value, run_id, window, time) for key, value in row.items() if key != "id"}
            times = {key: stamp for key, value in row.items() if value and key.endswith("timestamp")}
            return {**text, **times, **others}

        seconds = {"start_time": time.timestamp() - 1, "end_time": time.timestamp()}
        with closing(self._open("runs.db")) as runs, runs:
            _insert(runs, "runs", [changed(row, **seconds) for row in self._runs["runs"]])
            _insert(runs, "run_tags", [changed(row) for row in self._runs["run_tags"]])
        with closing(self._open("runs/index.db")) as index, index:
            events = [changed(row) for row in self._events]
            ids = dict(zip((row["id"] for row in self._events), _insert(index, "event_logs", events), strict=True))
            tags = [changed(row, event_id=ids[row["event_id"]]) for row in self._tags]
            _insert(index, "asset_event_tags", tags)
            of_events = [key for key in (self._checks or [{}])[0] if key.endswith("storage_id")]
            checks = [changed(row, **{key: ids.get(row[key], row[key]) for key in of_events}) for row in self._checks]
            _insert(index, "asset_check_executions", checks)
        copy = shutil.copy(self._history / f"runs/{self._run_id}.db", self._history / f"runs/{run_id}.db")
        with closing(sqlite3.connect(copy)) as own, own:
            own.create_function("renamed", 1, lambda event: self._renamed(event, run_id, window, time))
            own.execute("UPDATE event_logs SET run_id = ?, timestamp = ?, event = renamed(event)", (run_id, stamp))

    def _renamed(self, value: Any, run_id: str, window: str, at: datetime) -> Any:
        if not isinstance(value, str):
            return value
        text = value.replace(self._run_id, run_id).replace(self._window, window)
        return _TIME.sub(rf"\g<1>{at.timestamp():.6f}", text)

    def _open(self, name: str) -> sqlite3.Connection:
        connection = sqlite3.connect(self._history / name, timeout=60)
        connection.row_factory = sqlite3.Row
        return connection


def _rows(connection: sqlite3.Connection, table: str, column: str, values: Iterable[Any]) -> Rows:
    query = f"SELECT * FROM {table} WHERE {column} = ? ORDER BY id"
    return [dict(row) for value in values for row in connection.execute(query, [value])]


def _insert(connection: sqlite3.Connection, table: str, rows: Rows) -> list[int]:
    """Insert rows; return their ids."""
    ids = []
    for row in rows:
        marks = ", ".join("?" * len(row))
        columns = ", ".join(f'"{name}"' for name in row)
        cursor = connection.execute(f"INSERT INTO {table} ({columns}) VALUES ({marks})", [*row.values()])
        ids.append(cursor.lastrowid or 0)
    return ids


def size_of(home: Path) -> int:
    """Return the bytes of the files of Dagster's storage."""
    return sum(path.stat().st_size for path in (home / "history").rglob("*") if path.is_file())
