"""How long one message takes: from the sensor's evaluation to the run's end, with warm Spark.

Run it as `python -m benchmarks.latency [--rounds N]`. A daemon of its own looks at a table queue; one message at a time
is put into it, and takes turns with a run of an empty job that another sensor asks for: what Dagster alone costs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import dagster as dg

from benchmarks.events import payloads
from benchmarks.latency_location import CALLS, queue_options
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.spark import server as spark_server

ROOT = Path(__file__).parents[1]
PATIENCE_S = 120
PAUSE_S = 6
"""Between two runs, as where messages come now and then: by its end a process stands by for the next."""


@contextmanager
def daemon(folder: Path) -> Iterator[dg.DagsterInstance]:
    """Run Dagster's daemon over the benchmark's location; yield its instance."""
    home = folder / "dagster"
    home.mkdir()
    (home / "dagster.yaml").write_text((ROOT / "dagster.yaml").read_text())
    module = {"module_name": "benchmarks.latency_location", "working_directory": str(ROOT)}
    (folder / "workspace.yaml").write_text(json.dumps({"load_from": [{"python_module": module}]}))
    os.environ["DAGSTER_HOME"] = str(home)
    # Opened before any process: two that make the same SQLite storage at once leave it unusable.
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


def evaluations(instance: dg.DagsterInstance) -> dict[str, float]:
    """When the sensor that asked for a run began to look, by run."""
    return {
        run_id: tick.timestamp
        for state in instance.all_instigator_state()
        for tick in instance.get_ticks(state.instigator_origin_id, state.selector_id, limit=1_000)
        for run_id in tick.run_ids
    }


def next_run(instance: dg.DagsterInstance, job: str, seen: set[str]) -> tuple[float, float]:
    """Wait for a job's next run to end; return how long it took from evaluation to end, and from its start."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for record in instance.get_run_records(dg.RunsFilter(job_name=job), limit=5):
            run = record.dagster_run
            if run.run_id not in seen and run.is_finished and record.end_time and record.start_time:
                assert run.status is dg.DagsterRunStatus.SUCCESS, f"run {run.run_id} of {job} ended as {run.status}"
                seen.add(run.run_id)
                return record.end_time - evaluations(instance)[run.run_id], record.end_time - record.start_time
        time.sleep(0.1)
    raise TimeoutError(f"no run of {job} within {PATIENCE_S} s")


def measure(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Let messages and empty runs take turns; return seconds from evaluation, and from the run's start, to its end."""
    times: dict[str, list[tuple[float, float]]] = {"one message": [], "empty run": []}
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        folder = Path(temporary)
        queue = TableQueue.model_validate(queue_options(folder))
        queue.create()
        spark_server.start(folder / "spark")
        try:
            with daemon(folder) as instance:
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
        finally:
            spark_server.stop(folder / "spark")
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    median = {
        name: [statistics.median(column) for column in zip(*took, strict=True)]
        for name, took in measure(rounds).items()
    }
    print(f"\nmedians of {rounds} rounds, from the sensor's evaluation to the run's end (and from its start)\n")
    for name, (whole, running) in median.items():
        print(f"| {name} | {whole:.2f} s | ({running:.2f} s) |")
    print(f"\none message / empty run: {median['one message'][0] / median['empty run'][0]:.2f}")


if __name__ == "__main__":
    main()
