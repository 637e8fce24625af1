"""Gain of three optimisations for small runs, with and without each, and the cost of a first run.

Run it as `python -m benchmarks.small_runs [--rounds N]`.

- *daemon*: a run of 20 messages handles them when Spark's Python workers have ended, as they do after a minute
  without work; here they are killed. One server forks workers from `spark/python/preloading_daemon.py`, the other
  from Spark's own daemon. The processor time of the workers is printed too, because other load affects it less.
- *one message*: a run of one message, without Spark (the first of a process, and the next ones), with Spark for
  handling only, and with Spark for all steps (`FEW`).
- *batches*: the batch step of a run of 4,000 messages, on a Spark that was just started, and again on the same Spark.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from unittest import mock

import psutil

from benchmarks.events import Batched, Events
from benchmarks.handling import Bench
from benchmarks.options import options
from pipeline_platform.orchestration.resources.spark_resource import WARM, SparkResource
from pipeline_platform.run import steps
from pipeline_platform.run.work import spark_work
from pipeline_platform.run.work.local_worker import LocalWorker
from pipeline_platform.spark import engine
from pipeline_platform.spark import server as spark_server

SETTING = "spark.python.daemon.module"
MESSAGES = 20
BATCHED = 4_000


def start(folder: Path, *, preloads: bool) -> spark_server.SparkServer:
    """Start a server with the platform's daemon or with Spark's own daemon."""
    settings = engine.local_settings

    def changed(cores: int, memory: str) -> dict[str, str]:
        return {name: value for name, value in settings(cores, memory).items() if preloads or name != SETTING}

    with mock.patch.object(engine, "local_settings", changed):
        return spark_server.start(folder)


def on(folder: Path) -> closing[SparkResource]:
    """Open a session on the server of a folder."""
    return closing(SparkResource(remote=WARM, state_folder=str(folder), packages=["benchmarks"]))


def workers(server: spark_server.SparkServer) -> list[psutil.Process]:
    """Return the Python workers of a server: the children of its daemons, which are its children."""
    return [worker for daemon in psutil.Process(server.pid).children() for worker in daemon.children()]


def cold_stage(bench: Bench, server: spark_server.SparkServer) -> tuple[float, float]:
    """Return the seconds to handle a few messages with new workers, and the processor time of these workers."""
    flow, receive, _ = bench.received(Events, bench.queue("queue"))
    for worker in workers(server):
        worker.kill()
    time.sleep(2)
    started = time.perf_counter()
    steps.handle_messages(flow, receive)
    took = time.perf_counter() - started
    spent = sum(sum(worker.cpu_times()[:2]) for worker in workers(server))
    steps.decide(flow, receive)
    steps.publish(flow, receive)
    steps.acknowledge(flow, receive)
    return took, spent


def one_message(root: Path, spark: SparkResource) -> dict[str, tuple[float, float]]:
    """Return the seconds of runs of one message, and of their handling, without Spark and with it."""
    took: dict[str, tuple[float, float]] = {}

    def run(name: str, bench: Bench, few: int = spark_work.FEW) -> None:
        with mock.patch.object(spark_work, "FEW", few):
            seconds = bench.whole_run("message.json()")
        took[f"one message: {name}"] = seconds["run by message.json()"], 0.0
        took[f"one message: {name}: handle"] = seconds["run by message.json(): handle"], 0.0

    with closing(LocalWorker(cores=2)) as worker:
        bench = Bench(root, spark, 1, worker)
        run("without Spark, first", bench)
        before = busy(worker)
        run("without Spark, next", bench)
        took["one message: without Spark, next: handle"] = (
            took["one message: without Spark, next: handle"][0],
            busy(worker) - before,
        )
    run("handled in Spark", Bench(root, spark, 1))
    run("in Spark", Bench(root, spark, 1), 0)
    return took


def busy(worker: LocalWorker) -> float:
    """Return the processor time of a local worker and its tasks."""
    worker.run(range, 1)  # type: ignore[arg-type]  # no rows; the worker counts a task once the next one has started
    return float(sum(psutil.Process(worker.start().popen.pid).cpu_times()[:4]))


def batch_steps(folder: Path) -> dict[str, tuple[float, float]]:
    """Return the seconds of the batch steps of two consecutive runs on a server of their own."""
    took: dict[str, tuple[float, float]] = {}
    spark_server.start(folder)
    try:
        with on(folder) as spark:
            bench = Bench(folder, spark, BATCHED)
            for which in ("first", "second"):
                flow, receive, _ = bench.received(Batched, bench.queue(which))
                steps.handle_messages(flow, receive)
                started = time.perf_counter()
                written = steps.batch_messages(flow, receive)
                took[f"batches: {which} run"] = time.perf_counter() - started, 0.0
                assert sum(manifest.totals.handled.total() for manifest in written.values()) == BATCHED
                steps.decide(flow, receive)
                steps.publish(flow, receive)
                steps.acknowledge(flow, receive)
    finally:
        spark_server.stop(folder)
    return took


def measure(root: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Let all variants take turns; return the seconds and the seconds of processor time by round."""
    times: dict[str, list[tuple[float, float]]] = {}
    kinds = {"preloading": True, "plain": False}
    try:
        servers = {name: start(root / name, preloads=preloads) for name, preloads in kinds.items()}
        for turn in range(rounds + 1):
            took: dict[str, tuple[float, float]] = {}
            for name, server in servers.items():
                with on(root / name) as spark:
                    took[f"daemon: {name}"] = cold_stage(Bench(root / name, spark, MESSAGES), server)
            with on(root / "preloading") as spark:
                took |= one_message(root, spark)
            took |= batch_steps(root / f"batches-{turn}")
            for name, seconds in took.items():
                print(f"{name:22} {seconds[0]:5.2f} s{'  (warming up)' if not turn else ''}", flush=True)
                if turn:
                    times.setdefault(name, []).append(seconds)
    finally:
        for name in kinds:
            spark_server.stop(root / name)
    return times


def main() -> None:
    """Run the benchmark and print the result."""
    rounds = options(__doc__, rounds=5).rounds
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        times = measure(Path(folder), rounds)
    print(f"\nmedians of {rounds} rounds (and of the workers' processor time)\n")
    for name, rows in times.items():
        took, busy = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"| {name} | {took:.2f} s | {f'({busy:.2f} s)' if busy else ''} |")


if __name__ == "__main__":
    main()
