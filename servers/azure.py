"""An Azure Blob Storage server for tests: npm's Azurite. It has one account, and no hierarchical namespace."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.fs as pafs

from servers import npm
from servers.server import Program, free_ports

ACCOUNT = "local"
KEY = "bG9jYWw="
"""The account's key, which the server gets at its start."""
CONTAINER = "lake"
"""Container that exists at the start."""

missing = npm.missing


@contextmanager
def serve(folder: Path) -> Iterator[Program]:
    """Run a server on loopback until the block or this process ends; yield it. Its address is the account's endpoint.

    Concurrent callers share `folder`, where the server is installed.

    Raises:
        ServerError: Node is missing, or the server cannot be installed or does not start.
    """
    program = install(folder)
    with tempfile.TemporaryDirectory(prefix="azure-", ignore_cleanup_errors=True) as made:
        (port,) = free_ports(1)
        at = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", made]
        lenient = ["--skipApiVersionCheck", "--loose", "--disableTelemetry", "--disableProductStyleUrl", "--silent"]
        command = ["node", str(program), *at, *lenient]
        ready, login = "successfully listens on", {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
        server = Program(f"http://127.0.0.1:{port}/{ACCOUNT}", command, Path(made), ready, login)
        with server.running():
            here = {f"{service}_storage_authority": f"127.0.0.1:{port}" for service in ("blob", "dfs")}
            plain = {f"{service}_storage_scheme": "http" for service in ("blob", "dfs")}
            pafs.AzureFileSystem(ACCOUNT, account_key=KEY, **here, **plain).create_dir(CONTAINER)
            yield server


def install(folder: Path) -> Path:
    """Install Azurite, once for all callers, and return its program.

    Raises:
        ServerError: npm fails.
    """
    return npm.install(folder, Path(__file__).parent / "azurite") / "dist" / "src" / "blob" / "main.js"
