"""Log lines for slow tasks and their hosts, from the UI of the Connect server."""

import threading
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from pipeline_platform.cli.status.status_gathering import _in_flight
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.run.work.spark_work import SparkWork
from pipeline_platform.spark import late_tasks
from pipeline_platform.spark.late_tasks import naming_late_tasks


def wait_for(gate: str, index: int) -> list[dict[str, str]]:
    """Two tasks without results; the second waits for a file."""
    while index == 1 and not Path(gate).exists():
        time.sleep(0.05)
    return []


@pytest.mark.faults
def test_a_task_that_takes_long_is_named_with_its_host_until_it_ends(spark_cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(late_tasks, "LATE_S", 1.0)
    monkeypatch.setattr(late_tasks, "EACH_S", 0.5)
    gate, said, others = tmp_path / "gate", [], []
    with (
        closing(spark_cluster.resource()) as spark,
        closing(ControlStore(f"sqlite:///{tmp_path}/control.sqlite")) as control,
    ):
        control.claim("numbers", "late", "run", wanted=1, capacity=1, lease_s=600)
        assert spark.spark_session
        work = SparkWork("late", Lake(root=str(tmp_path)), lambda: spark.spark_session, "numbers/handle")
        working = threading.Thread(target=work.run, args=(partial(wait_for, str(gate)), 2))
        with (
            naming_late_tasks(spark_cluster.ui, "late", said.append),
            naming_late_tasks(spark_cluster.ui, "another", others.append),
        ):
            working.start()
            until = time.monotonic() + 120
            while not (said and said[-1].startswith("1 of")) and time.monotonic() < until:  # Python has to start first
                time.sleep(0.1)
            shown = _in_flight(control, "numbers", {}, spark_cluster.ui).runs[0].slow_tasks
            gate.touch()
            working.join()

    for sentence in (said[-1], str(shown)):
        assert sentence.startswith("Slow Spark tasks: 1 of 2 have run for more than 1 s: task 1 on host 127.0.0.1, ")
    assert others == [], "tasks of other receives are not its own"
    assert late_tasks.late_tasks(spark_cluster.ui, "late") == ""


def test_a_ui_that_does_not_answer_names_nothing():
    assert late_tasks.late_tasks("http://127.0.0.1:1", "late") == ""
