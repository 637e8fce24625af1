"""An S3 server for tests: versitygw keeps objects as files, and `If-None-Match`, by which tables are committed to."""

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
"""The bucket that is there; it belongs to `ENVIRONMENT`, as whatever clients make."""

missing = go.missing


class S3(Program):
    """A server that says one line for each request."""

    def requests(self) -> list[str]:
        """The requests up to now, as `GET /lake/key query`; a query is `-` where there is none."""
        said = (line.split(" | ") for line in self.said().splitlines() if " | vgw | " in line)
        return [f"{one[5].strip()} {one[6].strip()} {one[-1].strip()}" for one in said]


@contextmanager
def serve(folder: Path) -> Iterator[S3]:
    """Run a server on loopback until the block ends, or this process does; yield it, its address an endpoint.

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
    """Build the server, once for all callers, and return the program.

    Raises:
        ServerError: There is no Go, or it fails.
    """
    home = (folder / f"versitygw-{VERSITYGW}").resolve()
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / "lock"):
        if not (home / "versitygw").exists():
            what = f"github.com/versity/versitygw/cmd/versitygw@v{VERSITYGW}"
            go.run(home, "install", "-ldflags=-s -w", what, GOBIN=str(home))
    return home / "versitygw"
