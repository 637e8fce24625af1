"""Gain of a second worker: whole runs on a cluster with one worker and with two, of one core each, in turns.

Run it as `python -m benchmarks.workers [--messages N] [--rounds N] [--computes]`. A callback waits for a millisecond,
as for a service, so that the workers need not share this machine's cores; or it computes for as long.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from benchmarks.events import IDIOMS, ByJson
from benchmarks.handling import Bench
from benchmarks.options import options, spread
from pipeline_platform.model.message import Message
from pipeline_platform.model.options import Processors
from pipeline_platform.spark import engine
from servers.spark_cluster import cluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COST_S = 0.001


class Waits(ByJson):
    """Waits for each message."""

    name = "waits"
    processors = Processors(concurrency=4, max_demand=500_000)

    def handle_message(self, message: Message, context: Any) -> Message:
        """Wait, then decode and route the message."""
        time.sleep(COST_S)
        return super().handle_message(message, context)


class Computes(Waits):
    """Computes for each message."""

    name = "computes"

    def handle_message(self, message: Message, context: Any) -> Message:
        """Compute, then decode and route the message."""
        until = time.thread_time() + COST_S
        while time.thread_time() < until:
            pass
        return ByJson.handle_message(self, message, context)


def executors(session: SparkSession) -> set[int]:
    """Return the executors that have tasks, by the processes from which their Python workers are forked."""

    def name(_: int) -> Iterator[pa.RecordBatch]:
        time.sleep(0.2)
        yield pa.record_batch({"executor": [os.getppid()]})

    return set(engine.run(session, name, 8, pa.schema([("executor", pa.int64())]))["executor"].to_pylist())


def main() -> None:
    """Run the benchmark and print the result."""
    given = options(__doc__, messages=20_000, rounds=3, computes=False)
    idiom = Computes if given.computes else Waits
    IDIOMS[idiom.name] = idiom
    times: dict[tuple[str, int], list[float]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        cluster(Path(folder)) as spark,
        closing(spark.resource("benchmarks")) as resource,
    ):
        bench = Bench(Path(folder), resource, given.messages)
        for _ in range(given.rounds):
            for workers in (2, 1):
                if len(spark.workers) > workers:
                    spark.kill_a_worker()
                elif len(spark.workers) < workers:
                    spark.add_a_worker()
                while len(executors(bench.session)) != workers:
                    time.sleep(1)
                for bench.messages in (1_000, given.messages):  # the first run warms up the new workers
                    took = bench.whole_run(idiom.name)
                whole, handling = took[f"run by {idiom.name}"], took[f"run by {idiom.name}: handle"]
                print(f"{workers} workers: run {whole:.1f} s, handling {handling:.1f} s", flush=True)
                for what, seconds in ("handling", handling), ("whole run", whole), ("rest", whole - handling):
                    times.setdefault((what, workers), []).append(seconds)
    print()
    for what in ("handling", "whole run", "rest"):
        ratios = [alone / both for alone, both in zip(times[what, 1], times[what, 2], strict=True)]
        print(f"{what}: rate with two workers / with one: {spread(ratios)}")


if __name__ == "__main__":
    main()
