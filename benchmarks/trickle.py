"""Latency of a message in a trickle, by phase: look, queue, start, run.

Run it as `python -m benchmarks.trickle [--patience 0 5 30] [--seconds 120]`. A daemon evaluates a table queue that gets
one message per second. With a patience of 0 one message is worth a run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import dagster as dg
import polars as pl

from benchmarks.events import payloads
from benchmarks.latency import daemon, evaluations, next_run
from benchmarks.latency_location import PATIENCE, TAGS, queue_options
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.spark import server as spark_server

PARTS = ("look", "queue", "start", "run", "all")


class Life(NamedTuple):
    """Times of a message: sent, its run requested, out of the queue, started, ended."""

    came: float
    asked: float
    launched: float
    began: float
    ended: float

    @property
    def parts(self) -> tuple[float, ...]:
        """Return the seconds by `PARTS`."""
        return *(after - before for before, after in pairwise(self)), self.ended - self.came


def lives(instance: dg.DagsterInstance, lake: str) -> list[Life]:
    """Return the messages of the runs that have ended, except the messages of the first run."""
    asked, runs = evaluations(instance), {}
    for record in instance.get_run_records(dg.RunsFilter(statuses=[dg.DagsterRunStatus.SUCCESS])):
        run, stats = record.dagster_run, instance.get_run_stats(record.dagster_run.run_id)
        if TAGS.receive_id in run.tags and stats.launch_time and stats.start_time and stats.end_time:
            times = (asked[run.run_id], stats.launch_time, stats.start_time, stats.end_time)
            runs[run.tags[TAGS.receive_id]] = times
    rows = pl.read_delta(lake).select("receive_id", "data").rows()
    first = min(runs.values())
    return [
        Life(json.loads(data)["price"], *runs[receive])
        for receive, data in rows
        if receive in runs and runs[receive] != first
    ]


def message() -> bytes:
    """Return an event whose price is the time."""
    return json.dumps(json.loads(next(payloads(1))) | {"price": time.time()}).encode()


def measure(patience: float, seconds: int) -> list[Life]:
    """Send a trickle during a time."""
    os.environ[PATIENCE] = str(patience)
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        folder = Path(temporary)
        source = TableQueue.model_validate(queue_options(folder))
        source.create()
        spark_server.start(folder / "spark")
        try:
            with daemon(folder) as instance:
                source.enqueue([message()])
                next_run(instance, "single_pull", set())
                began = time.monotonic()
                for second in range(seconds):
                    time.sleep(max(0, began + second - time.monotonic()))
                    source.enqueue([message()])
                time.sleep(2 * patience + 15)
                return lives(instance, f"{folder}/lake/single/messages")
        finally:
            spark_server.stop(folder / "spark")


def row(patience: float, took: Sequence[Life]) -> str:
    """Return the median and the 99th percentile of each part."""
    columns = zip(*(life.parts for life in took), strict=True)
    cells = [f"{statistics.median(part):.1f}, {statistics.quantiles(part, n=100)[98]:.1f} s" for part in columns]
    return f"| {patience:g} s | {' | '.join(cells)} |"


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patience", type=float, nargs="+", default=[0, 5, 30])
    parser.add_argument("--seconds", type=int, default=120)
    given = parser.parse_args()
    print(f"| `patience` | {' | '.join(PARTS)} |\n|-|{'-|' * len(PARTS)}")
    for patience in given.patience:
        took = measure(patience, given.seconds)
        print(f"{row(patience, took)}  {len(took)} messages", flush=True)


if __name__ == "__main__":
    main()
