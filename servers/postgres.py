"""A PostgreSQL server for tests and the demo: the system's binaries, started without its service.

The user is `local`, a superuser with a random password for each start. Fsync is off: confirmed data survives a crash of
the server, but not of the machine.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servers.server import Program, Server, ServerError, free_ports

_DEBIAN = "/usr/lib/postgresql"
_SETTINGS = """
listen_addresses = '127.0.0.1'
port = {port}
unix_socket_directories = ''
fsync = off
max_connections = 200
"""
# On SIGTERM PostgreSQL waits for its clients; on SIGINT it ends their sessions.
_WITHOUT_WAITING = '"$0" "$@" & server=$!; trap "kill -INT $server" TERM; wait; wait'


def missing() -> str | None:
    """Return what is missing to run the server, or None."""
    return None if _binaries() else "initdb and postgres not found; on Debian: apt-get install postgresql"


@contextmanager
def serve(_folder: Path) -> Iterator[Server]:
    """Run a server on loopback until the block or this process ends; yield it. Its address is a URL.

    Raises:
        ServerError: PostgreSQL is not installed, or does not start.
    """
    binaries = _binaries()
    if binaries is None:
        raise ServerError(f"no PostgreSQL server: {missing()}")
    with tempfile.TemporaryDirectory(prefix="postgres-", ignore_cleanup_errors=True) as made:
        folder, password = Path(made), secrets.token_hex(8)
        unprivileged = _unprivileged(folder)
        (folder / "password").write_text(password)
        # Not SCRAM, which costs the client and the server thousands of hashes for each connection.
        options = ["--username=local", f"--pwfile={folder}/password", "--auth=md5", "--no-sync"]
        initialize = [str(binaries / "initdb"), f"--pgdata={folder}/data", *options, "--encoding=UTF8", "--locale=C"]
        done = subprocess.run([*unprivileged, *initialize], cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            raise ServerError(f"initdb failed: {(done.stdout + done.stderr)[-1_000:]}")
        (port,) = free_ports(1)
        with (folder / "data" / "postgresql.conf").open("a") as settings:
            settings.write(_SETTINGS.format(port=port))
        server = Program(
            f"postgresql://local:{password}@127.0.0.1:{port}/postgres",
            [*unprivileged, "sh", "-c", _WITHOUT_WAITING, str(binaries / "postgres"), "-D", f"{folder}/data"],
            folder,
            "ready to accept connections",
            {},
        )
        with server.running():
            yield server


def _binaries() -> Path | None:
    found = shutil.which("initdb")
    if found:
        return Path(found).parent
    versions = [path.parent for path in Path(_DEBIAN).glob("*/bin/initdb")]
    return max(versions, key=lambda path: float(path.parent.name), default=None)


def _unprivileged(folder: Path) -> list[str]:
    """Return the prefix of a command that root runs as another user, and give that user the folder.

    PostgreSQL refuses to run as root.
    """
    if os.getuid() != 0:
        return []
    import pwd

    try:
        user = pwd.getpwnam("postgres")
    except KeyError:
        user = pwd.getpwnam("nobody")
    os.chown(folder, user.pw_uid, user.pw_gid)
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
