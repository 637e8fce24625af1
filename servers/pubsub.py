"""A Google Cloud Pub/Sub server for tests and the demo: Google's own `pstest`, in the small Go program of `pubsub/`.

It keeps everything in memory and checks no credentials. Clients find it by `PUBSUB_EMULATOR_HOST`. Unlike Pub/Sub, it
drops messages without a lease ten minutes after they were sent: use shorter leases in tests that kill processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from pipeline_platform.connectors.pubsub.google_cloud import connected
from servers import go
from servers.server import Server, ServerError, in_memory

PROJECT = "local"
"""Name of a project; the server accepts any name."""
_PROGRAM = Path(__file__).with_suffix("")

missing = go.missing


@contextmanager
def serve(folder: Path) -> Iterator[Server]:
    """Run a server on loopback until the block or this process ends; yield it.

    Concurrent callers share `folder`, where the server is installed.

    Raises:
        ServerError: Go is missing, or the server cannot be built or does not start.
    """
    if lack := missing():
        raise ServerError(f"no Pub/Sub server: {lack}")
    with in_memory([str(install(folder))]) as server:
        yield server


def install(folder: Path) -> Path:
    """Build the program, once for all callers, and return its path.

    Raises:
        ServerError: Go fails.
    """
    source = b"".join((_PROGRAM / name).read_bytes() for name in ("main.go", "go.sum"))
    program = (folder / f"pubsub-{hashlib.sha256(source).hexdigest()[:12]}" / "pubsub").resolve()
    program.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(program.parent / "lock"):
        if not program.exists():
            aside = program.with_name("built")
            go.run(_PROGRAM, "build", "-buildvcs=false", "-o", str(aside), ".")
            aside.replace(program)
    return program


def subscribe(address: str, name: str, deadline_s: int = 600) -> str:
    """Create a topic and a subscription of the same name on a local server; return the subscription's full name."""
    from google.pubsub_v1 import PublisherClient, SubscriberClient

    topic, subscription = f"projects/{PROJECT}/topics/{name}", f"projects/{PROJECT}/subscriptions/{name}"
    with connected(PublisherClient, address) as publisher, connected(SubscriberClient, address) as subscriber:
        publisher.create_topic(name=topic)
        subscriber.create_subscription(
            request={"name": subscription, "topic": topic, "ack_deadline_seconds": deadline_s}
        )
    return subscription
