"""A Redis server for tests: the system's binary, started without its service and without files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servers.server import Program, ServerError, free_ports


def missing() -> str | None:
    """Return what is missing to run the server, or None."""
    if shutil.which("redis-server"):
        return None
    return "redis-server not found; on Debian: apt-get install --no-install-recommends redis-server"


@contextmanager
def serve(_folder: Path) -> Iterator[Program]:
    """Run a server on loopback until the block or this process ends; yield it.

    Raises:
        ServerError: Redis is not installed, or does not start.
    """
    if lack := missing():
        raise ServerError(f"no Redis server: {lack}")
    with tempfile.TemporaryDirectory(prefix="redis-", ignore_cleanup_errors=True) as made:
        (port,) = free_ports(1)
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--dir", made, "--save", ""]
        server = Program(f"redis://127.0.0.1:{port}/0", command, Path(made), "Ready to accept connections", {})
        with server.running():
            yield server
