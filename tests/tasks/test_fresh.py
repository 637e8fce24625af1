"""Fresh processes: a task that forks does so from a process that has called no callback."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import psutil
import pyarrow as pa
import pytest

from pipeline_platform.lake.manifest import MANIFEST
from pipeline_platform.lake.storage import Lake
from pipeline_platform.tasks import fresh
from pipeline_platform.tasks.fresh import calls_here, from_clean
from tests.fixtures.pooled import Pooled, Timed
from tests.fixtures.small_lake import handled, outcomes, rows_of
from tests.tasks.test_column_lane import row, written

LONG_S = 60


@pytest.fixture
def lake(tmp_path):
    return Lake(root=str(tmp_path))


@pytest.mark.parametrize("again", [Pooled, Timed])
def test_a_task_that_forks_after_another_used_a_pool_does_not_hang(lake, again):
    first = handled(lake, Pooled, b"1")
    assert outcomes(lake, "pooled", first) == {"m0": "handled"}

    second = handled(lake, again, b"2", b"kill", b"4", careful=again is Pooled)

    assert outcomes(lake, again.name, second) == {"m0": "handled", "m1": "failed", "m2": "handled"}
    assert [row["text"] for row in rows_of(lake, again.name, second, "kept")] == ["2", "4"]
    (notes,) = second.notes
    assert set(notes["said"].splitlines()) == {"asking 2", "asking 4"}, "what it says is heard as elsewhere"


@dataclass(frozen=True)
class Placed:
    """Says which process it is in, or does what it is told to."""

    told: str = ""
    careful: bool = True

    @property
    def forks(self):
        return self.careful

    def carefully(self):
        return self

    @from_clean
    def __call__(self, share):
        match self.told:
            case "raise":
                raise KeyError("as told")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(7)
            case "sleep":
                print(os.getpid(), flush=True)  # noqa: T201
                time.sleep(LONG_S)
            case "nothing":
                return
        count = share if isinstance(share, int) else sum(batch.num_rows for batch in share)
        row = {"table": f"{os.getpid()} {os.getppid()}", "path": "p", "rows": count}
        yield pa.RecordBatch.from_pylist([row], schema=MANIFEST)


def place(task, share=5):
    (batch,) = list(task(share))
    (told,) = batch.to_pylist()
    process, parent = map(int, told["table"].split())
    return process, parent, told["rows"]


def numbers(count):
    return pa.record_batch({"n": pa.array(range(count), pa.int64())})


def test_a_clean_process_runs_its_tasks_itself_and_another_one_what_forks_in_a_fresh_one():
    assert place(Placed()) == (os.getpid(), os.getppid(), 5)

    calls_here()

    assert place(Placed(careful=False)) == (os.getpid(), os.getppid(), 5)
    first, server, share = place(Placed())
    second, same, _ = place(Placed())
    assert share == 5
    assert len({first, second, server, os.getpid()}) == 4
    assert (server, psutil.Process(server).ppid()) == (same, os.getpid()), "one server forks for all its tasks"


def test_a_task_that_ends_its_fork_leaves_the_server_and_a_server_that_ends_is_followed_by_another():
    calls_here()
    _, server, _ = place(Placed())
    with pytest.raises(RuntimeError, match="ended early"):
        list(Placed("kill")(0))
    assert place(Placed())[1] == server

    psutil.Process(server).kill()
    with pytest.raises(RuntimeError, match=r"ended early \(signal 9\)"):
        place(Placed())

    assert place(Placed())[1] != server


@pytest.mark.parametrize("sizes", [(), (3, 0, 4), (200_000,)])
def test_rows_go_to_a_fresh_process_as_they_come(sizes):
    calls_here()

    assert place(Placed(), iter([numbers(size) for size in sizes]))[2] == sum(sizes)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ("raise", r"fresh process of this task raised:\nTraceback [\s\S]*KeyError: 'as told'"),
        ("kill", r"fresh process of this task ended early \(signal 9\)"),
        ("exit", r"fresh process of this task ended early \(exit code 7\)"),
    ],
)
@pytest.mark.parametrize("rows", [0, 1_000_000])
def test_how_a_fresh_process_ends_is_its_task_s_error(told, why, rows):
    calls_here()

    with pytest.raises(RuntimeError, match=why):
        list(Placed(told)(iter([numbers(rows)])))


def test_a_fresh_process_ends_with_the_process_whose_task_it_runs():
    command = "from tests.tasks.test_fresh import Placed, calls_here; calls_here(); list(Placed('sleep')(0))"
    with subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        process = psutil.Process(int(parent.stdout.readline()))
        assert process.parents()[1].pid == parent.pid
        parent.kill()

    process.wait(LONG_S / 2)


def test_a_task_without_rows_has_none():
    calls_here()

    assert list(Placed("nothing")(0)) == []


def test_the_fast_lane_s_rows_are_written_by_a_fresh_process(lake):
    written(lake, row())
    assert not fresh._is_clean

    manifest = written(lake, row(), row(_failure="so"), careful=True)

    assert sorted(outcomes(lake, "fast", manifest).values()) == ["failed", "handled"]
