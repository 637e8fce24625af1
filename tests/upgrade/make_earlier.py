"""Create `earlier.tar.xz`: the state of the release of commit 937ba2e after three runs ended during their work.

    git worktree add --detach ../earlier 937ba2e
    cd ../earlier && PYTHONPATH=. <python of this checkout> <this checkout>/tests/upgrade/make_earlier.py

The names imported here are that release's. Four times ten messages, of which the fourth and the seventh fail:

1. handled, published and acknowledged by a run that ended: two open failures;
2. decided by a run that crashed before it published;
3. received by a run that crashed before it decided;
4. waiting.
"""

import json
import shutil
import socket
import sqlite3
import sys
import tarfile
import tempfile
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from unittest import mock

import dagster as dg
from pipeline_platform.options import Producer, RateLimiting
from pipeline_platform.stages.handle import Handle
from resources.table_queue import TableQueue

from pipeline_platform.control import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.run_launcher import PROCESS_TAG
from tests.small_lake import Keeping, Run

ARCHIVE = Path(__file__).with_name("earlier.tar.xz")


class Orders(Keeping):
    """A pipeline that stores texts; messages that say `fail` fail."""

    name = "orders"
    producer = Producer(source="orders_queue")


class DiedError(Exception):
    """The run ends here."""


def make(home: Path) -> None:
    """Run until three runs have ended in three ways, and stop."""
    queue = TableQueue(name="orders_queue", url=f"sqlite:///{home}/queue.sqlite", created_column="created_at")
    queue.create()
    control = ControlStore(f"sqlite:///{home}/control.sqlite")
    tables = Tables(Lake(root=str(home / "lake")), Orders)
    (home / "dagster").mkdir()
    shutil.copy("dagster.yaml", home / "dagster")
    instance = dg.DagsterInstance.from_config(str(home / "dagster"))
    runs = []
    for number, status in enumerate(["SUCCESS", "FAILURE", "STARTED"], 1):
        queue.enqueue(payloads(number))
        receive_id, run_id = str(number) * 32, f"00000000-0000-0000-0000-{number:012}"
        control.claim("orders", receive_id, run_id, wanted=10, capacity=100, lease_s=0.001)
        runs.append(Run(tables, queue, receive_id))
        tag = {"host": socket.gethostname(), "pid": 2**22 + number, "born": "a boot/1"}
        instance.add_run(
            dg.DagsterRun(
                "orders_pull", run_id, status=dg.DagsterRunStatus(status), tags={PROCESS_TAG: json.dumps(tag)}
            )
        )
        if status == "STARTED":
            with mock.patch.object(Handle, "__call__", side_effect=DiedError):
                try:
                    runs[-1].work()
                except DiedError:
                    continue
        runs[-1].work().decide()
    finished = runs[0].publish()
    assert not queue.ack(finished.receive.receive_id, [str(id_) for id_ in range(1, 11)])
    finished.receives.remove(finished.receive.receive_id)
    control.end(finished.receive.receive_id)
    queue.enqueue(payloads(4))
    control.pause("orders", "an upgrade")
    control.set_rate_limiting("orders", RateLimiting(allowed_messages=500, interval=timedelta(seconds=1)))
    for file in [*home.rglob("*.sqlite"), *home.rglob("*.db")]:
        compact(file)


def payloads(number: int) -> list[bytes]:
    """Put ten messages into the queue."""
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
