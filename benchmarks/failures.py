"""Time and memory of the commands on failures and of retries, by the number of failures and of windows.

Run it as `python -m benchmarks.failures [--failures 1000 100000 1000000] [--windows 24 168 720]`; with 0, the part is
left out. Each failure has an id of its own, a payload of 250 bytes and a reason with numbers of its own.

- Commands, with all failures in one window: each step runs in its own process, and prints its seconds, its processor
  seconds and the peak of its memory; `nothing` shows what a process needs that only loads the code.
- A whole retry of these failures, for 15 minutes at most: runs of the job `orders_retry`, one after the other, until no
  failure is open. Each run is a process with a local worker instead of Spark, and includes the time to load the code.
  The peak is of all processes of a run, with shared pages counted once.
- A retry over many windows in one run, with 10 failures in each window, and again when no failure is left.
"""

from __future__ import annotations

import resource
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import psutil
import pyarrow as pa

from benchmarks.events import payloads
from benchmarks.failures_location import BEGAN, PER_RUN, Orders, prepare, retry
from benchmarks.options import options
from pipeline_platform.lake.failures import closing
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.failures.failure_events import Selection
from pipeline_platform.lake.failures.inspection import grouped
from pipeline_platform.lake.reader import filled
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import FAILED, Table, Tables
from pipeline_platform.lake.writer import write_rows
from pipeline_platform.model.windows import window_key

A_RUN = 100_000
"""Failures that a run leaves, in one file."""
IN_A_WINDOW = 10
"""Failures of each window, for a retry over many windows."""
LONGEST_S = 900
WINDOW = window_key(BEGAN)


def leave(lake: Lake, count: int, *windows: str) -> None:
    """Commit failures as runs do: a number in each window."""
    table = Table(lake, Orders.name, "failed", FAILED)
    table.ensure()
    data = list(payloads(1_000))
    for first in range(0, count, A_RUN):
        numbers = range(first, min(first + A_RUN, count))
        receive_id = f"receive-{windows[0]}-{first}"
        parts = (("failed", window, _events(numbers, window, receive_id, data)) for window in windows)
        files = write_rows(lake, Orders.name, receive_id, parts)
        with table.look() as handle:
            table.swap(handle, receive_id, files)


def _events(numbers: range, window: str, receive_id: str, data: Sequence[bytes]) -> pa.Table:
    rows = pa.table({
        "message_id": [str(uuid.uuid5(uuid.NAMESPACE_OID, f"{window} {number}")) for number in numbers],
        "reason": [f"order {number} has a negative total: -{number % 997}.5" for number in numbers],
        "data": pa.array([data[number % 1_000] for number in numbers], pa.binary()),
        "at": pa.array([BEGAN + timedelta(milliseconds=number) for number in numbers], FAILED.field("at").type),
    })  # fmt: skip
    same = {"source": "queue", "attempt": 1, "state": "open", "stage": "handle_message", "kind": "ValueError"}
    return filled(rows, FAILED, receive_id=receive_id, **same)


def failures(lake: Lake, **selection: str) -> FailedMessages:
    """Return the failures of a selection."""
    return FailedMessages(name="queue", lake=lake, pipeline=Orders.name, selection=Selection(**selection))


STEPS: dict[str, Callable[[Lake], object]] = {
    "nothing": lambda lake: None,
    "list": lambda lake: grouped(failures(lake), datetime.now(UTC)),
    "retry, selection by kind": lambda lake: failures(lake, kind="ValueError").plan(A_RUN, 2, "r"),
    "retry, selection by reason": lambda lake: failures(lake, reason="negative").plan(A_RUN, 2, "r"),
    "retry, reading the payloads of a run": lambda lake: [
        sum(rows.num_rows for rows in failures(lake).read(share, "r")) for share in failures(lake).plan(A_RUN, 2, "r")
    ],
    "close": lambda lake: closing.close(Tables(lake, Orders), failures(lake), "me", "test orders"),
    "reopen": lambda lake: closing.reopen(Tables(lake, Orders), failures(lake)),
}


def measured(step: str, root: str) -> tuple[float, float, float]:
    """Return the seconds, the processor seconds and the peak memory in MB of a step in this process."""
    lake, began, used = Lake(root=root), time.perf_counter(), time.process_time()
    STEPS[step](lake)
    took, processor = time.perf_counter() - began, time.process_time() - used
    # Not `getrusage`, whose peak includes the process that started this one.
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return took, processor, int(peak.split()[1]) / 1_000


class Spent(NamedTuple):
    """Figures of runs: seconds, processor seconds, and the peak memory in MB of all processes of a run."""

    wall_s: float
    processor_s: float
    peak_mb: float

    def __str__(self) -> str:
        """Return the figures as text."""
        return f"{self.wall_s:.1f} s, {self.processor_s:.1f} s of a processor, {self.peak_mb:,.0f} MB"


def run_apart(root: str, windows: Sequence[str], messages: int | None, began: datetime) -> Spent:
    """Execute a run of the retry in a process of its own, as Dagster does."""
    started = time.perf_counter()
    with ProcessPoolExecutor(1, get_context("spawn")) as processes, peak_memory() as peak:
        processor_s = processes.submit(_retried, root, windows, messages, began).result()
    return Spent(time.perf_counter() - started, processor_s, max(peak))


def _retried(root: str, windows: Sequence[str], messages: int | None, began: datetime) -> float:
    retry(root, windows, messages, began)
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@contextmanager
def peak_memory() -> Iterator[list[float]]:
    """Yield a list that gets the memory in MB of the processes below this process, four times a second."""
    seen, done, here = [0.0], threading.Event(), psutil.Process()

    def look() -> None:
        while not done.wait(0.25):
            total = 0
            for process in here.children(recursive=True):
                with suppress(psutil.Error):
                    total += process.memory_full_info().pss
            seen.append(total / 1e6)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def retry_whole(root: str) -> None:
    """Retry failures by as many runs as needed, and print the sum of their figures."""
    prepare(root)
    began, runs = datetime.now(UTC), list[Spent]()
    while sum(run.wall_s for run in runs) < LONGEST_S:
        left = sum(failures(Lake(root=root)).chosen_by_window().values())
        if not left:
            break
        runs.append(run_apart(root, [WINDOW], min(left, PER_RUN), began))
    spent = Spent(sum(run.wall_s for run in runs), sum(run.processor_s for run in runs), max(r.peak_mb for r in runs))
    print(f"  whole retry in {len(runs)} runs, {left:,} failures left: {spent}")
    print(f"    the first run: {runs[0]}; the last: {runs[-1]}", flush=True)


def retry_windows(root: str, count: int) -> None:
    """Retry the failures of many windows in one run, then retry none; print the figures of both."""
    windows = [window_key(BEGAN + timedelta(hours=hour)) for hour in range(count)]
    leave(Lake(root=root), IN_A_WINDOW, *windows)
    prepare(root)
    for what in (f"{IN_A_WINDOW} failures in each", "no failures"):
        spent = run_apart(root, windows, None, BEGAN)
        print(f"{count} windows, {what}: {spent}, {spent.processor_s / count:.3f} s a window", flush=True)


def main() -> None:
    """Run the benchmark and print the result."""
    given = options(__doc__, failures=[1_000, 100_000, 1_000_000], windows=[24, 168, 720])
    for count in filter(None, given.failures):
        print(f"{count:,} failures:")
        with tempfile.TemporaryDirectory(prefix="bench-") as root:
            leave(Lake(root=root), count, WINDOW)
            for step in STEPS:
                with ProcessPoolExecutor(1, get_context("spawn")) as processes:
                    took, processor, peak = processes.submit(measured, step, root).result()
                print(f"  {step}: {took:.2f} s, {processor:.2f} s of a processor, {peak:,.0f} MB", flush=True)
            retry_whole(root)
    for count in filter(None, given.windows):
        with tempfile.TemporaryDirectory(prefix="bench-") as root:
            retry_windows(root, count)


if __name__ == "__main__":
    main()
