"""Processor time of the queries of a producer's tick by the number of runs that Dagster keeps in SQLite.

Run it as `python -m benchmarks.ticks [--runs N ...] [--claims N]`. All runs are of one pipeline, and most have ended.
With `--claims`, the control store remembers as many acknowledged receives of this pipeline and of another.
"""

import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg

from benchmarks.events import Events
from benchmarks.options import options
from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.orchestration.sensors.runs_under_way import (
    empty_in_a_row,
    ended_early,
    failed_in_a_row,
    in_flight,
    limits,
    was_filled,
)

_ROUNDS = 9


def fill(home: Path, runs: int) -> dg.DagsterInstance:
    """Return an instance with ended runs, copies of one."""
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    instance = dg.DagsterInstance.from_config(str(home))
    names = RunTags.of(Events)
    tags = {names.origin: "source", names.demand: "100", names.received: "100", names.receive_id: "a" * 32}
    run = instance.add_run(dg.DagsterRun(job_name=f"{Events.name}_pull", tags=tags, status=dg.DagsterRunStatus.SUCCESS))
    with closing(sqlite3.connect(home / "history" / "runs.db")) as connection, connection:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(runs)") if row[1] != "id"]
        (row,) = connection.execute(f"SELECT {', '.join(columns)} FROM runs").fetchall()
        ids = [f"{number:08x}{run.run_id[8:]}" for number in range(runs)]
        copies = ([value.replace(run.run_id, new) if isinstance(value, str) else value for value in row] for new in ids)
        marks = ", ".join("?" * len(columns))
        connection.executemany(f"INSERT INTO runs ({', '.join(columns)}) VALUES ({marks})", copies)
        of_runs = ((new, key, value) for new in ids for key, value in tags.items())
        connection.executemany("INSERT INTO run_tags (run_id, key, value) VALUES (?, ?, ?)", of_runs)
    return instance


def remember(control: ControlStore, receives: int) -> None:
    """Write acknowledged receives of the last days, one each second."""
    control.ended("nothing")
    now = int(time.time() * 1e6)
    rows = (
        (f"{name}-{number}", name, "run", 100, now - number * 1_000_000, now - number * 1_000_000)
        for number in range(receives)
        for name in (Events.name, "another")
    )
    with closing(sqlite3.connect(str(control.url.database))) as connection, connection:
        connection.executemany("INSERT INTO control_ended VALUES (?, ?, ?, ?, ?, ?)", rows)


def spent(work: Callable[[], object]) -> float:
    """Return the median of milliseconds of processor time."""
    took = []
    for _ in range(_ROUNDS):
        before = time.process_time()
        work()
        took.append((time.process_time() - before) * 1_000)
    return statistics.median(took)


def looks(instance: dg.DagsterInstance, control: ControlStore) -> dict[str, Callable[[], object]]:
    """Return the queries of a tick that requests a run, and of a source that does not report its backlog."""
    producer, now = BoundProducer(Events), datetime.now(UTC)
    return {
        "in flight": lambda: in_flight(producer, instance, control),
        "limits": lambda: limits(producer, control, now),
        "rate": lambda: control.ended(producer.key, since=now - timedelta(minutes=5)),
        "failed in a row": lambda: failed_in_a_row(producer, instance, now),
        "ended early": lambda: ended_early(producer, instance, now),
        "filled, empty": lambda: (was_filled(producer, instance), empty_in_a_row(producer, instance)),
    }


def main() -> None:
    """Run the benchmark and print the result."""
    given = options(__doc__, runs=[24, 1_000, 100_000], claims=260_000)
    for runs in given.runs:
        with tempfile.TemporaryDirectory(prefix="ticks-", ignore_cleanup_errors=True) as folder:
            control = ControlStore(f"sqlite:///{folder}/control.sqlite")
            remember(control, given.claims)
            with fill(Path(folder), runs) as instance:
                took = {name: spent(look) for name, look in looks(instance, control).items()}
        shown = ", ".join(f"{name} {milliseconds:.1f}" for name, milliseconds in took.items())
        print(f"{runs:>7,} runs: {sum(took.values()):.0f} ms a tick ({shown})", flush=True)


if __name__ == "__main__":
    main()
