"""Time a table queue: enqueue, count, lease, read and acknowledge messages with two tasks, as on Spark.

Run it as `python -m benchmarks.table_queue --messages 1000000 --bytes 250 [--url URL]`. With --url it fills and drops
tables called `benchmark*` there; without it, it uses SQLite in a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.source.contract import Share


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--messages", type=int, default=1_000_000)
    options.add_argument("--bytes", type=int, default=250)
    options.add_argument("--tasks", type=int, default=2)
    options.add_argument("--url", help="SQLAlchemy URL; SQLite in a temporary folder if unset")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        queue = TableQueue(
            name="benchmark",
            url=given.url or f"sqlite:///{Path(folder) / 'queue.db'}",
            table="benchmark",
            created_column="created",
            lease_s=600,
        )
        if given.url:
            _drop(given.url)
        _run(queue, given.messages, given.bytes, given.tasks)
        if given.url:
            _drop(given.url)


def _run(queue: TableQueue, messages: int, size: int, tasks: int) -> None:
    queue.create()
    payload = os.urandom(size)
    with _timed(f"enqueue {messages:,} of {size} B"):
        queue.enqueue(payload for _ in range(messages))
    with _timed("backlog, nothing leased"):
        queue.backlog()
    with _timed("lease half"):
        queue.plan(messages // 2, tasks, "half")
    with _timed("backlog, half leased"):
        queue.backlog()
    queue.abandon("half", list)
    with _timed("lease all, half of it again"):
        shares = queue.plan(messages, tasks, "all")
    with _timed("extend"):
        assert queue.extend("all", list)
    with ProcessPoolExecutor(tasks) as pool:
        list(pool.map(abs, range(tasks)))  # ready before the clock starts
        with _timed(f"read in {tasks} tasks, half of it marked"):
            rows = list(pool.map(_read, [queue] * len(shares), shares))
        assert sum(rows) == messages
        halves = [
            [str(id_) for id_ in range(nth * messages // tasks + 1, (nth + 1) * messages // tasks + 1)]
            for nth in range(tasks)
        ]
        scattered = [half[::10] for half in halves]
        with _timed(f"acknowledge every tenth in {tasks} tasks"):
            assert not sum(pool.map(_acknowledge, [queue] * tasks, scattered))
        with _timed(f"acknowledge the rest in {tasks} tasks"):
            assert not sum(pool.map(_acknowledge, [queue] * tasks, halves))
    assert queue.backlog().messages == 0


def _read(queue: TableQueue, share: Share) -> int:
    return sum(batch.num_rows for batch in queue.read(share, "all"))


def _acknowledge(queue: TableQueue, ids: list[str]) -> int:
    return len(queue.ack("all", ids))


@contextmanager
def _timed(what: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    print(f"{what:45}{time.perf_counter() - start:7.2f} s")


def _drop(url: str) -> None:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        for table in ("benchmark", "benchmark_leases", "benchmark_receives"):
            connection.exec_driver_sql(f"DROP TABLE IF EXISTS {table}")


if __name__ == "__main__":
    main()
