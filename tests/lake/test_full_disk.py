"""A full disk: each step fails, leaves no partial results, and succeeds once there is space."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from tests.fixtures.small_lake import Keeping, Run, visible

PAGE, MESSAGES = 4096, 40
ROOMS = {
    "begin": (0, PAGE, 2 * PAGE, 3 * PAGE, 5 * PAGE, 6 * PAGE),
    "work": (0, 10 * PAGE, 400_000, 700_000),
    "decide": (0,),
    "publish": (0, PAGE),
}
"""Free bytes at the first attempts of each step, increasing so that each attempt gets further."""


def process_on_a_small_disk(disk: Path, elsewhere: Path) -> dict[str, Any]:
    """Process two receives on a disk that is full at the first attempts of each step."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(disk)], check=True)
    filler, failures, sent = disk / "filler", [], []
    queue = TableQueue(name="memory", url=f"sqlite:///{elsewhere}/queue.sqlite")
    queue.create()
    tables = Tables(Lake(root=f"{disk}/lake"), Keeping)

    def until_there_is_room(step: str, work: Callable[[], Any]) -> Any:
        for room in ROOMS[step]:
            filler.unlink(missing_ok=True)
            with filler.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - room)
            try:
                return work()
            except OSError as error:
                rows = [len(visible(tables, name)) for name in tables.names if tables[name].exists()]
                taken = room - shutil.disk_usage(disk).free
                failures.append({"step": step, "error": str(error), "rows": rows, "taken": taken})
        filler.unlink(missing_ok=True)
        return work()

    noise = random.Random(1)  # compressible data would not fill the disk
    for receive_id in ("r1", "r2"):
        texts = [noise.randbytes(6_000).hex() for _ in range(MESSAGES)]
        sent += texts
        queue.enqueue(text.encode() for text in texts)
        run = until_there_is_room("begin", partial(Run, tables, queue, receive_id))
        for step in ("work", "decide", "publish"):
            until_there_is_room(step, getattr(run, step))
        queue.ack(receive_id, [row["ack_id"] for row in visible(tables, "outcomes") if row["receive_id"] == receive_id])
    kept = sorted(row["text"] for row in visible(tables, "kept"))
    return {"failures": failures, "each once": kept == sorted(sent), "left": queue.backlog().messages}


def test_steps_stopped_by_a_full_disk_leave_no_partial_results_and_succeed_later(tmp_path):
    disk, elsewhere = tmp_path / "disk", tmp_path / "elsewhere"
    disk.mkdir()
    elsewhere.mkdir()
    alone = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*alone, "mount", "-t", "tmpfs", "none", str(disk)], capture_output=True, check=False).returncode:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("no right to mount a disk")

    command = [*alone, sys.executable, "-m", "tests.lake.test_full_disk", str(disk), str(elsewhere)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert {failure["step"] for failure in told["failures"]} == set(ROOMS)
    for failure in told["failures"]:
        assert f"{disk}/lake/keeping/" in failure["error"]
        assert set(failure["rows"]) <= {0, MESSAGES, 2 * MESSAGES}, "each table has all of a receive or none"
        if failure["error"].endswith("keeping/messages'") and failure["step"] == "work":
            assert failure["taken"] == 0, "a task that is stopped leaves no file"
    assert told["each once"]
    assert told["left"] == 0


if __name__ == "__main__":
    sys.stdout.write(json.dumps(process_on_a_small_disk(*map(Path, sys.argv[1:]))))
