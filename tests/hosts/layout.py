"""Five hosts of one machine: network namespaces on a bridge, and the processes that `deploy/` starts on them.

A: web server, daemon with its runs, Spark's master and Connect server. B: PostgreSQL. C: an S3 server. D, E: a
Spark worker of one core each. All addresses are inside the namespaces, and nothing outside them is touched.
"""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from pipeline_platform.spark import jvm
from servers import postgres, s3
from servers.__main__ import FOLDER
from tests.hosts.project import DEFINITIONS, PIPELINES, WORKSPACE

PROJECT = Path(__file__).parents[2]
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2", "c": "10.77.0.3", "d": "10.77.0.4", "e": "10.77.0.5"}
SERVERS = {
    "webserver": "a", "daemon": "a", "spark-master": "a", "spark-connect": "a",
    "postgres": "b", "s3": "c", "worker-d": "d", "worker-e": "e",
}  # fmt: skip
"""Host of each server."""
STARTS = {"worker-d": "spark-worker", "worker-e": "spark-worker"}
"""Names of servers for `deploy/start` that differ from their names here."""


def missing() -> str | None:
    """Return the reason why hosts cannot be created here, or None."""
    if os.getuid() != 0 or not shutil.which("ip"):
        return "network namespaces need root and `ip` (Debian: iproute2)"
    if subprocess.run(["ip", "netns", "add", f"pp-try-{os.getpid()}"], capture_output=True, check=False).returncode:
        return "network namespaces are not allowed here"
    _ip("netns", "del", f"pp-try-{os.getpid()}")
    if not find_spec("dagster_postgres"):
        return "Dagster's storage on PostgreSQL needs the extra `postgres`"
    return postgres.missing() or s3.missing()


class Layout:
    """The hosts, their links and their servers; everything ends with `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._name, self._password = folder, f"pp{os.getpid()}", secrets.token_hex(8)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.database = "queue"
        self.environment = {
            **{name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "HOME", "JAVA_HOME")},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "JAVA_HOME": str(jvm.ensure_java(folder)),
            "PYSPARK_PYTHON": sys.executable,
            **dict(line.split("=", 1) for line in self._settings()),
            "DAGSTER_POSTGRES_URL": f"{self.url('postgresql+psycopg2')}?{_time_outs()}",
            "PIPELINE_PLATFORM_CONTROL": self.url("postgresql+psycopg"),
            "QUEUE_URL": self.url("postgresql+psycopg"),
            "AWS_ACCESS_KEY_ID": "hosts", "AWS_SECRET_ACCESS_KEY": self._password,
            "ROOT_ACCESS_KEY_ID": "hosts", "ROOT_SECRET_ACCESS_KEY": self._password,
            "PIPELINE_PLATFORM_SPARK_SECRET": secrets.token_hex(16),
            "SPARK_WORKER_CORES": "1", "SPARK_WORKER_MEMORY": "1g",
        }  # fmt: skip
        self.objects, self.checkout = folder / "objects", folder / "checkout"

    def _settings(self) -> list[str]:
        """Return `deploy/settings.env` with addresses of this layout instead of host names."""
        names = {"spark-connect": "a", "spark-master": "a", "s3": "c"}
        text = (PROJECT / "deploy" / "settings.env").read_text().replace("/srv", str(self.folder / "srv"))
        for name, host in names.items():
            text = text.replace(f"://{name}:", f"://{ADDRESSES[host]}:")
        return [line for line in text.splitlines() if "=" in line and not line.startswith("#")]

    def url(self, driver: str) -> str:
        return f"{driver}://local:{self._password}@{ADDRESSES['b']}:5432/postgres"

    @property
    def at_the_database(self) -> str:
        """URL of PostgreSQL's socket, which works without any link."""
        return f"postgresql://local:{self._password}@/postgres?host={self.folder}/postgres"

    def open(self) -> None:
        """Create the hosts, and start each server."""
        _ip("netns", "add", self._host("hub"))
        self._inside("hub", "ip", "link", "add", "hub", "type", "bridge")
        self._inside("hub", "ip", "link", "set", "hub", "up")
        for host, address in ADDRESSES.items():
            _ip("netns", "add", self._host(host))
            peer = ("peer", "name", f"to-{host}", "netns", self._host("hub"))
            _ip("link", "add", "eth0", "netns", self._host(host), "type", "veth", *peer)
            self._inside("hub", "ip", "link", "set", f"to-{host}", "master", "hub", "up")
            self._inside(host, "ip", "address", "add", f"{address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                self._inside(host, "ip", "link", "set", link, "up")
        self._make_database()
        for folder in ("objects/lake", "metadata", "srv/dagster"):
            (self.folder / folder).mkdir(parents=True)
        for what in ("deploy", "pipeline_platform"):
            (self.checkout / what).parent.mkdir(exist_ok=True)
            shutil.copytree(PROJECT / what, self.checkout / what, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(PROJECT / "dagster.yaml", self.checkout)
        for name, text in {"workspace.yaml": WORKSPACE, "definitions.py": DEFINITIONS, "counted.py": PIPELINES}.items():
            (self.checkout / name).write_text(text)
        for server in ("postgres", "s3", "spark-master", "worker-d", "worker-e", "spark-connect"):
            self.start(server)
        await_(lambda: self._answers("b", 5432) and self._answers("c", 7070) and self._answers("a", 15002), 180)
        self.run("a", sys.executable, "-c", "import definitions; definitions.QUEUE.create()")
        self.start("daemon")
        self.start("webserver")

    def close(self) -> None:
        """End all processes of the hosts, and remove the hosts."""
        for server in list(self._running):
            self.kill(server)
        for host in ("hub", *ADDRESSES):
            listed = subprocess.run(
                ["ip", "netns", "pids", self._host(host)], capture_output=True, text=True, check=False
            )
            for pid in listed.stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", self._host(host)], capture_output=True, check=False)

    def start(self, server: str) -> None:
        """Start a server on its host by `deploy/start`."""
        host = SERVERS[server]
        command = self._commands().get(server) or [str(self.checkout / "deploy" / "start"), STARTS.get(server, server)]
        scratch = self.folder / f"scratch-{server}"
        own = {"DEPLOY_HOST": ADDRESSES[host], "SPARK_STATE_DIR": str(scratch)}
        with (self.folder / f"{server}.log").open("ab") as log:
            self._running[server] = subprocess.Popen(
                ["ip", "netns", "exec", self._host(host), *command],
                cwd=self.checkout, env=self.environment | own, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def kill(self, server: str) -> None:
        """Kill the process group of a server."""
        process = self._running.pop(server)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def restart_spark(self, time_out_s: int) -> None:
        """Restart the master and the Connect server with another timeout of silent workers."""
        settings = self.checkout / "deploy" / "spark.conf"
        settings.write_text(re.sub(r"(spark\.network\.timeout +)\S+", rf"\g<1>{time_out_s}s", settings.read_text()))
        self.environment["SPARK_DAEMON_JAVA_OPTS"] = f"-Dspark.worker.timeout={time_out_s}"
        for server in ("spark-connect", "spark-master"):
            self.kill(server)
        for server in ("spark-master", "spark-connect"):
            self.start(server)

    def link(self, host: str, state: str) -> None:
        """Set the link of a host `down` or `up`."""
        self._inside("hub", "ip", "link", "set", f"to-{host}", state)

    def run(self, host: str, *command: str) -> str:
        """Run a command on a host, and return its output."""
        done = self._inside(host, *command, cwd=self.checkout, env=self.environment)
        return done.stdout

    def logs(self) -> str:
        """Return the end of each server's log."""
        return "\n".join(
            f"== {log.name}\n{log.read_text(errors='replace')[-1_500:]}" for log in self.folder.glob("*.log")
        )

    def _commands(self) -> dict[str, list[str]]:
        binaries, folder = postgres._binaries(), self.folder
        assert binaries is not None
        unprivileged = postgres._unprivileged(folder / "postgres")
        place = ["--sidecar", f"{folder}/metadata", f"{folder}/objects"]
        return {
            "postgres": [*unprivileged, str(binaries / "postgres"), "-D", f"{folder}/postgres/data"],
            "s3": [str(s3.install(FOLDER)), "--port", f"{ADDRESSES['c']}:7070", "posix", *place],
        }

    def _make_database(self) -> None:
        home, binaries = self.folder / "postgres", postgres._binaries()
        home.mkdir()
        self.folder.chmod(0o755)
        unprivileged = postgres._unprivileged(home)
        (home / "password").write_text(self._password)
        options = ["--username=local", f"--pwfile={home}/password", "--auth=scram-sha-256", "--no-sync", "--locale=C"]
        initialize = [*unprivileged, str(binaries) + "/initdb", f"--pgdata={home}/data", "--encoding=UTF8", *options]
        subprocess.run(initialize, cwd=home, capture_output=True, check=True)
        with (home / "data" / "postgresql.conf").open("a") as settings:
            settings.write(f"listen_addresses = '{ADDRESSES['b']}'\nunix_socket_directories = '{home}'\nfsync = off\n")
        with (home / "data" / "pg_hba.conf").open("a") as allowed:
            allowed.write("host all all 10.77.0.0/24 scram-sha-256\n")

    def _answers(self, host: str, port: int) -> bool:
        look = f"import socket; socket.create_connection(('{ADDRESSES[host]}', {port}), timeout=1)"
        command = ["ip", "netns", "exec", self._host(host), sys.executable, "-S", "-c", look]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def _host(self, host: str) -> str:
        return f"{self._name}-{host}"

    def _inside(self, host: str, *command: str, **options: object) -> "subprocess.CompletedProcess[str]":
        return _checked(["ip", "netns", "exec", self._host(host), *command], **options)


def _time_outs() -> str:
    """Return the timeouts of Dagster's connections, as deployed."""
    deployed = (PROJECT / "deploy" / "secrets.example" / "daemon.env").read_text()
    return next(line for line in deployed.splitlines() if line.startswith("DAGSTER_POSTGRES_URL")).partition("?")[2]


def await_(holds: Callable[[], object], within_s: float) -> None:
    """Wait until a condition is true; an exception counts as false."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            if holds():
                return
        except Exception as error:
            last: object = error
        else:
            last = "no"
        time.sleep(1)
    raise AssertionError(f"not within {within_s} s: {last}")


def _ip(*arguments: str) -> None:
    _checked(["ip", *arguments])


def _checked(command: list[str], **options: object) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done
