"""A table queue on PostgreSQL, compared with a bare loop of `FOR UPDATE SKIP LOCKED`.

Run it as `python -m benchmarks.skip_locked [--messages N] [--rounds N]`. It starts a server, or fills and drops tables
called `benchmark*` at --url. The loop uses the same number of processes on the same server: it selects rows for update,
skips locked rows, deletes them and commits. It does without leases: its messages are handled inside the transaction, or
are lost if the process crashes. Peers take turns. The medians of the ratios are printed, by the clock and by the
processor time of clients and server together, which other load affects less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import psycopg

from pipeline_platform.connectors.table_queue import TableQueue
from servers import postgres


class Took(NamedTuple):
    """Seconds by the clock and of the processor."""

    clock: float
    processor: float


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--messages", type=int, default=400_000)
    options.add_argument("--bytes", type=int, default=250)
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--limit", type=int, default=1_000, help="Messages in a transaction of the loop.")
    options.add_argument("--demand", type=int, default=100_000, help="Messages in a receive of the queue.")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--url", help="URL of a PostgreSQL database; by default it starts a server.")
    given = options.parse_args()
    if given.url is None and postgres.missing():
        print(f"Skipped: {postgres.missing()}")
        return
    with server(given.url) as url:
        queue = TableQueue(name="benchmark", url=url, table="benchmark", lease_s=600)
        peers: list[tuple[Callable[..., int], int]] = [(loop, given.limit), (receives, given.demand)]
        ratios = []
        for nth in range(given.rounds):
            took = {}
            for peer, size in peers if nth % 2 else reversed(peers):
                fill(queue, given.messages, given.bytes)
                took[peer] = measured(peer, queue, size, given.processes, given.messages)
            bare, ours = took[loop], took[receives]
            ratios.append(Took(bare.clock / ours.clock, bare.processor / ours.processor))
            rates = " against ".join(f"{given.messages / side.clock:9,.0f}" for side in (ours, bare))
            print(f"{rates} messages per second: {ratios[-1].clock:.2f}, by processor time {ratios[-1].processor:.2f}")
        clock, processor = (statistics.median(column) for column in zip(*ratios, strict=True))
        print(f"medians of {given.rounds}: ratio {clock:.2f}, by processor time {processor:.2f}")
        drop(queue)


@contextmanager
def server(url: str | None) -> Iterator[str]:
    """Yield the server of a URL, or a server that is started."""
    if url is not None:
        yield url
        return
    with postgres.serve(Path(tempfile.gettempdir())) as started:
        yield started.address


def loop(queue: TableQueue, limit: int) -> int:
    """Lease and delete messages until the table is empty; return their number."""
    done = 0
    with psycopg.connect(queue.url.replace("+psycopg", "")) as connection:
        while True:
            with connection.transaction(), connection.cursor(binary=True) as cursor:
                some = "SELECT id, data FROM benchmark ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED"
                rows = cursor.execute(some, (limit,)).fetchall()
                if not rows:
                    return done
                cursor.execute("DELETE FROM benchmark WHERE id = ANY(%s)", ([id_ for id_, _ in rows],))
            done += len(rows)


def receives(queue: TableQueue, demand: int) -> int:
    """Receive and acknowledge, as a run's tasks do, until the queue is empty; return the number of messages."""
    done = 0
    for nth in range(1_000_000):
        receive_id = f"{os.getpid()}-{nth}"
        shares = queue.plan(demand, 1, receive_id)
        if not shares:
            return done
        ack_ids: list[str] = []
        for batch in queue.read(shares[0], receive_id):
            ack_ids += batch.column("ack_id").to_pylist()
        assert not queue.ack(receive_id, ack_ids)
        done += len(ack_ids)
    raise AssertionError("too many messages")


def measured(peer: Callable[..., int], queue: TableQueue, size: int, processes: int, messages: int) -> Took:
    """Time a peer in several processes, which are ready before the clock starts."""
    with ProcessPoolExecutor(processes, initializer=warm, initargs=(queue,)) as pool:
        list(pool.map(time.sleep, [0.5] * processes))
        before, started = processor_time(), time.perf_counter()
        assert sum(pool.map(peer, [queue] * processes, [size] * processes)) == messages
        clock = time.perf_counter() - started
        time.sleep(0.5)  # sessions that ended are counted once the server has noticed
        return Took(clock, processor_time() - before)


def warm(queue: TableQueue) -> None:
    """Import and connect, as a worker has done before its second task."""
    queue.backlog()
    queue.deliveries(message_id=["1"], data=[b""], ack_id=["1"], ack_ref="")


def processor_time() -> float:
    """Return the processor seconds of this process and its children, including a server that it started."""
    seconds = 0.0
    for process in (me := psutil.Process(), *me.children(recursive=True)):
        times = process.cpu_times()
        seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def fill(queue: TableQueue, messages: int, size: int) -> None:
    """Create a table with a number of messages, as after a vacuum."""
    drop(queue)
    queue.create()
    payload = os.urandom(size)
    queue.enqueue(payload for _ in range(messages))
    with psycopg.connect(queue.url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE benchmark")
        connection.execute("CHECKPOINT")


def drop(queue: TableQueue) -> None:
    with psycopg.connect(queue.url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS benchmark, benchmark_leases, benchmark_receives")


if __name__ == "__main__":
    main()
