"""A warm Spark on this machine: one Spark Connect server that outlives the runs that use it.

A run that starts its own Spark waits seconds for it; with a server it waits half a second. The server listens on
the loopback address only and wants a token. What is known about it lies in a state folder, readable by its owner
alone: `spark.json` (process, port, token, Java) and `spark.log`. What tasks write follows the umask of its starter.

A server that dies leaves `spark.json` behind: the next run that looks for it starts another (`revive`). `stop` removes
the file, so what it ended stays away.

Workers have the environment that the server was started in, and the libraries installed by then; start it anew
after a change to either. An edit of the project's code needs no restart, but each leaves one idle Python process
of Spark's (36 MB) until the server ends.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from pipeline_platform.home import home
from pipeline_platform.process import born, detach, group_lives, worked
from pipeline_platform.spark import bounded_log, engine, jvm

_SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
_POLL_S = 0.05
_STOP_S = 15  # Spark's own shutdown hooks take up to 10 s
START_WITHIN_S = 900.0
"""Seconds that a start may take at most, as long as it gets on: on a machine with much else to do it takes minutes."""
_STALLED_S = 60.0
_SAY_EACH_S = 10.0
_LOG_BYTES = 16_000_000  # and as much again of what came before
_LOG = logging.getLogger(__name__)


class SparkServerError(RuntimeError):
    """The server did not start; the message ends with the last lines of its log."""


class SparkServerDiedError(RuntimeError):
    """The server died under its clients."""


@dataclass(frozen=True)
class SparkServer:
    """A running server.

    Attributes:
        pid: Its process.
        born: When that process was started, as its system counts: with `pid`, it names one process for ever.
        port: On the loopback address.
        token: What a client must bring. Not part of `repr`.
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


def status(folder: Path | None = None) -> SparkServer | None:
    """Look for the running server.

    Args:
        folder: State folder; `home()` if not given.

    Returns:
        The server, or None if none was started, or what was started is gone, even if its process id lives on in
        some other process.
    """
    server = _known(_state_file(folder or home()))
    return server if server and server.lives else None


def start(
    folder: Path | None = None,
    *,
    cores: int | None = None,
    memory: str = "1g",
    timeout_s: float = START_WITHIN_S,
    java_options: str = "",
    log: Callable[[str], None] = _LOG.info,
) -> SparkServer:
    """Start the server, or return the one that is running. Two at once start one.

    Args:
        folder: State folder, `home()` if not given. Made if missing.
        cores: Tasks that run at a time; all of the machine's if not given.
        memory: Of the JVM, in its notation. Python workers come on top of it.
        timeout_s: Seconds until its port must answer. It is given up earlier if it dies or does nothing.
        java_options: More options for its Java, quoted as in Spark's settings.
        log: Told what is waited for, each ten seconds.

    Returns:
        The running server, which may have other cores or memory if it was there before.

    Raises:
        SparkServerError: It died, stood still or did not answer in time. Nothing is left running.
        pipeline_platform.spark.jvm.JavaNotFoundError: There is no Java to run it on.
    """
    folder = folder or home()
    _make(folder)
    with _locked(folder):
        return status(folder) or _start(folder, cores or os.cpu_count() or 1, memory, timeout_s, java_options, log)


def revive(folder: Path | None = None, log: Callable[[str], None] = _LOG.warning) -> SparkServer | None:
    """Return the running server; if it died, start another as it was started. Two at once start one.

    Args:
        folder: State folder; `home()` if not given.
        log: Told that it died, and what is waited for.

    Returns:
        The running server; None if none was started, if it was stopped, or if it died on another machine.

    Raises:
        SparkServerError: The other one did not start.
        pipeline_platform.spark.jvm.JavaNotFoundError: There is no Java any more.
    """
    folder = folder or home()
    if (running := status(folder)) or not _state_file(folder).exists():
        return running
    with _locked(folder):
        known = _known(_state_file(folder))  # read again: who had the lock may have started or stopped one
        if known is None or known.lives:
            return known
        if known.host != socket.gethostname():
            return None
        log(f"the Spark server (process {known.pid}, since {known.started_at}) died: starting another")
        return _start(folder, known.cores, known.memory, START_WITHIN_S, "", log)


def stop(folder: Path | None = None, *, patience_s: float = _STOP_S) -> bool:
    """End the server that `start` started, that very process and no other.

    Args:
        folder: State folder; `home()` if not given.
        patience_s: Seconds after which it is killed.

    Returns:
        Whether there was one.
    """
    folder = folder or home()
    if not (_state_file(folder).exists() or _starting_file(folder).exists()):
        return False
    with _locked(folder):
        server = status(folder)
        if server:
            _end(server, patience_s)
        _state_file(folder).unlink(missing_ok=True)
        _sweep(folder)
    return server is not None


def log_tail(folder: Path | None = None, lines: int = 20) -> str:
    """The last lines of the server's log.

    Args:
        folder: State folder; `home()` if not given.
        lines: How many.

    Returns:
        Text, empty if there is no log.
    """
    try:
        text = _log_file(folder or home()).read_text(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def _start(
    folder: Path, cores: int, memory: str, timeout_s: float, java_options: str, log: Callable[[str], None]
) -> SparkServer:
    _sweep(folder)
    for name in ("scratch", "artifacts"):  # blocks of messages; the project's code
        (folder / name).mkdir(mode=0o700)
    java = jvm.ensure_java(folder)
    deadline = time.monotonic() + timeout_s
    while True:
        # One log per life of a server, and that of the life before. It may quote data of failed tasks, hence private.
        with suppress(FileNotFoundError):
            _log_file(folder).replace(folder / "spark.log.1")
        _write_private(_log_file(folder), "")
        server = _launch(folder, java, cores, memory, java_options)
        try:
            # Written before it answers: if this process is killed, the next finds what it has started, and ends it.
            _write_private(_starting_file(folder), _as_json(server))
            _await_port(server, folder, deadline, log)
            _starting_file(folder).replace(_state_file(folder))
        except BaseException as error:
            _end(server, _STOP_S)
            _starting_file(folder).unlink(missing_ok=True)
            # Somebody took the port between our look and Spark's bind.
            if isinstance(error, SparkServerError) and "java.net.BindException" in str(error):
                continue
            raise
        finally:
            _properties_file(folder).unlink(missing_ok=True)
        return server


def _launch(folder: Path, java: Path, cores: int, memory: str, java_options: str) -> SparkServer:
    port, token = _free_port(), secrets.token_hex(32)
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
        "spark.driver.extraJavaOptions": java_options,
    }
    # The token goes by this file: arguments show in the process list, variables in every worker.
    properties = _properties_file(folder)
    _write_private(properties, "".join(f"{name}={_escaped(value)}\n" for name, value in settings.items()))
    # Left over from a client in this process, these would make a client of the server; and another Spark's
    # configuration folder is not ours.
    foreign = {"SPARK_REMOTE", "SPARK_LOCAL_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "SPARK_CONF_DIR"}
    environment = {name: value for name, value in os.environ.items() if name not in foreign}
    environment |= engine.interpreters() | {"JAVA_HOME": str(java)}
    submit = Path(environment["SPARK_HOME"]) / "bin" / "spark-submit"
    reading, writing = os.pipe()
    with open(reading, "rb") as said, open(writing, "wb") as saying:
        log = [sys.executable, "-I", bounded_log.__file__, str(_log_file(folder)), str(_LOG_BYTES)]
        detach(log, folder, stdin=said)
        server = [str(submit), "--properties-file", str(properties), "--class", _SERVER, "spark-internal"]
        # What Spark writes into its working directory (uploaded code) belongs here too.
        pid = detach(server, folder, output=saying, env=environment)
    now = datetime.now(UTC).isoformat()
    return SparkServer(pid, born(pid) or "", port, token, now, str(java), cores, memory)


def _await_port(server: SparkServer, folder: Path, deadline: float, log: Callable[[str], None]) -> None:
    began = said = moved = time.monotonic()
    state: object = None
    while server.lives:
        with suppress(OSError), socket.create_connection(("127.0.0.1", server.port), timeout=1):
            return
        now, seen = time.monotonic(), (worked(server.pid), log_tail(folder))
        if seen != state:
            state, moved = seen, now
        waits = f"the Spark server (process {server.pid}) does not answer after {now - began:.0f} s"
        if now > deadline:
            raise _not_started(f"{waits}; give it a longer --timeout (timeout_s)", folder)
        if now - moved > _STALLED_S:
            raise _not_started(f"{waits} and has done nothing for {_STALLED_S:.0f} s", folder)
        if now - said > _SAY_EACH_S:
            log(f"{waits} but works; waiting for {deadline - now:.0f} s more at most. Its log is {_log_file(folder)}")
            said = now
        time.sleep(_POLL_S)
    raise _not_started(f"the Spark server died while starting on {server.java}", folder)


def _not_started(why: str, folder: Path) -> SparkServerError:
    return SparkServerError(f"{why}. Its log {_log_file(folder)} ends with:\n{log_tail(folder)}")


def _end(server: SparkServer, patience_s: float) -> None:
    """Ask the process to end, make it after a while, and touch no other that has its id by now."""
    if not server.lives:
        return
    with suppress(ProcessLookupError):
        # What `_launch` started and nothing else: while starting, Spark's script has children, which may end later.
        group = os.getpgid(server.pid)
        for sent in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(group, sent)
            deadline = time.monotonic() + patience_s
            while time.monotonic() < deadline:
                if not group_lives(group):
                    return
                time.sleep(_POLL_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    ignore = folder / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n")  # as other tools' caches do: nobody should commit a token


def _sweep(folder: Path) -> None:
    """Remove what a killed server could not; end one whose starter was killed before it answered."""
    if half_started := _known(_starting_file(folder)):
        _end(half_started, _STOP_S)
    _starting_file(folder).unlink(missing_ok=True)
    for leftover in ("scratch", "artifacts", "spark-warehouse"):
        shutil.rmtree(folder / leftover, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with open(folder / "spark.lock", "a", opener=_private) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go when the file is closed, also by death
        yield


def _known(file: Path) -> SparkServer | None:
    """The server that a file tells of, dead or alive."""
    try:
        return SparkServer(**json.loads(file.read_text()))
    except (FileNotFoundError, ValueError, TypeError):  # never started, or written by another version
        return None


def _as_json(server: SparkServer) -> str:
    return json.dumps(asdict(server), indent=2)


def _write_private(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(aside, "w", opener=_private) as file:
        file.write(text)
    aside.replace(path)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n")


def _state_file(folder: Path) -> Path:
    return folder / "spark.json"


def _starting_file(folder: Path) -> Path:
    return folder / "spark.starting.json"


def _log_file(folder: Path) -> Path:
    return folder / "spark.log"


def _properties_file(folder: Path) -> Path:
    return folder / "spark.properties"
