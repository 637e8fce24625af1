"""Time and memory of the commands on failures, by the number of open failures in one window.

Run it as `python -m benchmarks.failures [--failures 1000 100000 1000000]`. Each failure has an id of its own, a payload
of 250 bytes and a reason with numbers of its own. Each step runs in its own process, and prints its seconds, its
processor seconds and the peak of its memory; `nothing` shows what a process needs that only loads the code.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa

from benchmarks.events import payloads
from benchmarks.options import options
from pipeline_platform import Message, Pipeline, Producer
from pipeline_platform.lake.failures import closing
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.failures.failure_events import Selection
from pipeline_platform.lake.failures.inspection import grouped
from pipeline_platform.lake.reader import filled
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import FAILED, Table, Tables
from pipeline_platform.lake.writer import write_rows

A_RUN = 100_000
"""Failures that a run leaves, in one file."""
WINDOW = "2026-01-01T0000"
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


class Orders(Pipeline):
    """A pipeline whose messages failed."""

    name = "orders"
    producer = Producer(source="queue")

    def handle_message(self, message: Message, context: object) -> Message:
        """Fail."""
        return message.failed("no order")


def leave(lake: Lake, count: int) -> None:
    """Commit failures as runs do."""
    table = Table(lake, Orders.name, "failed", FAILED)
    table.ensure()
    data = list(payloads(1_000))
    for first in range(0, count, A_RUN):
        numbers = range(first, min(first + A_RUN, count))
        rows = pa.table({
            "message_id": [str(uuid.uuid5(uuid.NAMESPACE_OID, str(number))) for number in numbers],
            "reason": [f"order {number} has a negative total: -{number % 997}.5" for number in numbers],
            "data": pa.array([data[number % 1_000] for number in numbers], pa.binary()),
            "at": pa.array([BEGAN + timedelta(milliseconds=number) for number in numbers], FAILED.field("at").type),
        })  # fmt: skip
        receive_id = f"receive-{first}"
        same = {"source": "queue", "attempt": 1, "state": "open", "stage": "handle_message", "kind": "ValueError"}
        events = filled(rows, FAILED, receive_id=receive_id, **same)
        files = write_rows(lake, Orders.name, receive_id, [("failed", WINDOW, events)])
        with table.look() as handle:
            table.swap(handle, receive_id, files)


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


def main() -> None:
    """Run the benchmark and print the result."""
    for count in options(__doc__, failures=[1_000, 100_000, 1_000_000]).failures:
        print(f"{count:,} failures:")
        with tempfile.TemporaryDirectory(prefix="bench-") as root:
            leave(Lake(root=root), count)
            for step in STEPS:
                with ProcessPoolExecutor(1, get_context("spawn")) as processes:
                    took, processor, peak = processes.submit(measured, step, root).result()
                print(f"  {step}: {took:.2f} s, {processor:.2f} s of a processor, {peak:,.0f} MB", flush=True)


if __name__ == "__main__":
    main()
