"""A Spark cluster as `deploy/start` starts it: its secret, its late tasks, and a pipeline while a machine crashes."""

import json
import os
import stat
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import closing
from functools import partial
from http.client import HTTPException
from pathlib import Path

import polars as pl
import psutil
import pyarrow as pa
import pytest

from pipeline_platform.cli.status.status_gathering import _in_flight
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.demand import InFlight
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.work.spark_work import SparkWork
from pipeline_platform.spark import engine, late_tasks
from pipeline_platform.spark.late_tasks import naming_late_tasks
from tests.fixtures.flow import run
from tests.fixtures.numbers_under_fault import Thousands, expected
from tests.spark.test_engine import ROWS, who
from tests.spark.test_spark_ports import REFUSED, asked_by_another, ports_of, verify_endpoint

pytestmark = pytest.mark.faults

COUNT = 30_000
NAMES = pa.schema([("name", pa.string())])


def around(index):
    yield pa.RecordBatch.from_pydict({"name": list(os.environ)}, NAMES)


def javas(running):
    """Return each JVM of the cluster by its main class."""
    mine = [process for process in psutil.process_iter(["name"]) if process.info["name"] == "java"]
    mine = [process for process in mine if os.getpgid(process.pid) in running.groups]
    return {next(word for word in process.cmdline() if word.startswith("org.apache.")): process for process in mine}


def is_a_page(port):
    """Return whether a port answers like a web server."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, HTTPException):
        return False


@pytest.fixture(scope="module")
def spark_cluster(tmp_path_factory):
    from servers.spark_cluster import cluster  # workers import this module, and have no `servers`

    with cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="module")
def working(spark_cluster):
    """Return the cluster with active executors."""
    with closing(spark_cluster.resource()) as spark:
        assert engine.run(spark.spark_session, who, 2, ROWS).num_rows == 2
        yield spark_cluster, spark


def test_every_port_is_a_page_or_wants_the_secret(working):
    running, _ = working
    found = javas(running)
    assert {name.rpartition(".")[2] for name in found} == {
        "Master", "Worker", "SparkSubmit", "CoarseGrainedExecutorBackend"
    }  # fmt: skip
    for name, process in found.items():
        rpc = {port for port in ports_of(process.pid) - {running.port} if not is_a_page(port)}
        assert rpc, name
        assert all(REFUSED in asked_by_another(port, verify_endpoint) for port in rpc), name


def test_the_master_takes_no_submission_and_its_page_kills_nothing(working):
    running, spark = working
    master = javas(running)["org.apache.spark.deploy.master.Master"]
    (page,) = [port for port in ports_of(master.pid) if is_a_page(port)]
    with urllib.request.urlopen(f"http://127.0.0.1:{page}/json/", timeout=30) as answer:
        (application,) = json.load(answer)["activeapps"]

    asked = f"terminate=true&id={application['id']}".encode()
    for path in ("v1/submissions/create", "app/kill/"):
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://127.0.0.1:{page}/{path}", asked, timeout=30)

    assert len(ports_of(master.pid)) == 2, "none of Spark's REST server"
    assert engine.run(spark.spark_session, who, 2, ROWS).num_rows == 2


def test_pages_of_master_and_workers_are_on_loopback(working):
    running, _ = working
    for name, process in javas(running).items():
        if name.endswith(("Master", "Worker")):
            listens = [link.laddr for link in process.net_connections("tcp") if link.status == psutil.CONN_LISTEN]
            assert {address.ip.removeprefix("::ffff:") for address in listens} == {"127.0.0.1"}, name


def test_the_secret_is_in_no_argument_no_log_and_no_file_of_others(working):
    running, spark = working
    arguments = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    files = [path for path in running.folder.rglob("*") if path.is_file()]
    holding = [path for path in files if running.secret.encode() in path.read_bytes()]

    assert not any(running.secret in word for words in arguments for word in words or ())
    assert {path.name for path in holding} == {"master.conf", "worker.conf", "connect.conf"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in holding} == {0o600}
    assert {stat.S_IMODE(path.parent.stat().st_mode) for path in holding} == {0o700}
    names = engine.run(spark.spark_session, around, 1, NAMES)["name"].to_pylist()
    assert not [name for name in names if name.startswith("PIPELINE_PLATFORM_SPARK_")]


def wait_for(gate: str, index: int) -> list[dict[str, str]]:
    """Two tasks without results; the second waits for a file."""
    while index == 1 and not Path(gate).exists():
        time.sleep(0.05)
    return []


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
            shown = _in_flight(control, "numbers", InFlight(leased={"run": 1}), spark_cluster.ui).runs[0].slow_tasks
            gate.touch()
            working.join()

    for sentence in (said[-1], str(shown)):
        assert sentence.startswith("Slow Spark tasks: 1 of 2 have run for more than 1 s: task 1 on host 127.0.0.1, ")
    assert others == [], "tasks of other receives are not its own"
    assert late_tasks.late_tasks(spark_cluster.ui, "late") == ""


# The last test of the file, because it kills a worker


def test_a_worker_that_is_killed_with_its_executor_costs_no_message(spark_cluster, tmp_path):
    begun, told = tmp_path / "begun", []
    queue = TableQueue(name="queue", url=f"sqlite:///{tmp_path}/queue.sqlite")
    queue.create()
    queue.enqueue(json.dumps({"n": n, "touch": str(begun)} if n == 500 else {"n": n}).encode() for n in range(COUNT))

    def kill_in_the_middle() -> None:
        while not begun.exists():
            time.sleep(0.02)
        told.append(handled())
        spark_cluster.kill_a_worker()

    def handled() -> int:
        receive = flow.ledger.get(flow.ledger.unfinished()[0])
        assert receive is not None
        return len(flow.ledger.manifest(receive, "handle").files)

    with (
        closing(spark_cluster.resource()) as spark,
        closing(ControlStore(f"sqlite:///{tmp_path}/control.sqlite")) as control,
    ):
        flow = Flow(
            BoundProducer(Thousands), queue, Lake(root=str(tmp_path / "lake")), control, lambda: spark.spark_session
        )
        killer = threading.Thread(target=kill_in_the_middle)
        killer.start()
        run(flow)
        killer.join()

    assert told == [0], "the worker was killed before handling was done"
    assert queue.backlog().messages == 0
    wanted = expected(range(COUNT))
    for name in ("numbers", "thirds"):
        counted = Counter(pl.read_delta(flow.tables[name].uri)["n"])
        assert counted == Counter(wanted[name])
    failed = [json.loads(data)["n"] for data in pl.read_delta(flow.tables["failed"].uri)["data"]]
    assert Counter(failed) == Counter(wanted["failed"])
