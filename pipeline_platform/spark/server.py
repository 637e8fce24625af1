"""A warm Spark on this machine: one Spark Connect server that outlives the runs that use it.

The server listens on the loopback address only and wants a token. Its state folder holds `spark.json` (process, port,
token, Java) and `spark.log`, readable by their owner alone. What tasks write follows the umask of the server's starter.
A server that dies leaves `spark.json` behind: the next run that looks for it starts another (`revive`). `stop` removes
the file, so a server that was stopped stays away.

Workers have the environment that the server was started in, and the libraries installed by then; start it anew
after a change to either. An edit of the project's code needs no restart, but leaves one idle Python process (36 MB).
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
"""Seconds that a start may take at most while it makes progress: minutes, on a machine with much else to do."""

_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"
_POLL_S = 0.05
_STOP_S = 15  # Spark's own shutdown hooks take up to 10 s
_STALLED_S = 60.0
_LOG_EACH_S = 10.0
_LOG_BYTES = 16_000_000  # and as much again of what came before
_LOG = logging.getLogger(__name__)

_STATE = "spark.json"
_STARTING = "spark.starting.json"
_LOG_FILE = "spark.log"
_LOCK = "spark.lock"


class SparkServerError(RuntimeError):
    """The server did not start; the message ends with the last lines of its log."""


class SparkServerDiedError(RuntimeError):
    """The server died under its clients."""


@dataclass(frozen=True)
class SparkServer:
    """A server that was started.

    Attributes:
        pid: Its process.
        born: When that process was started; with `pid`, it names one process.
        port: On the loopback address.
        token: What a client must send. Not part of `repr`.
        started_at: ISO 8601, UTC. Names one life of the server (see `shipping.session_id`).
        java: The Java home it runs on.
        cores: Tasks that run at a time.
        memory: Of the JVM.
        host: The machine it runs on: several may share a state folder.
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
        """Whether that very process runs."""
        return bool(self.born) and born(self.pid) == self.born

    @property
    def address(self) -> str:
        """For clients, without the token. By name: Spark's client insists on TLS for `127.0.0.1`."""
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
    """Start the server, or return the one that is running. Two at once start one.

    Args:
        folder: State folder. Made if missing.
        cores: Tasks that run at a time; all of the machine's if not given. A server that runs already may have others.
        memory: Of the JVM, in its notation. Python workers come on top of it.
        timeout_s: Seconds until its port must answer. It is given up earlier if it dies or stands still.
        log: Gets a line each ten seconds that says what is waited for.

    Raises:
        SparkServerError: It died, stood still or did not answer in time. Nothing is left running.
        pipeline_platform.spark.jvm.JavaNotFoundError: There is no Java to run it on.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (ignore := folder / ".gitignore").exists():
        ignore.write_text("*\n")  # nobody should commit a token
    with FileLock(folder / _LOCK, mode=0o600):
        return status(folder) or _start(folder, cores or os.cpu_count() or 1, memory, timeout_s, log)


def revive(folder: Path, log: Callable[[str], None] = _LOG.warning) -> SparkServer | None:
    """Return the running server; if it died, start another with the same options. Two at once start one.

    Returns:
        The server; None if none was started, if it was stopped, or if it died on another machine.

    Raises:
        SparkServerError: The other one did not start.
        pipeline_platform.spark.jvm.JavaNotFoundError: There is no Java any more.
    """
    if (running := status(folder)) or not (folder / _STATE).exists():
        return running
    with FileLock(folder / _LOCK, mode=0o600):
        known = _known(folder / _STATE)  # again: another process may have started or stopped it
        if known is None or known.lives:
            return known
        if known.host != socket.gethostname():
            return None
        log(f"the Spark server (process {known.pid}, since {known.started_at}) died: starting another")
        return _start(folder, known.cores, known.memory, START_WITHIN_S, log)


def stop(folder: Path) -> bool:
    """End the server that `start` started, and no other process; return whether there was one."""
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
    # One log per life of a server, and that of the life before. It may quote data of failed tasks, hence private.
    with suppress(FileNotFoundError):
        (folder / _LOG_FILE).replace(folder / f"{_LOG_FILE}.1")
    _write_private(folder / _LOG_FILE, "")
    properties = folder / "spark.properties"
    server = None
    try:
        server = _launch(folder, properties, jvm.ensure_java(folder), cores, memory)
        # Written before it answers: if this process is killed, the next one finds what it has started, and ends it.
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
        # Sessions are shared and named after the code, and the id of one that timed out never comes back.
        "spark.connect.session.manager.defaultSessionTimeout": "30d",
        # Work whose client was killed ends by itself about a minute later, instead of seven: the server notices
        # when the client does not come back for the next part of a stream, and looks every ten seconds.
        "spark.connect.execute.reattachable.senderMaxStreamDuration": "30s",
        "spark.connect.execute.manager.detachedTimeout": "30s",
        "spark.connect.execute.manager.maintenanceInterval": "10s",
        "spark.local.dir": str(folder / "scratch"),
    }
    # The project's code and native libraries, which Java would leave with the system's when it is killed.
    settings["spark.driver.defaultJavaOptions"] += f' "-Djava.io.tmpdir={folder / "scratch"}"'
    # The token goes by this file: arguments show in the process list, variables in every worker.
    _write_private(properties, "".join(f"{name}={value}\n" for name, value in settings.items()))
    variables = {name: value for name, value in environment.allowed(os.environ).items() if name not in engine.FOREIGN}
    variables |= engine.interpreters() | {"JAVA_HOME": str(java)}
    submit = Path(variables["SPARK_HOME"]) / "bin" / "spark-submit"
    server = [str(submit), "--properties-file", str(properties), "--class", _CLASS, "spark-internal"]
    logger = [sys.executable, "-I", bounded_log.__file__, str(folder / _LOG_FILE), str(_LOG_BYTES)]
    reading, writing = os.pipe()
    with open(reading, "rb") as printed, open(writing, "wb") as output:
        null = subprocess.DEVNULL
        # Sessions of their own, which the starter's Ctrl-C does not reach.
        subprocess.Popen(logger, cwd=folder, stdin=printed, stdout=null, stderr=null, start_new_session=True)  # noqa: S603
        process = subprocess.Popen(  # noqa: S603
            server, cwd=folder, env=variables, stdin=null, stdout=output, stderr=output, start_new_session=True
        )
    now = datetime.now(UTC).isoformat()
    return SparkServer(process.pid, born(process.pid) or "", port, token, now, str(java), cores, memory)


def _await_port(server: SparkServer, folder: Path, timeout_s: float, log: Callable[[str], None]) -> None:
    """Wait until the server answers, or until it is clear that it will not."""
    began = logged = moved = time.monotonic()
    progress: object = None
    while server.lives:
        with suppress(OSError), socket.create_connection(("127.0.0.1", server.port), timeout=1):
            return
        now, seen = time.monotonic(), (worked(server.pid), log_tail(folder))
        if seen != progress:
            progress, moved = seen, now
        waits = f"the Spark server (process {server.pid}) does not answer after {now - began:.0f} s"
        if now - began > timeout_s:
            raise SparkServerError(f"{waits}; give it a longer --timeout (timeout_s). {_end_of_log(folder)}")
        if now - moved > _STALLED_S:
            raise SparkServerError(f"{waits} and has done nothing for {_STALLED_S:.0f} s. {_end_of_log(folder)}")
        if now - logged > _LOG_EACH_S:
            log(f"{waits} but works; giving up after {timeout_s:.0f} s. Its log is {folder / _LOG_FILE}")
            logged = now
        time.sleep(_POLL_S)
    raise SparkServerError(f"the Spark server died while starting on {server.java}. {_end_of_log(folder)}")


def _end_of_log(folder: Path) -> str:
    return f"Its log {folder / _LOG_FILE} ends with:\n{log_tail(folder)}"


def _end(server: SparkServer) -> None:
    """Ask the process to end, kill it after a while, and touch no other that has its id by now."""
    if not server.lives:
        return
    with suppress(ProcessLookupError):
        group = os.getpgid(server.pid)  # while starting, Spark's script has children, which may end later
        for sent in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(group, sent)
            deadline = time.monotonic() + _STOP_S
            while time.monotonic() < deadline:
                if not group_lives(group):
                    return
                time.sleep(_POLL_S)


def _sweep(folder: Path) -> None:
    """Remove what a killed server could not; end one whose starter was killed before it answered."""
    if half_started := _known(folder / _STARTING):
        _end(half_started)
    (folder / _STARTING).unlink(missing_ok=True)
    for leftover in ("scratch", "spark-warehouse"):
        shutil.rmtree(folder / leftover, ignore_errors=True)


def _known(file: Path) -> SparkServer | None:
    """Return the server that a file describes, dead or alive; None where another version wrote it.

    Raises:
        SparkServerError: Another user may have written the file, and so lead runs to a server of their own.
    """
    try:
        with suppress(FileNotFoundError, ValueError, TypeError), file.open() as opened:
            of = os.fstat(opened.fileno())
            if of.st_uid in (os.geteuid(), 0) and not of.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return SparkServer(**json.load(opened))
            raise PermissionError
    except PermissionError:
        raise SparkServerError(
            f"{file}: it belongs to another user, or others may write it. Remove it, and give the folder to the user "
            "of this process with mode 700."
        ) from None
    return None


def _write_private(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(aside, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text)
    aside.replace(path)
