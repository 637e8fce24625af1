"""Latency of one message, from the sensor's evaluation to the end of the run, with a warm Spark.

Run it as `python -m benchmarks.latency [--rounds N] [--dagsters-launcher]`. It starts a daemon that evaluates
a table queue. One message at a time is sent to the queue, in turns with a run of an empty job that another sensor
requests, which shows the cost of Dagster alone. With `--dagsters-launcher` runs start in new processes, without
`StandbyRunLauncher`.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import dagster as dg
import yaml

from benchmarks.events import payloads
from benchmarks.latency_location import CALLS, queue_options
from benchmarks.options import options
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.spark import server as spark_server

ROOT = Path(__file__).parents[1]
PATIENCE_S = 120
PAUSE_S = 6
"""Pause between two runs in seconds; afterwards a standby process is ready, as with rare messages."""


@contextmanager
def daemon(
    folder: Path, *, standby: bool = True, storage: Mapping[str, Any] | None = None
) -> Iterator[dg.DagsterInstance]:
    """Run a warm Spark, and Dagster's daemon with the benchmark's location, in SQLite or another storage.

    Yields:
        The instance.
    """
    spark = folder / "spark"
    spark_server.start(spark)
    home = folder / "dagster"
    home.mkdir()
    settings = yaml.safe_load((ROOT / "dagster.yaml").read_text()) | (storage or {})
    if not standby:
        del settings["run_launcher"]
    (home / "dagster.yaml").write_text(json.dumps(settings))
    module = {"module_name": "benchmarks.latency_location", "working_directory": str(ROOT)}
    (folder / "workspace.yaml").write_text(json.dumps({"load_from": [{"python_module": module}]}))
    os.environ["DAGSTER_HOME"] = str(home)
    # Opened before any process, because two processes that create the same SQLite storage at once damage it.
    with dg.DagsterInstance.get() as instance, (folder / "daemon.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "dagster._daemon", "run", "-w", str(folder / "workspace.yaml")],
            cwd=ROOT,
            env={**os.environ, "LATENCY_BENCHMARK": str(folder)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield instance
        finally:
            for sent in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, sent)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
            spark_server.stop(spark)


def evaluations(instance: dg.DagsterInstance) -> dict[str, float]:
    """Return, by run, the time when the sensor that requested it started to evaluate."""
    return {
        run_id: tick.timestamp
        for state in instance.all_instigator_state()
        for tick in instance.get_ticks(state.instigator_origin_id, state.selector_id, limit=1_000)
        for run_id in tick.run_ids
    }


def next_run(instance: dg.DagsterInstance, job: str, seen: set[str]) -> tuple[float, float]:
    """Wait for the end of a job's next run; return its seconds from evaluation to end, and from start to end."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for record in instance.get_run_records(dg.RunsFilter(job_name=job), limit=5):
            run = record.dagster_run
            if run.run_id not in seen and run.is_finished and record.end_time and record.start_time:
                assert run.status is dg.DagsterRunStatus.SUCCESS, f"run {run.run_id} of {job} ended as {run.status}"
                seen.add(run.run_id)
                return record.end_time - evaluations(instance)[run.run_id], record.end_time - record.start_time
        time.sleep(0.1)
    raise TimeoutError(f"{job}: no run within {PATIENCE_S} s")


def measure(rounds: int, *, standby: bool) -> dict[str, list[tuple[float, float]]]:
    """Let messages and empty runs take turns; return the seconds from evaluation and from start to the end."""
    times: dict[str, list[tuple[float, float]]] = {"one message": [], "empty run": []}
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        folder = Path(temporary)
        queue = TableQueue.model_validate(queue_options(folder))
        queue.create()
        with daemon(folder, standby=standby) as instance:
            seen: set[str] = set()
            for turn in range(rounds + 1):
                for name, job in (("one message", "single_pull"), ("empty run", "empty")):
                    time.sleep(PAUSE_S)
                    if job == "empty":
                        (folder / CALLS).write_text(str(turn))
                    else:
                        queue.enqueue(payloads(1))
                    whole, running = next_run(instance, job, seen)
                    note = "  (warming up)" if not turn else ""
                    print(f"{name:12} {whole:5.2f} s, {running:5.2f} s of it in the run{note}", flush=True)
                    if turn:
                        times[name].append((whole, running))
            assert queue.backlog().messages == 0
    return times


def main() -> None:
    """Run the benchmark and print the result."""
    given = options(__doc__, rounds=5, dagsters_launcher=False)
    rounds = given.rounds
    median = {
        name: [statistics.median(column) for column in zip(*took, strict=True)]
        for name, took in measure(rounds, standby=not given.dagsters_launcher).items()
    }
    print(f"\nmedians of {rounds} rounds, from the sensor's evaluation to the run's end (and from its start)\n")
    for name, (whole, running) in median.items():
        print(f"| {name} | {whole:.2f} s | ({running:.2f} s) |")
    print(f"\none message / empty run: {median['one message'][0] / median['empty run'][0]:.2f}")


if __name__ == "__main__":
    main()
