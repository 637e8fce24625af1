"""A warm Spark on this machine: a Spark Connect server that outlives the runs that use it.

The server listens on the loopback address only, and requires a token. Its state folder contains `spark.json` (process,
port, token, Java) and `spark.log`, readable by their owner only. Files of tasks get the umask of the server's starter.
If the server crashes, `spark.json` remains, and the next run starts another server (`revive`). `stop` removes the
file, so a stopped server is not started again.

Workers have the environment and the libraries of the time when the server was started; restart it after a change to
either. An edit of the project's code needs no restart, but leaves an idle Python process (36 MB).
"""

import json
import logging
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock

from pipeline_platform.process import born, group_lives, worked
from pipeline_platform.spark import bounded_log, engine, environment, jvm

START_WITHIN_S = 900.0
"""Greatest duration of a start that makes progress, in seconds: a start takes minutes on a busy machine."""

_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"
_POLL_S = 0.05
_STOP_S = 15  # Spark's own shutdown hooks take up to 10 s
_STALLED_S = 60.0
_LOG_EACH_S = 10.0
_LOG_BYTES = 16_000_000  # of the current log; the previous log has the same limit
_LOG = logging.getLogger(__name__)

_STATE = "spark.json"
_STARTING = "spark.starting.json"
_LOG_FILE = "spark.log"
_LOCK = "spark.lock"


class SparkServerError(RuntimeError):
    """The server did not start. The message ends with the last lines of its log."""


class SparkServerDiedError(RuntimeError):
    """The server crashed while clients used it."""


@dataclass(frozen=True)
class SparkServer:
    """A started server.

    Attributes:
        pid: Id of its process.
        born: Start time of its process, which identifies the process together with `pid`.
        port: Port on the loopback address.
        token: Token that clients must send. Not part of `repr`.
        started_at: Start time, ISO 8601 in UTC; differs after a restart (see `shipping.session_id`).
        java: Its Java home.
        cores: Number of parallel tasks.
        memory: Memory of the JVM.
        host: Name of its machine, because several machines may share a state folder.
    """

    pid: int
    born: str
    port: int
    token: str = field(repr=False)
    started_at: str
    java: str
    cores: int
    memory: str = "1g"
    host: str = field(default_factory=socket.gethostname)

    @property
    def lives(self) -> bool:
        """Whether the process is running."""
        return bool(self.born) and born(self.pid) == self.born

    @property
    def address(self) -> str:
        """Address for clients, without the token; not `127.0.0.1`, for which Spark's client requires TLS."""
        return f"sc://localhost:{self.port}"


def status(folder: Path) -> SparkServer | None:
    """Return the running server of a state folder, or None."""
    server = _known(folder / _STATE)
    return server if server and server.lives else None


def start(
    folder: Path,
    *,
    cores: int | None = None,
    memory: str = "1g",
    timeout_s: float = START_WITHIN_S,
    log: Callable[[str], None] = _LOG.info,
) -> SparkServer:
    """Start the server, or return the running server. Safe to call concurrently.

    Args:
        folder: State folder, created if missing.
        cores: Number of parallel tasks; default: all cores. Ignored if the server is running.
        memory: Memory of the JVM, in its notation, without Python workers. Ignored if the server is running.
        timeout_s: Seconds until its port must answer. The start fails earlier if the process ends or stalls.
        log: Called with the progress every ten seconds.

    Raises:
        SparkServerError: It crashed, stalled or did not answer in time. No process is left running.
        pipeline_platform.spark.jvm.JavaNotFoundError: No suitable Java is installed.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (ignore := folder / ".gitignore").exists():
        ignore.write_text("*\n")  # a token must not be committed
    with FileLock(folder / _LOCK, mode=0o600):
        return status(folder) or _start(folder, cores or os.cpu_count() or 1, memory, timeout_s, log)


def revive(folder: Path, log: Callable[[str], None] = _LOG.warning) -> SparkServer | None:
    """Return the running server; if it crashed, start another with the same options. Safe to call concurrently.

    Returns:
        The server; None if it was never started, if it was stopped, or if it crashed on another machine.

    Raises:
        SparkServerError: The new server did not start.
        pipeline_platform.spark.jvm.JavaNotFoundError: Java is no longer installed.
    """
    if (running := status(folder)) or not (folder / _STATE).exists():
        return running
    with FileLock(folder / _LOCK, mode=0o600):
        known = _known(folder / _STATE)  # again: another process may have started or stopped it
        if known is None or known.lives:
            return known
        if known.host != socket.gethostname():
            return None
        log(f"Restarting the Spark server: process {known.pid}, started {known.started_at}, has crashed")
        return _start(folder, known.cores, known.memory, START_WITHIN_S, log)


def stop(folder: Path) -> bool:
    """Stop the server that `start` started, and no other process; return whether it was running."""
    if not ((folder / _STATE).exists() or (folder / _STARTING).exists()):
        return False
    with FileLock(folder / _LOCK, mode=0o600):
        if server := status(folder):
            _end(server)
        (folder / _STATE).unlink(missing_ok=True)
        _sweep(folder)
    return server is not None


def log_tail(folder: Path, lines: int = 20) -> str:
    """Return the last lines of the server's log; empty if there is none."""
    with suppress(FileNotFoundError):
        return "\n".join((folder / _LOG_FILE).read_text(errors="replace").splitlines()[-lines:])
    return ""


def _start(folder: Path, cores: int, memory: str, timeout_s: float, log: Callable[[str], None]) -> SparkServer:
    _sweep(folder)
    (folder / "scratch").mkdir(mode=0o700)  # blocks of messages; the project's code
    # A new log for each start, beside the previous log. Private, because it may quote data of failed tasks.
    with suppress(FileNotFoundError):
        (folder / _LOG_FILE).replace(folder / f"{_LOG_FILE}.1")
    _write_private(folder / _LOG_FILE, "")
    properties = folder / "spark.properties"
    server = None
    try:
        server = _launch(folder, properties, jvm.ensure_java(folder), cores, memory)
        # Written before it answers: if this process is killed, the next process finds the server and ends it.
        _write_private(folder / _STARTING, json.dumps(asdict(server), indent=2))
        _await_port(server, folder, timeout_s, log)
        (folder / _STARTING).replace(folder / _STATE)
    except BaseException:
        if server:
            _end(server)
        (folder / _STARTING).unlink(missing_ok=True)
        raise
    finally:
        properties.unlink(missing_ok=True)
    return server


def _launch(folder: Path, properties: Path, java: Path, cores: int, memory: str) -> SparkServer:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    token = secrets.token_hex(32)
    settings = engine.local_settings(cores, memory) | {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.connect.authenticate.token": token,
        # Sessions are shared, their id depends on the code, and an id cannot be reused after a timeout.
        "spark.connect.session.manager.defaultSessionTimeout": "30d",
        # Jobs of a killed client end after about one minute instead of seven: the server detects that the client
        # does not request the next part of a stream, and checks every ten seconds.
        "spark.connect.execute.reattachable.senderMaxStreamDuration": "30s",
        "spark.connect.execute.manager.detachedTimeout": "30s",
        "spark.connect.execute.manager.maintenanceInterval": "10s",
        "spark.local.dir": str(folder / "scratch"),
    }
    # For shipped code and native libraries, which a killed Java would leave in the system's folder.
    settings["spark.driver.defaultJavaOptions"] += f' "-Djava.io.tmpdir={folder / "scratch"}"'
    # The token is passed by this file, because other users see arguments, and workers see variables.
    _write_private(properties, "".join(f"{name}={value}\n" for name, value in settings.items()))
    variables = {name: value for name, value in environment.allowed(os.environ).items() if name not in engine.FOREIGN}
    variables |= engine.interpreters() | {"JAVA_HOME": str(java)}
    submit = Path(variables["SPARK_HOME"]) / "bin" / "spark-submit"
    server = [str(submit), "--properties-file", str(properties), "--class", _CLASS, "spark-internal"]
    logger = [sys.executable, "-I", bounded_log.__file__, str(folder / _LOG_FILE), str(_LOG_BYTES)]
    reading, writing = os.pipe()
    with open(reading, "rb") as printed, open(writing, "wb") as output:
        null = subprocess.DEVNULL
        # In new sessions, so that Ctrl-C in the starter does not reach them.
        subprocess.Popen(logger, cwd=folder, stdin=printed, stdout=null, stderr=null, start_new_session=True)  # noqa: S603
        process = subprocess.Popen(  # noqa: S603
            server, cwd=folder, env=variables, stdin=null, stdout=output, stderr=output, start_new_session=True
        )
    now = datetime.now(UTC).isoformat()
    return SparkServer(process.pid, born(process.pid) or "", port, token, now, str(java), cores, memory)


def _await_port(server: SparkServer, folder: Path, timeout_s: float, log: Callable[[str], None]) -> None:
    """Wait until the server answers; raise if it ends, stalls or times out."""
    began = logged = moved = time.monotonic()
    progress: object = None
    while server.lives:
        with suppress(OSError), socket.create_connection(("127.0.0.1", server.port), timeout=1):
            return
        now, seen = time.monotonic(), (worked(server.pid), log_tail(folder))
        if seen != progress:
            progress, moved = seen, now
        silent = f"The Spark server (process {server.pid}) has not answered for {now - began:.0f} s"
        if now - began > timeout_s:
            raise SparkServerError(f"{silent}. Use a longer --timeout (timeout_s). {_end_of_log(folder)}")
        if now - moved > _STALLED_S:
            raise SparkServerError(f"{silent} and has stalled for {_STALLED_S:.0f} s. {_end_of_log(folder)}")
        if now - logged > _LOG_EACH_S:
            log(f"{silent}, but is working; waiting for up to {timeout_s:.0f} s. Its log is {folder / _LOG_FILE}")
            logged = now
        time.sleep(_POLL_S)
    raise SparkServerError(f"The Spark server crashed while starting on {server.java}. {_end_of_log(folder)}")


def _end_of_log(folder: Path) -> str:
    return f"Its log {folder / _LOG_FILE} ends with:\n{log_tail(folder)}"


def _end(server: SparkServer) -> None:
    """Terminate the process, and kill it after a while; a new process with the same id is not touched."""
    if not server.lives:
        return
    with suppress(ProcessLookupError):
        group = os.getpgid(server.pid)  # during a start, Spark's script has children, which may end later
        for sent in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(group, sent)
            deadline = time.monotonic() + _STOP_S
            while time.monotonic() < deadline:
                if not group_lives(group):
                    return
                time.sleep(_POLL_S)


def _sweep(folder: Path) -> None:
    """Remove files of a killed server, and end a server whose starter was killed before it answered."""
    if half_started := _known(folder / _STARTING):
        _end(half_started)
    (folder / _STARTING).unlink(missing_ok=True)
    for leftover in ("scratch", "spark-warehouse"):
        shutil.rmtree(folder / leftover, ignore_errors=True)


def _known(file: Path) -> SparkServer | None:
    """Return the server of a state file, running or not; None if another version wrote the file.

    Raises:
        SparkServerError: Another user can write the file, and could direct runs to another server.
    """
    try:
        with suppress(FileNotFoundError, ValueError, TypeError), file.open() as opened:
            of = os.fstat(opened.fileno())
            if of.st_uid in (os.geteuid(), 0) and not of.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return SparkServer(**json.load(opened))
            raise PermissionError
    except PermissionError:
        raise SparkServerError(
            f"{file} must belong to the user of this process, and be writable by this user only. Remove it, and set "
            "the owner of the folder to this user and its mode to 700."
        ) from None
    return None


def _write_private(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(aside, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text)
    aside.replace(path)
