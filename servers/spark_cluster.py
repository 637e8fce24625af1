"""A Spark cluster on loopback, started by `deploy/start`: a master, two workers, and a Connect server."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pipeline_platform.orchestration.resources.spark_resource import SparkResource
from pipeline_platform.spark import environment, jvm
from servers.server import ServerError, free_ports

PROJECT = Path(__file__).parents[1]
KEEPER = """
import os, signal, subprocess, sys
subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
sys.stdin.read()
os.killpg(0, signal.SIGKILL)
"""
"""Script that runs a process until the tests end or are killed, and then ends its process group."""


@dataclass(frozen=True)
class SparkCluster:
    """A running cluster."""

    port: int
    token: str
    ui: str
    begin_worker: Callable[[], int]
    secret: str
    folder: Path
    groups: list[int] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)

    def resource(self, package: str = "tests") -> SparkResource:
        """Return a resource on the cluster, which ships the platform and a package."""
        return SparkResource(remote=f"sc://localhost:{self.port}", token=self.token, packages=[package])

    def add_a_worker(self) -> None:
        """Start a worker with one core."""
        self.workers.append(self.begin_worker())

    def kill_a_worker(self) -> None:
        """Kill one of the workers with its executor."""
        os.killpg(self.workers.pop(), signal.SIGKILL)


@contextmanager
def cluster(folder: Path) -> Iterator[SparkCluster]:
    """Run a cluster with two workers until the block ends.

    Raises:
        ServerError: A process does not answer within four minutes.
    """
    checkout = folder / "checkout"
    shutil.copytree(PROJECT / "deploy", checkout / "deploy")
    (checkout / "pipeline_platform" / "spark").mkdir(parents=True)
    shutil.copy(environment.__file__, checkout / "pipeline_platform" / "spark")
    (master, connect, ui), token, secret = free_ports(3), secrets.token_hex(16), secrets.token_hex(16)
    settings = checkout / "deploy" / "spark.conf"
    given = settings.read_text().replace(" 15002", f" {connect}").replace(" 4040", f" {ui}")
    settings.write_text(f"{given}spark.executor.memory 512m\n")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "JAVA_HOME": str(jvm.ensure_java(folder)),
        "DEPLOY_HOST": "127.0.0.1",
        "PIPELINE_PLATFORM_SPARK_SECRET": secret,
        "PIPELINE_PLATFORM_SPARK_TOKEN": token,
        "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1",  # they run for a minute
        "SPARK_MASTER": f"spark://127.0.0.1:{master}",
        "SPARK_MASTER_PORT": str(master),
        "SPARK_STATE_DIR": str(folder / "state"),
        **dict.fromkeys(("SPARK_MASTER_WEBUI_PORT", "SPARK_WORKER_PORT", "SPARK_WORKER_WEBUI_PORT"), "0"),
        "SPARK_WORKER_CORES": "1",
        "SPARK_WORKER_MEMORY": "1g",
    }
    with ExitStack() as ending:

        def start(name: str) -> int:
            command = [str(checkout / "deploy" / "start"), name]
            running.groups.append(_start(ending, folder / f"{name}.log", variables, command))
            return running.groups[-1]

        begin_worker = lambda: start("spark-worker")  # noqa: E731
        running = SparkCluster(connect, token, f"http://127.0.0.1:{ui}", begin_worker, secret, folder)
        start("spark-master")
        _await(master, folder)
        running.add_a_worker()
        running.add_a_worker()
        start("spark-connect")
        _await(connect, folder)
        yield running


def _start(ending: ExitStack, log: Path, variables: Mapping[str, str], command: Sequence[str]) -> int:
    """Start a process; return its process group."""
    with log.open("ab") as said:
        keeper = subprocess.Popen(  # noqa: S603
            [sys.executable, "-c", KEEPER, *command],
            env=variables, cwd=log.parent, stdin=subprocess.PIPE, stdout=said, stderr=said, start_new_session=True,
        )  # fmt: skip
    ending.callback(keeper.communicate)
    return keeper.pid


def _await(port: int, folder: Path) -> None:
    until = time.monotonic() + 240
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    logs = {path.name: path.read_text(errors="replace")[-3_000:] for path in folder.glob("*.log")}
    raise ServerError(f"no answer on port {port}: {logs}")
