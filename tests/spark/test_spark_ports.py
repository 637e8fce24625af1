"""Ports of Spark on this machine: other users can reach them, and are refused."""

import json
import os
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
TOKEN = "canary-of-a-bank"

ASK = """
import socket, sys

port, request = int(sys.argv[1]), bytes.fromhex(sys.argv[2])
with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
    connection.sendall(request)
    print(connection.recv(300).hex())
"""
"""Script that sends a request and prints the answer."""

OWN = """
import json, os, psutil, sys
import polars, pyarrow
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.orchestration.resources.spark_resource import SparkResource
from pipeline_platform.spark import engine
from tests.fixtures.flow import flow_of, rows, run
from tests.run.test_callback_environment import Looking

folder, more = sys.argv[1], json.loads(sys.argv[2])
names = pyarrow.schema([("name", pyarrow.string())])

def around(index):
    yield pyarrow.RecordBatch.from_pydict({"name": list(os.environ)}, names)

spark = SparkResource(state_folder=folder, cores=1, packages=["tests"], environment=["BANK_TOKEN"], spark_config=more)
queue = TableQueue(name="queue", url=f"sqlite:///{folder}/queue.sqlite")
queue.create()
queue.enqueue([b"x"])
flow = flow_of(folder, Looking, queue, session=lambda: spark.spark_session, variables=spark.variables)
run(flow)
told = {
    "java": [child.pid for child in psutil.Process().children(recursive=True) if child.name() == "java"],
    "callback": rows(flow, "seen").to_dicts(),
    "worker": engine.run(spark.spark_session, around, 1, names)["name"].to_pylist(),
}
spark.spark_session.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()  # all events are in the log
print(json.dumps(told), flush=True)
sys.stdin.read()
spark.close()
"""

REFUSED = b"Expected SaslMessage"
"""Spark's answer to an unauthenticated request."""


def text(words):
    return struct.pack(">H", len(words)) + words.encode()


def long_text(words):
    return struct.pack(">i", len(words)) + words.encode()


def rpc(body):
    """A request of Spark's transport protocol with number 7 and a line end, for ports that read lines."""
    request = struct.pack(">bqi", 3, 7, len(body)) + body
    return struct.pack(">q", len(request) + 8) + request + b"\n"


def verify_endpoint(port):
    """Ask a driver for an endpoint, as each executor does first."""
    address = b"\1" + text("127.0.0.1") + struct.pack(">i", port)
    return rpc(b"\0" + address + text("endpoint-verifier") + b"\xac\xed\0\5t" + text("x"))


def open_blocks(port):
    """Ask a block manager for a block."""
    return rpc(b"\0" + long_text("app") + long_text("0") + struct.pack(">i", 1) + long_text("broadcast_0_piece0"))


def call_java(port):
    """Call a method through a gateway to Python."""
    return b"c\nz:java.lang.System\ncurrentTimeMillis\ne\n"


def asked_by_another(port, request):
    """Return a port's answer to another user of this machine, or to this user if not run as root."""
    other = {"user": "nobody", "cwd": "/"} if os.geteuid() == 0 else {}
    asked = subprocess.run(
        ["/usr/bin/python3", "-I", "-c", ASK, str(port), request(port).hex()],
        capture_output=True, text=True, timeout=60, check=False, **other,
    )  # fmt: skip
    assert asked.returncode == 0, asked.stderr
    return bytes.fromhex(asked.stdout)


def answers(ports):
    """Return the answer of each port to each request."""
    return [asked_by_another(port, request) for port in ports for request in (verify_endpoint, open_blocks)]


def ports_of(pid):
    sockets = psutil.Process(pid).net_connections("tcp")
    return {connection.laddr.port for connection in sockets if connection.status == psutil.CONN_LISTEN}


def test_no_port_of_the_warm_server_takes_a_request_of_another_user(warm_spark):
    heard = answers(ports_of(warm_spark.server.pid) - {warm_spark.server.port})  # requires the token

    assert len(heard) == 4, "the driver and its block manager, each asked twice"
    assert [answer for answer in heard if REFUSED not in answer] == []


@dataclass(frozen=True)
class OwnSpark:
    """A process with its own Spark session: its findings and all of its output."""

    found: dict[str, Any]
    folder: Path


@pytest.fixture(scope="module")
def own_spark(tmp_path_factory):
    """A session in an environment that configures another Spark, with a log of all events."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "events").mkdir()
    (folder / "spark-defaults.conf").write_text("spark.master yarn\n")
    around = {"SPARK_CONF_DIR": str(folder), "PYSPARK_SUBMIT_ARGS": "--master yarn", "BANK_TOKEN": TOKEN}
    events = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": f"file://{folder}/events",
        "spark.eventLog.compress": "false",  # the tests search the log for text
    }
    with (
        (folder / "output").open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-c", OWN, str(folder), json.dumps(events)],
            cwd=ROOT, env=os.environ | around | {"DATABASE_URL": "postgresql://bob:secret@host/db"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True,
        ) as process,
    ):  # fmt: skip
        told = process.stdout.readline()
        assert told, (folder / "output").read_text()
        yield OwnSpark(json.loads(told), folder)
        process.communicate(timeout=60)


def test_no_port_of_a_session_of_a_runs_own_takes_a_request_of_another_user(own_spark):
    (java,) = own_spark.found["java"]
    heard = {port: answers([port]) for port in ports_of(java)}
    others = [port for port, of_port in heard.items() if not all(REFUSED in answer for answer in of_port)]

    assert len(heard) - len(others) == 2, "the driver and its block manager"
    assert len(others) == 1, "the gateway to Python"
    assert b"Authentication error" in asked_by_another(others[0], call_java)


def test_workers_of_a_session_of_a_runs_own_get_no_secrets_and_callbacks_those_that_the_run_names(own_spark):
    (seen,) = own_spark.found["callback"]

    assert not {"DATABASE_URL", "BANK_TOKEN"} & {*own_spark.found["worker"]}
    assert "DATABASE_URL" not in seen["names"]
    assert seen["token"] == TOKEN[-7:]


def test_no_event_and_no_output_of_spark_contains_a_value_that_a_run_hands_to_callbacks(own_spark):
    files = {path: path.read_bytes() for path in own_spark.folder.rglob("*") if path.is_file()}
    events = b"".join(content for path, content in files.items() if own_spark.folder / "events" in path.parents)

    for event in (b"SparkListenerEnvironmentUpdate", b"SparkListenerJobStart", b"SparkListenerJobEnd"):
        assert event in events
    assert [path for path, content in files.items() if TOKEN.encode() in content] == []
