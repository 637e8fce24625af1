"""A Kafka server for tests and the demo: one node that is broker and controller, installed with Maven.

Topics are not created automatically. For a short retention, set `retention.ms` and `segment.ms` of a topic: the server
applies them every second.
"""

from __future__ import annotations

import secrets
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from servers import maven
from servers.server import Program, Server, ServerError, free_ports

KAFKA, LOG4J = "4.4.0", "2.25.5"
_LIBRARIES = (
    f"org.apache.kafka:kafka_2.13:{KAFKA}",
    # Without it Kafka logs nothing, not even why it does not start.
    f"org.apache.logging.log4j:log4j-slf4j-impl:{LOG4J}",
)
_SETTINGS = """
process.roles=broker,controller
node.id=1
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
controller.listener.names=CONTROLLER
controller.quorum.voters=1@127.0.0.1:{controller}
log.dirs={folder}/data
auto.create.topics.enable=false

# Kafka's own topics, small and on one node.
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=1

# Short delays, so that tests do not wait.
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
log.initial.task.delay.ms=1000
log.retention.check.interval.ms=1000
log.segment.delete.delay.ms=1000
log.cleaner.backoff.ms=1000

# Little memory and small files.
num.network.threads=2
num.io.threads=2
log.cleaner.dedupe.buffer.size=4194304
log.index.size.max.bytes=1048576
"""
_LOGIN = """
listener.security.protocol.map=PLAINTEXT:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT
sasl.enabled.mechanisms=PLAIN
sasl.mechanism.inter.broker.protocol=PLAIN
listener.name.plaintext.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \\
  username="broker" password="{password}" user_broker="{password}" {users};
"""
"""Settings for a server whose clients log in."""
_JVM = ["-Xms64m", "-Xmx320m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dlog4j2.level=INFO"]


missing = maven.missing


@contextmanager
def serve(folder: Path, users: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Run a server on loopback until the block or this process ends; yield it.

    Args:
        folder: Installation folder; concurrent callers share it.
        users: Passwords by user, for SASL/PLAIN; None if clients need not log in.

    Raises:
        ServerError: Maven or Java is missing, or the server cannot be installed or does not start.
    """
    if lack := missing():
        raise ServerError(f"no Kafka server: {lack}")
    run = install(folder)
    with tempfile.TemporaryDirectory(prefix="kafka-", ignore_cleanup_errors=True) as made:
        port, controller = free_ports(2)
        settings = Path(made) / "server.properties"
        text = _SETTINGS.format(port=port, controller=controller, folder=made)
        if users is not None:
            known = " ".join(f'user_{name}="{password}"' for name, password in users.items())
            text += _LOGIN.format(password=secrets.token_urlsafe(16), users=known)
        settings.write_text(text)
        _format(run, settings)
        server = Program(
            f"127.0.0.1:{port}", [*run, "kafka.Kafka", str(settings)], Path(made), "Kafka Server started", {}
        )
        with server.running():
            yield server


def install(folder: Path) -> list[str]:
    """Install the server, once for all callers, and return the command that runs one of its classes.

    Raises:
        ServerError: Java is missing, or Maven fails.
    """
    java, *libraries = maven.install(folder / f"kafka-{KAFKA}", _LIBRARIES)
    return [java, *_JVM, *libraries]


def _format(run: list[str], settings: Path) -> None:
    """Format the data folder, which Kafka requires before its first start."""
    cluster = f"--cluster-id={secrets.token_urlsafe(16)}"
    command = [*run, "kafka.tools.StorageTool", "format", cluster, "--config", str(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
    if done.returncode:
        raise ServerError(f"Kafka cannot prepare its folder: {(done.stdout + done.stderr)[-2_000:]}")
