"""A RabbitMQ server for tests and the demo: the system's binaries, started without its service.

The user is `guest`, which RabbitMQ accepts on loopback only. The server has its own node, cookie, settings, data and
port mapper `epmd`, separate from the system's RabbitMQ. It has no plugins.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servers.server import Program, ServerError, free_ports

# Debian's command in PATH is a wrapper that runs the server as the service's user; the wrapped command is here.
_DEBIAN = Path("/usr/lib/rabbitmq/bin")
_SETTINGS = """
listeners.tcp.1 = 127.0.0.1:{port}
raft.wal_max_size_bytes = 33554432
"""


def missing() -> str | None:
    """Return what is missing to run the server, or None."""
    lacks = [name for name in ("rabbitmq-server", "epmd") if _program(name) is None]
    if not lacks:
        return None
    return f"{' and '.join(lacks)} not found; on Debian: apt-get install --no-install-recommends rabbitmq-server"


class RabbitMQ(Program):
    """A running server. Its address is a URL with user and password."""

    def ctl(self, *arguments: str) -> str:
        """Run `rabbitmqctl`, for commands that clients may not execute; return its output.

        Raises:
            ServerError: The command failed; the message contains the reason.
        """
        command = [_program("rabbitmqctl") or "rabbitmqctl", "--quiet", *arguments]
        done = subprocess.run(  # noqa: S603
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            raise ServerError(f"rabbitmqctl {arguments[0]} failed: {(done.stdout + done.stderr)[-1_000:]}")
        return done.stdout


@contextmanager
def serve(_folder: Path) -> Iterator[RabbitMQ]:
    """Run a server on loopback until the block or this process ends; yield it.

    Raises:
        ServerError: RabbitMQ is not installed, or does not start.
    """
    if lack := missing():
        raise ServerError(f"no RabbitMQ server: {lack}")
    with tempfile.TemporaryDirectory(prefix="rabbitmq-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        port, between_nodes, mapper = free_ports(3)
        (folder / "rabbitmq.conf").write_text(_SETTINGS.format(port=port))
        for empty in ("environment", "plugins"):
            (folder / empty).touch()
        environment = {
            "HOME": made,  # the cookie
            "ERL_EPMD_PORT": str(mapper),
            "RABBITMQ_NODENAME": "local@localhost",
            "RABBITMQ_DIST_PORT": str(between_nodes),
            "RABBITMQ_CONFIG_FILE": f"{made}/rabbitmq.conf",
            "RABBITMQ_CONF_ENV_FILE": f"{made}/environment",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{made}/plugins",
            "RABBITMQ_MNESIA_BASE": f"{made}/data",
            "RABBITMQ_LOG_BASE": f"{made}/logs",
            # Idle threads sleep at once instead of spinning.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                "+sbwt none +sbwtdcpu none +sbwtdio none -kernel inet_dist_use_interface {127,0,0,1}"
            ),
        }
        # An epmd that Erlang starts would survive the server.
        both = 'epmd -address 127.0.0.1 -port "$ERL_EPMD_PORT" & exec "$0"'
        server = RabbitMQ(
            f"amqp://guest:guest@127.0.0.1:{port}/%2F",
            ["sh", "-c", both, _program("rabbitmq-server") or ""],
            folder,
            " completed with ",
            environment,
        )
        with server.running():
            yield server


def _program(name: str) -> str | None:
    return shutil.which(name, path=str(_DEBIAN)) or shutil.which(name)
