"""Gain of a second parallel run, and of a continuous run: a full queue in each of these modes, in turns.

Run it as `python -m benchmarks.overlap [--messages N] [--rounds N]`. A daemon works off a full table queue in runs, or
in rounds of a run, of 100,000 messages. The time is from the first claim to the last acknowledgement.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.events import payloads
from benchmarks.latency import daemon
from benchmarks.latency_location import IDLE_TIMEOUT, MAX_RUNS, queue_options
from benchmarks.options import options, spread
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore

WITHIN_S = 600
MODES = {"max_runs=1": (1, 0), "max_runs=2": (2, 0), "continuous": (1, 30)}
"""Modes, with their `max_runs` and `idle_timeout`."""


def measure(max_runs: int, idle_timeout: int, messages: int) -> tuple[float, float]:
    """Return the seconds from the first claim to the last acknowledgement, and the median of the receives."""
    os.environ[MAX_RUNS], os.environ[IDLE_TIMEOUT] = str(max_runs), str(idle_timeout)
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
    given = options(__doc__, messages=1_000_000, rounds=3)
    took: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(given.rounds):
        for mode, (max_runs, idle_timeout) in MODES.items():
            whole, own = measure(max_runs, idle_timeout, given.messages)
            print(f"{mode}: {whole:.1f} s, {given.messages / whole:,.0f}/s; {own:.1f} s per receive", flush=True)
            took[mode].append(whole)
    base, *others = took
    for mode in others:
        ratios = [of_base / of_mode for of_base, of_mode in zip(took[base], took[mode], strict=True)]
        print(f"rate of {mode} / rate of {base}: {spread(ratios)}")


if __name__ == "__main__":
    main()
