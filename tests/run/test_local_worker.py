"""The local worker: a handful of messages is handled without Spark, in processes that end with the run."""

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline_platform.orchestration.resources.spark_resource import SparkResource
from pipeline_platform.run.work import spark_work
from pipeline_platform.run.work.local_worker import LocalWorker, LocalWorkerError, prepare
from pipeline_platform.spark.engine import TaskError
from tests.fixtures.flow import handled, kinds, rows, run
from tests.fixtures.handful import Doing, Handful, Ordered, Sabotaging
from tests.fixtures.small_lake import rows_of

ROOT = Path(__file__).parents[2]


def process_of(local_worker: LocalWorker) -> psutil.Process:
    return psutil.Process(local_worker.start().popen.pid)


def until(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def begun_in(folder: Path, tasks: int) -> list[int]:
    """Wait until tasks sleep, and return their processes and their worker."""
    until(lambda: len([*folder.iterdir()]) == tasks)
    return sorted({int(pid) for path in folder.iterdir() for pid in path.name.split()})


# The process


def test_shares_return_their_rows_in_order_and_no_process_of_the_run_executes_them(local_worker):
    before = process_of(local_worker)
    manifest = local_worker.run(Doing(), 5)

    assert [file.rows for file in manifest.files] == [0, 1, 2, 3, 4]
    assert not {int(file.path.split()[1]) for file in manifest.files} & {os.getpid(), before.pid}
    assert process_of(local_worker) == before, "it starts once"


def test_modules_are_found_in_a_folder_that_was_on_the_path_only_while_they_were_loaded(
    local_worker, tmp_path, monkeypatch
):
    """As Dagster loads a code location with a working directory."""
    source = "from tests.fixtures.handful import Doing\n\n\nclass Elsewhere(Doing):\n    pass\n"
    (tmp_path / "elsewhere.py").write_text(source)
    local_worker.start()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [str(tmp_path), *sys.path])
        task = importlib.import_module("elsewhere").Elsewhere()
    try:
        assert len(local_worker.run(task, 2).files) == 2
    finally:
        del sys.modules["elsewhere"]


def test_shares_and_batchers_run_in_parallel(local_worker, tmp_path):
    assert len(local_worker.run(Doing("meet", str(tmp_path)), 2).files) == 2
    both = tmp_path / "both"
    both.mkdir()
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(local_worker.run, [Doing("meet", str(both))] * 2, [1] * 2))

    assert [len(manifest.files) for manifest in found] == [1, 1]


@pytest.mark.parametrize("what", ["raise", "kill", "kill the worker", "no pickle"])
def test_a_failed_task_is_an_error_and_the_next_one_works(local_worker, what):
    with pytest.raises(LocalWorkerError):
        local_worker.run((lambda share: iter(())) if what == "no pickle" else Doing(what), 2)

    assert len(local_worker.run(Doing(), 2).files) == 2


def test_output_of_tasks_goes_where_the_run_writes_now(local_worker, request):
    local_worker.start()
    capfd = request.getfixturevalue("capfd")
    local_worker.run(Doing("write"), 1)
    assert capfd.readouterr().out == "written"


def test_a_process_that_was_started_in_advance_is_used_once():
    before = {*psutil.Process().children()}
    prepare()
    (prepared,) = {*psutil.Process().children()} - before
    with closing(LocalWorker(1)) as first, closing(LocalWorker(1)) as second:
        assert process_of(first) == prepared
        assert process_of(second) != prepared


def test_closing_it_ends_tasks_of_other_threads_with_an_error(local_worker, tmp_path):
    errors = list[Exception]()

    def work() -> None:
        try:
            local_worker.run(Doing("sleep", str(tmp_path)), 2)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    processes = begun_in(tmp_path, 2)
    local_worker.close()
    thread.join(60)

    assert [type(error) for error in errors] == [TaskError], "Spark must not run what was interrupted"
    until(lambda: not any(map(psutil.pid_exists, processes)))


def test_a_signal_ends_the_tasks(local_worker, tmp_path):
    def interrupt() -> None:
        begun_in(tmp_path, 2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        local_worker.run(Doing("sleep", str(tmp_path)), 2)

    until(lambda: not any(map(psutil.pid_exists, begun_in(tmp_path, 2))))


def test_no_process_survives_a_killed_run(tmp_path):
    code = (
        "import sys; from pipeline_platform.run.work.local_worker import LocalWorker;"
        "from tests.fixtures.handful import Doing; LocalWorker(2).run(Doing('sleep', sys.argv[1]), 2)"
    )
    killed = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    processes = begun_in(tmp_path, 2)
    killed.kill()
    killed.wait()

    assert len(processes) == 3
    until(lambda: not any(map(psutil.pid_exists, processes)))


# Flows


@pytest.mark.parametrize("pipeline", [Handful, Ordered])
def test_a_handful_needs_no_spark_and_its_faults_fail_alone(filled_locally, tmp_path, pipeline):
    faults = ["kill", "raise", "called kill", "split kill", *["hang"] * (pipeline is Handful)]
    good = [*map(str, range(20)), "called 1", "called 2", "split 1", "split 2", "children"]
    flow = filled_locally(pipeline, [payload.encode() for payload in (*good, *faults)])
    folder = tmp_path / "traces"
    folder.mkdir()

    run(flow, context={"folder": str(folder)})

    assert sorted(rows(flow, "kept")["text"]) == sorted(map(str, range(20)))
    failed = {"kill": "worker killed", "raise": "ValueError", "hang": "timeout"}
    found = kinds(flow)
    assert {fault: found[fault] for fault in failed if fault in faults} == {
        fault: kind for fault, kind in failed.items() if fault in faults
    }
    assert found["split kill"] == found["called kill"] == "worker killed"
    assert flow.source.backlog().messages == 0
    traces = [path.name.split(" in ") for path in folder.iterdir()]
    callbacks = {"handle_message", "handle_batch of called", "handle_batch of split", "handle_failed", "acknowledge"}
    assert {callback for callback, _ in traces} == callbacks
    assert str(os.getpid()) not in {process for _, process in traces}


def test_more_messages_than_a_handful_are_handled_by_spark(filled_locally, monkeypatch):
    flow = filled_locally(Handful, [b"1", b"2", b"3"])
    monkeypatch.setattr(spark_work, "FEW", 2)
    with pytest.raises(AssertionError, match="needs no Spark"):
        handled(flow, demand=3)


def test_spark_runs_what_the_worker_cannot(filled_on_spark, local_worker, caplog):
    flow = replace(filled_on_spark(Sabotaging, [b"1", b"2"]), worker=local_worker)

    handle = handled(flow)

    assert sorted(row["text"] for row in rows_of(flow.lake, "sabotaging", flow.ledger.manifest(handle), "kept")) == [
        "1",
        "2",
    ]
    assert [record.levelname for record in caplog.records if "local worker" in record.getMessage()] == ["WARNING"]


# The resource


def test_a_spark_resource_has_one_worker_unless_spark_is_a_cluster(tmp_path):
    with closing(SparkResource(remote="warm", state_folder=str(tmp_path))) as spark:
        worker = spark.local_worker
        assert worker is not None
        assert spark.local_worker is worker
        process = process_of(worker)
    assert not process.is_running()
    assert SparkResource(remote="sc://localhost:15002").local_worker is None
