"""A warm server that is killed during handling, which Dagster's daemon replaces automatically."""

import os
import signal

import dagster as dg
import pytest

from pipeline_platform.spark import server as spark_server
from tests.deployment.test_daemon import deployment, done, texts


@pytest.fixture
def spark_folder(tmp_path):
    """Return the state folder of a server that is killed and of its successors."""
    folder = tmp_path / "spark"
    spark_server.start(folder, cores=2)
    yield folder
    spark_server.stop(folder)


@pytest.fixture
def deployed(tmp_path, spark_folder, monkeypatch):
    monkeypatch.setenv("FEW_UNDER_TEST", "0")  # all messages are handled by the server
    with deployment(tmp_path, spark_folder) as started:
        yield started


@pytest.mark.faults
def test_a_killed_server_is_followed_by_another_and_each_message_comes_once(deployed, spark_folder):
    begun, gate = deployed.folder / "begun", deployed.folder / "gate"
    # More than two runs receive, so that the next run need not wait for patience.
    payloads = [f"touch {begun}", f"wait for {gate}", *(f"late {n}" for n in range(298))]
    killed = spark_server.status(spark_folder)
    assert killed is not None
    deployed.queue.enqueue(payload.encode() for payload in payloads)
    deployed.until("a message is handled", begun.exists)
    os.kill(killed.pid, signal.SIGKILL)
    gate.touch()

    deployed.until("all has come", lambda: deployed.left() == 0)
    deployed.until("the runs have ended", lambda: done(deployed.instance))

    assert texts(deployed, "late", "wait", "touch") == sorted(payloads)
    followed = spark_server.status(spark_folder)
    assert followed is not None
    assert followed.pid != killed.pid
    failed = [run for run in deployed.instance.get_runs() if run.status == dg.DagsterRunStatus.FAILURE]
    assert failed
    for run in failed:
        said = "".join(entry.to_json() for entry in deployed.instance.all_logs(run.run_id))
        assert f"the warm Spark server (process {killed.pid}" in said
