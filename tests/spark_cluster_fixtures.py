"""A Spark cluster on loopback, started as docs/operating.md says: a master, two workers, and a Connect server."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pyspark
import pytest

from pipeline_platform.spark import jvm, shipping
from pipelines.demo.processes import free_port
from resources.spark import SparkResource

KEEPER = """
import os, signal, subprocess, sys
subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
sys.stdin.read()
os.killpg(0, signal.SIGKILL)
"""
"""Keeps a process until the tests end, be it by a kill, and then ends it with all in its group."""


@dataclass(frozen=True)
class SparkCluster:
    """A cluster that runs.

    Attributes:
        port: Of its Connect server.
        token: What that asks for.
        workers: The two process groups of a worker and its executors.
    """

    port: int
    token: str
    workers: tuple[int, int]

    def resource(self) -> SparkResource:
        """A resource on it, with the platform and the tests shipped."""
        remote = f"sc://localhost:{self.port}"
        return SparkResource(remote=remote, token=self.token, packages=[*shipping.PACKAGES, "tests"])

    def kill_a_worker(self) -> None:
        """Kill one of the workers with its executor."""
        os.killpg(self.workers[0], signal.SIGKILL)


@pytest.fixture(scope="module")
def spark_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    """A cluster of a module's own; its tests may kill what they like."""
    folder = tmp_path_factory.mktemp("cluster")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "SPARK_HOME": str(Path(pyspark.__file__).parent),
        "PYSPARK_PYTHON": sys.executable,
        "JAVA_HOME": str(jvm.ensure_java(folder)),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_WORKER_DIR": str(folder),
        "SPARK_LOCAL_DIRS": str(folder),
        "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1",  # they live for a minute
    }
    master, connect, token = free_port(), free_port(), secrets.token_hex(16)
    settings = folder / "connect.conf"  # not an argument, which every process list shows
    settings.write_text(
        f"""
        spark.master spark://127.0.0.1:{master}
        spark.driver.host 127.0.0.1
        spark.driver.bindAddress 127.0.0.1
        spark.executor.memory 512m
        spark.sql.session.timeZone UTC
        spark.connect.grpc.binding.address 127.0.0.1
        spark.connect.grpc.binding.port {connect}
        spark.connect.authenticate.token {token}
        spark.ui.enabled false
        """
    )
    deploy = "org.apache.spark.deploy"
    here = ["--host", "127.0.0.1", "--webui-port", "0"]
    with ExitStack() as ending:

        def start(name: str, *command: str) -> int:
            return _start(ending, folder / f"{name}.log", environment, *command)

        start("master", "spark-class", f"{deploy}.master.Master", *here, "--port", str(master))
        _await(master, folder)
        worker = ["spark-class", f"{deploy}.worker.Worker", *here, "--cores", "1", "--memory", "1g"]
        workers = (
            start("worker-1", *worker, f"spark://127.0.0.1:{master}"),
            start("worker-2", *worker, f"spark://127.0.0.1:{master}"),
        )
        start(
            "connect",
            *("spark-submit", "--properties-file", str(settings)),
            *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"),
        )
        _await(connect, folder)
        yield SparkCluster(connect, token, workers)


def _start(ending: ExitStack, log: Path, environment: Mapping[str, str], *command: str) -> int:
    """Start one of Spark's programs; return the group of all its processes."""
    program = str(Path(environment["SPARK_HOME"], "bin", command[0]))
    with log.open("wb") as said:
        keeper = subprocess.Popen(
            [sys.executable, "-c", KEEPER, program, *command[1:]],
            env=environment, cwd=log.parent, stdin=subprocess.PIPE, stdout=said, stderr=said, start_new_session=True,
        )  # fmt: skip
    ending.callback(keeper.communicate)
    return keeper.pid


def _await(port: int, folder: Path) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    logs = {path.name: path.read_text(errors="replace")[-3_000:] for path in folder.glob("*.log")}
    raise AssertionError(f"nobody answers on port {port}: {logs}")
