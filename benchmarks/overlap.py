"""Gain of a second parallel run: a backlog with `max_runs=1` and with `max_runs=2`, in turns.

Run it as `python -m benchmarks.overlap [--messages N] [--rounds N]`. A daemon works off a full table queue in runs of
100,000 messages. The time is from the first claim to the last acknowledgement.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.events import payloads
from benchmarks.latency import daemon
from benchmarks.latency_location import MAX_RUNS, queue_options
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore

WITHIN_S = 600


def measure(max_runs: int, messages: int) -> tuple[float, float]:
    """Return the seconds from the first claim to the last acknowledgement, and the median of the runs."""
    os.environ[MAX_RUNS] = str(max_runs)
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        folder = Path(temporary)
        queue = TableQueue.model_validate(queue_options(folder))
        queue.create()
        queue.enqueue(payloads(messages))
        control = ControlStore(f"sqlite:///{folder}/control.sqlite")
        with daemon(folder):
            deadline = time.monotonic() + WITHIN_S
            while sum(run.messages for run in control.ended("single")) < messages:
                assert time.monotonic() < deadline, f"the backlog is not empty after {WITHIN_S} s"
                time.sleep(0.5)
            ended = control.ended("single")
    began, until = min(run.started_at for run in ended), max(run.ended_at for run in ended)
    own = statistics.median((run.ended_at - run.started_at).total_seconds() for run in ended)
    return (until - began).total_seconds(), own


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    given, ratios = parser.parse_args(), []
    for _ in range(given.rounds):
        took = {max_runs: measure(max_runs, given.messages) for max_runs in (1, 2)}
        for max_runs, (whole, own) in took.items():
            rate = given.messages / whole
            print(f"max_runs={max_runs}: {whole:.1f} s, {rate:,.0f}/s; {own:.1f} s per run", flush=True)
        ratios.append(took[1][0] / took[2][0])
    bounds = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"\nrate of max_runs=2 / rate of max_runs=1: {statistics.median(ratios):.2f} ({bounds})")


if __name__ == "__main__":
    main()
