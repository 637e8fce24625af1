"""A Google Cloud Pub/Sub server for tests and the demo: Google's own `pstest`, in the small Go program of `pubsub/`.

It keeps everything in memory and checks no credentials. Clients find it by `PUBSUB_EMULATOR_HOST`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from pipeline_platform.connectors.pubsub.google_cloud import connected
from servers.server import Server, ServerError, in_memory

PROJECT = "local"
"""A project's name that will do; the server knows any."""
_GO = "1.24.13"
_INSTALL_S = 600
_PROGRAM = Path(__file__).with_suffix("")


def missing() -> str | None:
    """Say what this machine lacks to run the server, or None."""
    if shutil.which("go"):
        return None
    return "go not found on PATH; on Debian: apt-get install --no-install-recommends golang-go"


@contextmanager
def serve(folder: Path) -> Iterator[Server]:
    """Run a server on loopback until the block ends, or this process does; yield it.

    Concurrent callers share `folder`, where the server is installed.

    Raises:
        ServerError: Go is missing, or the server cannot be built or does not start.
    """
    if lack := missing():
        raise ServerError(f"no Pub/Sub server: {lack}")
    with in_memory([str(install(folder))]) as server:
        yield server


def install(folder: Path) -> Path:
    """Build the program, once for all callers, and return it.

    Raises:
        ServerError: Go fails.
    """
    source = b"".join((_PROGRAM / name).read_bytes() for name in ("main.go", "go.sum"))
    program = (folder / f"pubsub-{hashlib.sha256(source).hexdigest()[:12]}" / "pubsub").resolve()
    program.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(program.parent / "lock"):
        if not program.exists():
            aside = program.with_name("built")
            _run(_PROGRAM, _go(program.parent), "build", "-buildvcs=false", "-o", str(aside), ".")
            aside.replace(program)
    return program


def _go(elsewhere: Path) -> str:
    """Return a Go that can build the program.

    Since 1.21 Go fetches the release that a program asks for. Debian 12's is older: it fetches one as a module,
    `elsewhere`: it cannot read the program's go.mod.
    """
    version, system, machine = _run(elsewhere, "go", "env", "GOVERSION", "GOOS", "GOARCH").split()
    known = re.match(r"go1\.(\d+)", version)
    if known is None or int(known[1]) >= 21:
        return "go"
    module = f"golang.org/toolchain@v0.0.1-go{_GO}.{system}-{machine}"
    home = Path(json.loads(_run(elsewhere, "go", "mod", "download", "-json", module))["Dir"])
    for program in (*home.glob("bin/*"), *home.glob("pkg/tool/*/*")):
        program.chmod(0o755)  # modules come without
    return str(home / "bin" / "go")


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(  # noqa: S603
        command, cwd=folder, capture_output=True, text=True, timeout=_INSTALL_S, check=False
    )
    if done.returncode:
        raise ServerError(f"{' '.join(command[:2])} failed for the Pub/Sub server: {done.stderr[-1_000:]}")
    return done.stdout


def subscribe(address: str, name: str, deadline_s: int = 600) -> str:
    """Create a topic of a local server with a subscription of the same name; return the subscription's full name."""
    from google.pubsub_v1 import PublisherClient, SubscriberClient

    topic, subscription = f"projects/{PROJECT}/topics/{name}", f"projects/{PROJECT}/subscriptions/{name}"
    with connected(PublisherClient, address) as publisher, connected(SubscriberClient, address) as subscriber:
        publisher.create_topic(name=topic)
        subscriber.create_subscription(
            request={"name": subscription, "topic": topic, "ack_deadline_seconds": deadline_s}
        )
    return subscription
