"""An S3 server for tests: versitygw, which stores objects as files and supports `If-None-Match` for commits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from servers import go
from servers.server import Program, free_ports
from servers.sqs import ENVIRONMENT, REGION

VERSITYGW = "1.8.0"
BUCKET = "lake"
"""Bucket that exists at the start. It belongs to the user of `ENVIRONMENT`, like buckets that clients create."""

missing = go.missing


class S3(Program):
    """A server that logs one line per request."""

    def requests(self) -> list[str]:
        """Return all requests so far, as `GET /lake/key query`, with `-` for an empty query."""
        lines = (line.split(" | ") for line in self.said().splitlines() if " | vgw | " in line)
        return [f"{fields[5].strip()} {fields[6].strip()} {fields[-1].strip()}" for fields in lines]


@contextmanager
def serve(folder: Path) -> Iterator[S3]:
    """Run a server on loopback until the block or this process ends; yield it. Its address is an endpoint.

    Concurrent callers share `folder`, where the server is installed.

    Raises:
        ServerError: Go is missing, or the server cannot be built or does not start.
    """
    program = install(folder)
    with tempfile.TemporaryDirectory(prefix="s3-", ignore_cleanup_errors=True) as made:
        for name in (f"objects/{BUCKET}", "metadata"):
            (Path(made) / name).mkdir(parents=True)
        (port,) = free_ports(1)
        at = ["--port", f"127.0.0.1:{port}", "--region", REGION]
        login = {
            "ROOT_ACCESS_KEY_ID": ENVIRONMENT["AWS_ACCESS_KEY_ID"],
            "ROOT_SECRET_ACCESS_KEY": ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
        }
        command = [str(program), *at, "posix", "--sidecar", f"{made}/metadata", f"{made}/objects"]
        server = S3(f"http://127.0.0.1:{port}", command, Path(made), "service listening on", login)
        with server.running():
            yield server


def install(folder: Path) -> Path:
    """Build the server, once for all callers, and return its path.

    Raises:
        ServerError: Go is missing, or fails.
    """
    home = (folder / f"versitygw-{VERSITYGW}").resolve()
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / "lock"):
        if not (home / "versitygw").exists():
            what = f"github.com/versity/versitygw/cmd/versitygw@v{VERSITYGW}"
            go.run(home, "install", "-ldflags=-s -w", what, GOBIN=str(home))
    return home / "versitygw"
