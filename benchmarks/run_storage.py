"""Storage that a run leaves in Dagster: events, rows and bytes, before and after maintenance deletes old runs.

Run it as `python -m benchmarks.run_storage [--runs N] [--messages N] [--seconds N]`. A daemon evaluates a table queue
that gets some messages at a time, so they are a run. With `--seconds`, runs are continuous: they get a message per
second for that time. It prints a row for SQLite, and one for PostgreSQL if that is installed. Sizes are those of
compact files: each measurement starts with VACUUM.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import psycopg

from benchmarks.events import payloads
from benchmarks.latency import daemon, next_run
from benchmarks.latency_location import IDLE_TIMEOUT, Single, queue_options
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.orchestration.retention.run_retention import delete_old_runs
from servers import postgres

TABLES = ("event_logs", "asset_event_tags", "asset_check_executions", "runs", "run_tags")
"""Tables that grow with runs. Snapshots of jobs grow with changes of the code, and ticks are deleted by Dagster."""
KEPT = timedelta(days=14)
LATER = timedelta(days=15)
Stored = Counter[str]
"""Rows by table, and bytes."""


def in_sqlite(home: Path) -> Stored:
    """Return what is in the files of runs, of the index, of the list of runs and of the logs."""
    stored: Stored = Counter()
    for path in (home / "history").rglob("*.db"):
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("VACUUM")
            present = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            for table in present.intersection(TABLES):
                stored[table] += connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            pages, size = (connection.execute(f"PRAGMA {each}").fetchone()[0] for each in ("page_count", "page_size"))
            stored["bytes"] += pages * size  # not the size of the file: with it the log of the VACUUM would count
    stored["bytes"] += logs(home)
    return stored


def logs(home: Path) -> int:
    """Return the bytes of the output of steps."""
    return sum(path.stat().st_size for path in (home / "storage").rglob("*") if path.is_file())


def in_postgres(home: Path, url: str) -> Stored:
    """Return what is in the tables, with their indexes, and in the logs."""
    stored: Stored = Counter()
    with psycopg.connect(url, autocommit=True) as connection:
        for table in TABLES:
            connection.execute(f"VACUUM FULL {table}")
            count, size = connection.execute(
                f"SELECT (SELECT count(*) FROM {table}), pg_total_relation_size('{table}')"
            ).fetchone() or (0, 0)
            stored[table], stored["bytes"] = count, stored["bytes"] + size
    stored["bytes"] += logs(home)
    return stored


def measure(folder: Path, given: argparse.Namespace, storage: dict[str, Any], look: Callable[[Path], Stored]) -> str:
    """Make runs, then delete them all except the newest; return a row of the table."""
    if given.seconds:
        os.environ[IDLE_TIMEOUT] = "10"
    folder.mkdir()
    queue = TableQueue.model_validate(queue_options(folder))
    queue.create()
    with daemon(folder, storage=storage) as instance:
        seen: set[str] = set()

        def pull(seconds: int) -> None:
            queue.enqueue(payloads(given.messages))
            for _ in range(seconds):
                time.sleep(1)
                queue.enqueue(payloads(1))
            next_run(instance, "single_pull", seen)

        pull(0)
        first, before = set(seen), look(folder / "dagster")
        for _ in range(given.runs):
            pull(given.seconds)
        after = look(folder / "dagster")
        events = sum(len(instance.all_logs(run_id)) for run_id in seen - first)
        by, began = dg.DagsterRun(job_name="single_maintenance"), time.perf_counter()
        deleted = delete_old_runs(instance, Single, KEPT, by, datetime.now(UTC) + LATER).runs
        took, left = time.perf_counter() - began, look(folder / "dagster")
    grown, freed = after - before, after - left
    print(f"before: {dict(before)}, after: {dict(after)}, left: {dict(left)}", flush=True)
    rows, rows_freed = ((sum(each.values()) - each["bytes"]) for each in (grown, freed))
    cells = [
        *(each / given.runs for each in (events, rows, grown["bytes"])),
        rows_freed / deleted,
        freed["bytes"] / deleted,
    ]
    return " | ".join([*(f"{cell:,.0f}" for cell in cells), f"{took / deleted:.2f} s"])


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--messages", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=0)
    given, rows = parser.parse_args(), {}
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        folder = Path(temporary)
        rows["SQLite"] = measure(folder / "sqlite", given, {}, in_sqlite)
        if (lack := postgres.missing()) is not None:
            print(lack)
        else:
            with postgres.serve(folder) as server:
                url = server.address
                # Dagster has a driver of its own.
                storage = {"storage": {"postgres": {"postgres_url": url.replace("://", "+psycopg2://")}}}
                rows["PostgreSQL"] = measure(folder / "postgres", given, storage, lambda home: in_postgres(home, url))
    print("\n| storage | events per run | rows | bytes | rows freed per deleted run | bytes freed | to delete it |")
    print("|-|-|-|-|-|-|-|")
    for name, row in rows.items():
        print(f"| {name} | {row} |")


if __name__ == "__main__":
    main()
