"""A PostgreSQL server for tests: the machine's own binaries, a free loopback port, a temporary folder."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

_STARTED_S = 30
_DEBIAN = "/usr/lib/postgresql"


class Postgres(NamedTuple):
    """A running server, reached by password on loopback."""

    port: int
    password: str

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://tests:{self.password}@127.0.0.1:{self.port}/{database}"


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A server for the whole session; skipped where PostgreSQL is not installed, but never in CI."""
    binaries = _binaries()
    if binaries is None:
        reason = "PostgreSQL's server binaries (initdb, postgres) are not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason}; CI has to run these tests")
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))
    try:
        password = secrets.token_hex(8)
        run_as = _unprivileged(folder)
        _initialize(binaries, folder, password, run_as)
        # Another process may take the port between its choice and its use.
        for _ in range(3):
            port = _free_port()
            process = _start(binaries, folder, port, run_as)
            try:
                if _accepts(process, port):
                    yield Postgres(port, password)
                    return
            finally:
                _stop(process)
        pytest.fail(f"PostgreSQL does not start:\n{(folder / 'log').read_text()[-2_000:]}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_url(postgres: Postgres) -> Iterator[str]:
    """URL of a database of this test alone."""
    import psycopg

    name = f"test_{secrets.token_hex(6)}"
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")  # type: ignore[call-overload,unused-ignore]
    yield postgres.url(name)
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")  # type: ignore[call-overload,unused-ignore]


def _binaries() -> Path | None:
    found = shutil.which("initdb")
    if found:
        return Path(found).parent
    versions = [path.parent for path in Path(_DEBIAN).glob("*/bin/initdb")]
    return max(versions, key=lambda path: float(path.parent.name), default=None)


def _unprivileged(folder: Path) -> dict[str, Any]:
    """Say as whom to run: PostgreSQL refuses to run as root."""
    if os.getuid() != 0:
        return {}
    import pwd

    try:
        user = pwd.getpwnam("postgres")
    except KeyError:
        user = pwd.getpwnam("nobody")
    os.chown(folder, user.pw_uid, user.pw_gid)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _initialize(binaries: Path, folder: Path, password: str, run_as: dict[str, Any]) -> None:
    secret = folder / "password"
    secret.write_text(password)
    if run_as:
        os.chown(secret, run_as["user"], run_as["group"])
    done = subprocess.run(
        [
            *(str(binaries / "initdb"), "--pgdata", str(folder / "data"), "--username", "tests"),
            *("--pwfile", str(secret), "--auth", "scram-sha-256", "--no-sync", "--encoding", "UTF8", "--locale", "C"),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        **run_as,
    )
    assert done.returncode == 0, f"initdb failed:\n{done.stdout}\n{done.stderr}"


def _start(binaries: Path, folder: Path, port: int, run_as: dict[str, Any]) -> subprocess.Popen[bytes]:
    settings = {
        "listen_addresses": "127.0.0.1",
        "port": port,
        "unix_socket_directories": "",
        "fsync": "off",
        "max_connections": 100,
        "shared_buffers": "32MB",
    }
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [str(binaries / "postgres"), "-D", str(folder / "data"), *options],
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,  # an interrupted test run stops it in order, not by the terminal's signal
            **run_as,
        )


def _accepts(process: subprocess.Popen[bytes], port: int) -> bool:
    end = time.monotonic() + _STARTED_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                # Somebody listens; it is ours if ours did not give up for want of the port.
                time.sleep(0.2)
                return process.poll() is None
        except OSError:
            time.sleep(0.05)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)  # "fast": does not wait for clients
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
