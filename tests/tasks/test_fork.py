"""The fork: what it wrote comes back, it ends with its parent, and what is late in it is ended."""

import os
import signal
import time
from pathlib import Path

import pytest

from pipeline_platform.tasks.host.fork import Give, Written, in_a_fork
from pipeline_platform.tasks.host.progress import Progress
from tests.tasks.test_batch import staged


def test_what_a_fork_wrote_comes_back(tmp_path):
    def work(progress: Progress, give: Give) -> None:
        for pid in os.getpid(), 0:
            written = Written(pid=pid)
            written.write("t", "w", staged("a", "b").rows)
            give(written)

    given: list[Written] = []
    assert in_a_fork(work, given.append) is None

    assert [written.notes["pid"] == 0 for written in given] == [False, True]
    assert given[0].notes["pid"] != os.getpid()
    ((table, window, rows),) = given[0].batches
    assert (table, window, rows.to_pylist()) == ("t", "w", staged("a", "b").rows.to_pylist())


def test_much_comes_back_and_what_a_fork_gave_before_it_died_does():
    rows = staged(*("x" * 10_000 for _ in range(1_000))).rows

    def work(progress: Progress, give: Give) -> None:
        for _ in range(3):
            written = Written()
            written.write("t", "w", rows)
            give(written)
        os.kill(os.getpid(), signal.SIGKILL)

    given: list[Written] = []
    death = in_a_fork(work, given.append)

    assert death is not None
    assert death.how == "signal 9"
    assert [one.equals(rows) for written in given for *_, one in written.batches] == [True] * 3


def test_a_fork_is_ended_whose_gifts_nobody_can_take():
    read, write = os.pipe()

    def work(progress: Progress, give: Give) -> None:
        os.write(write, str(os.getpid()).encode())
        while True:
            give(Written())

    def take(written: Written) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        in_a_fork(work, take)

    assert not _lives(int(os.read(read, 100)))


def test_what_a_fork_gives_into_a_file_that_is_another_one_now_is_a_death():
    def work(progress: Progress, give: Give) -> None:
        os.closerange(3, 1 << 16)
        files = [os.open(os.devnull, os.O_WRONLY) for _ in range(1_000)]
        give(Written(files=len(files)))

    death = in_a_fork(work, lambda written: None)

    assert death is not None
    assert death.how == "exit code 0"


def test_a_fault_of_the_platform_in_a_fork_is_raised_and_is_no_messages():
    def work(progress: Progress, give: Give) -> None:
        raise OSError("no such table")

    with pytest.raises(RuntimeError, match="no such table"):
        in_a_fork(work, lambda written: None)


def test_a_fork_ends_with_its_parent():
    """A worker that Spark ends must leave nobody behind who goes on calling callbacks."""
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:

        def work(progress: Progress, give: Give) -> None:
            os.write(write, str(os.getpid()).encode())
            time.sleep(60)

        in_a_fork(work, lambda written: None)
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
