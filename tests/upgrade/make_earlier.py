"""Create `earlier.tar.xz`: the state of release 0.3.0 (commit 2ea4388e) with a receive in each phase.

    git worktree add --detach ../earlier 2ea4388e
    cd ../earlier && PYTHONPATH=. <python of this checkout> <this checkout>/tests/upgrade/make_earlier.py

The names imported here are that release's. Six runs end after 0 to 5 steps, the last of which acknowledges.
Ten messages are enqueued for each of them, of which the fourth and the seventh fail.
"""

import json
import shutil
import sqlite3
import sys
import tarfile
import tempfile
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from unittest import mock

import dagster as dg

from pipeline_platform import Producer, RateLimiting
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.launcher.run_process import PROCESS_TAG
from pipeline_platform.run import steps
from pipeline_platform.run.spark_work import SparkWork
from tests.fixtures.flow import begun, flow_of, run_in_this_process
from tests.fixtures.small_lake import Keeping

ARCHIVE = Path(__file__).with_name("earlier.tar.xz")
STEPS = (steps.receive_messages, steps.handle_messages, steps.decide, steps.publish, steps.acknowledge)


class Orders(Keeping):
    """A pipeline that stores texts; messages that say `fail` fail."""

    name = "orders"
    producer = Producer(source="orders_queue", max_runs=len(STEPS) + 1)


def make(home: Path) -> None:
    """Run until all runs have ended, and stop."""
    queue = TableQueue(name="orders_queue", url=f"sqlite:///{home}/queue.sqlite", created_column="created_at")
    queue.create()
    flow = flow_of(home, Orders, queue)
    (home / "dagster").mkdir()
    shutil.copy("dagster.yaml", home / "dagster")
    instance = dg.DagsterInstance.from_config(str(home / "dagster"))
    for number in (0, 1, 2, 4, 5, 3):  # a run that begins publishes what is decided
        run_id, status = f"00000000-0000-0000-0000-{number:012}", "SUCCESS" if number == len(STEPS) else "STARTED"
        queue.enqueue(payloads(number))
        process = {"run_id": run_id, "host": "another", "pid": 2**22 + number, "born": "a boot/1"}
        tags = {PROCESS_TAG: json.dumps(process)}
        instance.add_run(dg.DagsterRun("orders_pull", run_id, status=dg.DagsterRunStatus(status), tags=tags))
        with mock.patch.object(SparkWork, "run", run_in_this_process):
            receive = begun(flow, run_id=run_id, demand=10)
            for step in STEPS[:number]:
                step(flow, receive)
    flow.control.pause("orders", "an upgrade")
    flow.control.set_rate_limiting("orders", RateLimiting(allowed_messages=500, interval=timedelta(seconds=1)))
    for file in [*home.rglob("*.sqlite"), *home.rglob("*.db")]:
        compact(file)


def payloads(number: int) -> list[bytes]:
    """Return ten payloads."""
    return [f"{'fail' if at in (4, 7) else 'good'} {number}.{at}".encode() for at in range(1, 11)]


def compact(file: Path) -> None:
    """Leave a single small file of a database, even if it is open elsewhere."""
    aside = file.with_name("compact")
    with closing(sqlite3.connect(file)) as database:
        database.execute(f"VACUUM INTO '{aside}'")
    for log in file.parent.glob(f"{file.name}-*"):
        log.unlink()
    aside.replace(file)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            archive.add(folder, "earlier")
    sys.stdout.write(f"{ARCHIVE}: {ARCHIVE.stat().st_size:,} bytes\n")
