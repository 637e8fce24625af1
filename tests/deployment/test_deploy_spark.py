"""Spark as `deploy/start` starts it, which works only for clients with its secret."""

import json
import os
import socket
import stat
import urllib.error
import urllib.request
from contextlib import closing
from http.client import HTTPException

import psutil
import pyarrow as pa
import pytest

from pipeline_platform.spark import engine
from tests.spark.test_engine import ROWS, who
from tests.spark.test_spark_ports import REFUSED, asked_by_another, ports_of, verify_endpoint

pytestmark = pytest.mark.faults

NAMES = pa.schema([("name", pa.string())])


def around(index):
    yield pa.RecordBatch.from_pydict({"name": list(os.environ)}, NAMES)


def javas(cluster):
    """Return each JVM of the cluster by its main class."""
    mine = [process for process in psutil.process_iter(["name"]) if process.info["name"] == "java"]
    mine = [process for process in mine if os.getpgid(process.pid) in cluster.groups]
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
def working(spark_cluster):
    """Return the cluster with active executors."""
    with closing(spark_cluster.resource()) as spark:
        assert engine.run(spark.spark_session, who, 2, ROWS).num_rows == 2
        yield spark_cluster, spark


def test_every_port_is_a_page_or_wants_the_secret(working):
    cluster, _ = working
    found = javas(cluster)
    assert {name.rpartition(".")[2] for name in found} == {
        "Master", "Worker", "SparkSubmit", "CoarseGrainedExecutorBackend"
    }  # fmt: skip
    for name, process in found.items():
        rpc = {port for port in ports_of(process.pid) - {cluster.port} if not is_a_page(port)}
        assert rpc, name
        assert all(REFUSED in asked_by_another(port, verify_endpoint) for port in rpc), name


def test_the_master_takes_no_submission_and_its_page_kills_nothing(working):
    cluster, spark = working
    master = javas(cluster)["org.apache.spark.deploy.master.Master"]
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
    cluster, _ = working
    for name, process in javas(cluster).items():
        if name.endswith(("Master", "Worker")):
            listens = [link.laddr for link in process.net_connections("tcp") if link.status == psutil.CONN_LISTEN]
            assert {address.ip.removeprefix("::ffff:") for address in listens} == {"127.0.0.1"}, name


def test_the_secret_is_in_no_argument_no_log_and_no_file_of_others(working):
    cluster, spark = working
    arguments = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    files = [path for path in cluster.folder.rglob("*") if path.is_file()]
    holding = [path for path in files if cluster.secret.encode() in path.read_bytes()]

    assert not any(cluster.secret in word for words in arguments for word in words or ())
    assert {path.name for path in holding} == {"master.conf", "worker.conf", "connect.conf"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in holding} == {0o600}
    assert {stat.S_IMODE(path.parent.stat().st_mode) for path in holding} == {0o700}
    names = engine.run(spark.spark_session, around, 1, NAMES)["name"].to_pylist()
    assert not [name for name in names if name.startswith("PIPELINE_PLATFORM_SPARK_")]


def test_no_rest_server_listens(working):
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", 6066)) != 0
