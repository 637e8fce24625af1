"""A NATS server with JetStream for tests: the system's binary, started without its service."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servers.server import Program, ServerError, free_ports


def missing() -> str | None:
    """Return what is missing to run the server, or None."""
    if shutil.which("nats-server"):
        return None
    return "nats-server not found; on Debian: apt-get install --no-install-recommends nats-server"


@contextmanager
def serve(_folder: Path) -> Iterator[Program]:
    """Run a server on loopback until the block or this process ends; yield it.

    Raises:
        ServerError: NATS is not installed, or does not start.
    """
    if lack := missing():
        raise ServerError(f"no NATS server: {lack}")
    with tempfile.TemporaryDirectory(prefix="nats-", ignore_cleanup_errors=True) as made:
        (port,) = free_ports(1)
        command = ["nats-server", "--addr", "127.0.0.1", "--port", str(port), "--jetstream", "--store_dir", made]
        server = Program(f"nats://127.0.0.1:{port}", command, Path(made), "Server is ready", {})
        with server.running():
            yield server
