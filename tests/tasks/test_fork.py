"""The fork: what it wrote comes back, it ends with its parent, and what is late in it is ended."""

import os
import signal
import time
from pathlib import Path

import pytest

from pipeline_platform.tasks.host.fork import Written, in_a_fork
from pipeline_platform.tasks.host.progress import Progress
from tests.tasks.test_batch import staged


def test_what_a_fork_wrote_comes_back(tmp_path):
    def work(progress: Progress) -> Written:
        written = Written()
        written.write("t", "w", staged("a", "b").rows)
        written.notes = {"pid": os.getpid()}
        return written

    answer = in_a_fork(work)

    assert isinstance(answer, Written)
    assert answer.notes["pid"] != os.getpid()
    ((table, window, rows),) = answer.batches
    assert (table, window, rows.to_pylist()) == ("t", "w", staged("a", "b").rows.to_pylist())


def test_a_fault_of_the_platform_in_a_fork_is_raised_and_is_no_messages():
    def work(progress: Progress) -> Written:
        raise OSError("no such table")

    with pytest.raises(RuntimeError, match="no such table"):
        in_a_fork(work)


def test_a_fork_ends_with_its_parent():
    """A worker that Spark ends must leave nobody behind who goes on calling callbacks."""
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:

        def work(progress: Progress) -> Written:
            os.write(write, str(os.getpid()).encode())
            time.sleep(60)
            return Written()

        in_a_fork(work)
        os._exit(0)
    child = int(os.read(read, 100))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)

    end = time.monotonic() + 10
    while time.monotonic() < end and _lives(child):
        time.sleep(0.01)
    assert not _lives(child)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
