"""Work on a disk that has no room, in a process that alone has this disk; prints what came of it.

Started as `python -m tests.full_disk_run <what> <folder of the disk> <folder on another disk>`.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from pipeline_platform.control.store import ControlStore, ControlStoreError
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from resources.table_queue import TableQueue
from tests.small_lake import Keeping, Run, visible

PAGE = 4096
MESSAGES = 40
ROOMS = {
    "begin": (0, PAGE, 2 * PAGE, 3 * PAGE, 5 * PAGE, 6 * PAGE),
    "work": (0, 10 * PAGE, 400_000, 700_000),
    "decide": (0,),
    "publish": (0, PAGE),
}
"""By step, the bytes that are left for its first tries: a little more each time, so that it gets a little farther."""


class Disk:
    """Four megabytes, of which a file takes what is to be gone."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._filler = folder, folder / "filler"
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)], check=True)

    def leave(self, room: int) -> None:
        """Leave as many bytes free."""
        self.clear()
        with self._filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.free() - room)

    def clear(self) -> None:
        self._filler.unlink(missing_ok=True)

    def free(self) -> int:
        told = os.statvfs(self.folder)
        return told.f_bavail * told.f_bsize


def lake(disk: Disk, elsewhere: Path) -> dict[str, Any]:
    """Take two receives through a disk that has no room at each step's first tries."""
    queue = TableQueue(name="memory", url=f"sqlite:///{elsewhere}/queue.sqlite")
    queue.create()
    tables = Tables(Lake(root=f"{disk.folder}/lake"), Keeping)
    put, failures = [], []

    def until_there_is_room(step: str, work: Callable[[], Any]) -> Any:
        for room in ROOMS[step]:
            disk.leave(room)
            try:
                return work()
            except OSError as error:
                rows = {name: len(visible(tables, name)) for name in tables.names if tables[name].exists()}
                told = {"step": step, "error": str(error), "rows": rows, "taken": room - disk.free()}
                failures.append(told | {"queued": queued(elsewhere)})
        disk.clear()
        return work()

    noise = random.Random(1)  # what is compressed to nothing fills no disk
    for receive_id in ("r1", "r2"):
        texts = [noise.randbytes(6_000).hex() for _ in range(MESSAGES)]
        put += texts
        queue.enqueue(text.encode() for text in texts)
        run = until_there_is_room("begin", partial(Run, tables, queue, receive_id))
        for step in ("work", "decide", "publish"):
            until_there_is_room(step, getattr(run, step))
        ids = [row["ack_id"] for row in visible(tables, "outcomes") if row["receive_id"] == receive_id]
        assert queue.ack(receive_id, ids) == []
    kept = sorted(row["text"] for row in visible(tables, "kept"))
    return {"failures": failures, "each once": kept == sorted(put), "queued": queued(elsewhere)}


def queued(folder: Path) -> int:
    with closing(sqlite3.connect(folder / "queue.sqlite")) as connection:
        return int(connection.execute("SELECT count(*) FROM messages").fetchone()[0])


def control(disk: Disk, _elsewhere: Path) -> dict[str, Any]:
    """Claim until there is no room, look, and go on when there is."""
    store = ControlStore(f"sqlite:///{disk.folder}/control.sqlite")

    def claim(number: int) -> int:
        return store.claim("p", f"r{number}", "run", wanted=1, capacity=1_000, lease_s=60)

    def refusal(first: int) -> str:
        try:
            for number in range(first, 1_000):
                claim(number)
        except ControlStoreError as error:
            return str(error)
        return "none"

    disk.leave(0)
    new = refusal(0)
    disk.clear()
    claim(0)
    disk.leave(10 * PAGE)
    full = refusal(1)
    held = len(store.in_flight("p"))
    disk.clear()
    return {"new": new, "full": full, "held": held, "next": claim(held), "after": len(store.in_flight("p"))}


if __name__ == "__main__":
    what, folder, elsewhere = sys.argv[1:]
    told = {"lake": lake, "control": control}[what](Disk(Path(folder)), Path(elsewhere))
    sys.stdout.write(json.dumps(told))
