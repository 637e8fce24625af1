"""Base classes of local servers, which end with this process and keep their data across a stop."""

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
    """A server is not available; the message contains the reason and the fix."""


class Server(Protocol):
    """A running server. Tests stop and start it again with the same port and data."""

    @property
    def address(self) -> str:
        """Address for clients, in the form of their library."""

    def stop(self) -> None:
        """Stop the server in order; confirmed data is safe."""

    def start(self) -> None:
        """Start the server again; it is ready when this returns."""


class Program:
    """A server with its data in a folder. `guard.py` runs it and ends it with this process.

    Args:
        address: Address for clients.
        command: Command that runs the server in the foreground.
        folder: Working directory, with the output of the server in the file `log`.
        ready: Text in the output that shows that the server is ready.
        environment: Environment variables in addition to those of this process.
    """

    def __init__(
        self, address: str, command: Sequence[str], folder: Path, ready: str, environment: Mapping[str, str]
    ) -> None:
        self.address, self._command, self._ready = address, command, ready
        self.folder, self._log, self.environment = folder, folder / "log", {**os.environ, **environment}
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server unless it runs; it is ready when this returns.

        Raises:
            ServerError: The server ended or was not ready in time; the message contains its last output.
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
                start_new_session=True,  # Ctrl-C goes to this process only
            )
        end = time.monotonic() + _STARTED_S
        while self._ready not in (said := self._log.read_bytes()[before:].decode(errors="replace")):
            if self._guard.poll() is not None or time.monotonic() > end:
                self.kill()
                raise ServerError(f"{self._command[0]} did not start a server at {self.address}: {said[-2_000:]}")
            time.sleep(0.05)

    def said(self) -> str:
        """Return the output of the server since its first start."""
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """Stop the server in order, or kill it if that takes too long."""
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
        """Run the server until the block or this process ends."""
        try:
            self.start()
            yield
        finally:
            self.kill()


class InMemory:
    """A server with its data in memory. A stop halts its process, which a start continues.

    Clients of a halted server are not refused: they wait until their timeout.
    """

    def __init__(self, address: str, process: subprocess.Popen[str]) -> None:
        self.address, self._process, self._is_halted = address, process, False

    def stop(self) -> None:
        """Halt the server; it does not answer any more when this returns."""
        if not self._is_halted:
            self._process.send_signal(signal.SIGSTOP)
            os.waitpid(self._process.pid, os.WUNTRACED)
            self._is_halted = True

    def start(self) -> None:
        """Continue the server."""
        self._process.send_signal(signal.SIGCONT)
        self._is_halted = False


@contextmanager
def in_memory(command: Sequence[str], scheme: str = "") -> Iterator[InMemory]:
    """Run a server that prints its port in one line and ends with its standard input, until the block ends.

    Raises:
        ServerError: The command printed no port.
    """
    pipe = subprocess.PIPE
    # A separate session, because Ctrl-C goes to this process only. The kernel closes the pipe when this process ends.
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True, text=True) as process:  # noqa: S603
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port:
            raise ServerError(f"{Path(command[0]).name} did not start the server; the reason is above")
        server = InMemory(f"{scheme}127.0.0.1:{port}", process)
        try:
            yield server
        finally:
            server.start()  # a halted process would not notice the end of its input


def free_ports(count: int) -> list[int]:
    """Return free loopback ports that stay free while a server is stopped.

    They are below the range from which the kernel assigns ports.
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
