"""A lake that is copied during a run, in the order of docs/run/backup.md, and used elsewhere."""

import os
import re
import sqlite3
import subprocess
from contextlib import closing

import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.run import steps
from tests.fixtures.flow import begun, flow_of, rows, run
from tests.fixtures.keeper import PROJECT
from tests.fixtures.pipelines_under_test import Told

(BLOCK,) = re.findall(r"```bash\n(.*?)```", (PROJECT / "docs/run/backup.md").read_text(), re.DOTALL)
COPIES = BLOCK.splitlines()
STEPS = (steps.receive_messages, steps.handle_messages, steps.decide, steps.publish, steps.acknowledge)
DECIDED, PUBLISHED, ACKNOWLEDGED = 3, 4, 5


@pytest.mark.faults
@pytest.mark.parametrize("after", ["0000", "2345", "3345", "3555", "4444"])
@pytest.mark.parametrize("old_goes_on", [True, False], ids=["finished", "died"])
def test_a_copy_goes_on_with_each_message_once(tasks_here, tmp_path, after, old_goes_on):
    """Copy a lake during a run. `after` is the number of steps before each part of the copy."""
    queue = TableQueue(name="queue", url=f"sqlite:///{tmp_path}/queue.sqlite", lease_s=2.0)
    queue.create()
    (tmp_path / "old").mkdir()
    old = flow_of(tmp_path / "old", Told, queue)
    queue.enqueue([b"before"])
    run(old)
    queue.enqueue([b"meanwhile"])
    copy = tmp_path / "new" / "lake" / "told"
    copy.mkdir(parents=True)

    receive, done = begun(old), 0

    def work(until):
        nonlocal done
        for step in STEPS[done:until]:
            step(old, receive)
        done = max(done, until)

    for part, until in zip(COPIES, map(int, after), strict=True):
        work(until)
        place = {"COPY": str(copy), "PATH": os.environ["PATH"]}
        subprocess.run(["bash", "-c", part], cwd=tmp_path / "old/lake/told", env=place, check=False)
    with (
        closing(sqlite3.connect(tmp_path / "old/control.sqlite")) as there,
        closing(sqlite3.connect(tmp_path / "new/control.sqlite")) as here,
    ):
        there.backup(here)
    if old_goes_on:
        work(len(STEPS))
    queue.enqueue([b"after"])

    new = flow_of(tmp_path / "new", Told, queue)
    new.control.end(receive.receive_id)  # as its claim is over after a minute
    queue.abandon(receive.receive_id, list)
    run(new)
    run(new)

    texts = sorted(rows(new, "lines")["text"])
    lost = done == ACKNOWLEDGED and int(after[2]) < PUBLISHED and int(after[0]) < DECIDED
    assert texts == sorted({"before", "after"} | (set() if lost else {"meanwhile"}))
    assert new.ledger.unfinished() == []
