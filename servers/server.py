"""What all local servers have in common: an address, an end with this process, and a stop that keeps the data."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

_GUARD = Path(__file__).with_name("guard.py")
_STARTED_S, _STOPPED_S = 120, 30


class ServerError(Exception):
    """A server cannot be had; the message says why, and what to do."""


class Server(Protocol):
    """A server that runs; a test of faults stops it and starts it again, on the same port and with its data."""

    @property
    def address(self) -> str:
        """What clients connect to, as their library writes it."""

    def stop(self) -> None:
        """Stop the server in order: what it confirmed is safe."""

    def start(self) -> None:
        """Start the server again; it is ready when this returns."""


class Program:
    """A server that keeps its data in a folder, and itself knows no starter: `guard.py` runs it.

    Args:
        address: What clients connect to.
        command: What runs the server in the foreground.
        folder: Working directory; what the server says is in its `log`.
        ready: What the server says once it is ready.
        environment: Variables on top of this process's own.
    """

    def __init__(
        self, address: str, command: Sequence[str], folder: Path, ready: str, environment: Mapping[str, str]
    ) -> None:
        self.address, self._command, self._ready = address, command, ready
        self.folder, self._log, self.environment = folder, folder / "log", {**os.environ, **environment}
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, if it does not run; it is ready when this returns.

        Raises:
            ServerError: It ended, or was not ready in time; the message has its last words.
        """
        if self._guard is not None:
            return
        with self._log.open("ab") as log:
            before = log.tell()
            self._guard = subprocess.Popen(  # noqa: S603
                [sys.executable, "-I", "-S", str(_GUARD), *self._command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=self.environment,
                start_new_session=True,  # a Ctrl-C is for this process
            )
        end = time.monotonic() + _STARTED_S
        while self._ready not in (said := self._log.read_bytes()[before:].decode(errors="replace")):
            if self._guard.poll() is not None or time.monotonic() > end:
                self.kill()
                raise ServerError(f"{self._command[0]} does not start a server at {self.address}: {said[-2_000:]}")
            time.sleep(0.05)

    def said(self) -> str:
        """What the server has said, since its first start."""
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """Stop the server in order, or kill it if that takes long; a stopped one stays as it is."""
        if self._guard is None:
            return
        _wire(self._guard).write(b"\n")
        _wire(self._guard).flush()
        try:
            self._guard.wait(_STOPPED_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()

    def kill(self) -> None:
        """End the server at once, with all processes that it started."""
        if self._guard is not None:
            _wire(self._guard).close()
            self._guard.wait()
            self._guard = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the server until the block ends, or this process does."""
        try:
            self.start()
            yield
        finally:
            self.kill()


class InMemory:
    """A server that would lose what it holds: a stopped one answers nobody, and goes on where it was.

    Clients of a stopped server wait for an answer until their time-out; they are not refused.
    """

    def __init__(self, address: str, process: subprocess.Popen[str]) -> None:
        self.address, self._process, self._is_halted = address, process, False

    def stop(self) -> None:
        """Halt the server; it answers nobody any more when this returns."""
        if not self._is_halted:
            self._process.send_signal(signal.SIGSTOP)
            os.waitpid(self._process.pid, os.WUNTRACED)
            self._is_halted = True

    def start(self) -> None:
        """Let the server go on."""
        self._process.send_signal(signal.SIGCONT)
        self._is_halted = False


@contextmanager
def in_memory(command: Sequence[str], scheme: str = "") -> Iterator[InMemory]:
    """Run a server that prints its port in one line and ends with its standard input, until the block ends.

    Raises:
        ServerError: It printed no port.
    """
    pipe = subprocess.PIPE
    # In a session of its own: a Ctrl-C is for this process. The kernel closes the pipe when this process dies.
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True, text=True) as process:  # noqa: S603
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port:
            raise ServerError(f"{Path(command[0]).name} did not start the server and said why above")
        server = InMemory(f"{scheme}127.0.0.1:{port}", process)
        try:
            yield server
        finally:
            server.start()  # a halted process would not see that its input ends


def free_ports(count: int) -> list[int]:
    """Choose loopback ports that a server keeps while it is stopped.

    They lie below those that the kernel gives to clients and to whoever asks for any port.
    """
    found: list[int] = []
    for port in random.sample(range(20_000, 32_000), 1_000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise ServerError("no free port between 20000 and 32000 on loopback")


def _wire(guard: subprocess.Popen[bytes]) -> IO[bytes]:
    assert guard.stdin is not None
    return guard.stdin
