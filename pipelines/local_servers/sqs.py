"""An SQS server for tests and the demo, and a fast way to fill its queues.

It is npm's fauxqs, run by `sqs.mjs`. Moto's own server stands still beyond about 1,000 waiting messages;
this one holds the demo's 336,776 and hands out and deletes thousands a second. It speaks the JSON protocol
alone, as boto3 does, keeps everything in memory and checks no credentials.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pipeline_platform.process import born

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient
    from mypy_boto3_sqs.type_defs import SendMessageBatchRequestEntryTypeDef

FAUXQS = "2.4.1"
REGION = "us-east-1"

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "local",
    "AWS_SECRET_ACCESS_KEY": "local",
    "AWS_DEFAULT_REGION": REGION,
}
"""What boto3 wants to be told of any server; the local one looks at none of it."""

_INSTALL_S = 300
_START_S = 30
_STOP_S = 10


class ServerError(Exception):
    """The local server cannot be installed or started: the message says why, and what to do."""


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        url: Its endpoint, `http://127.0.0.1:<port>`.
        pid: Of its process.
    """

    url: str
    pid: int
    _process: subprocess.Popen[str] | None = field(default=None, repr=False, compare=False)


def missing() -> str | None:
    """Say what this machine lacks to run the server, or None."""
    lacks = [program for program in ("node", "npm") if shutil.which(program) is None]
    return f"{' and '.join(lacks)} not found on PATH; install Node 20 or newer" if lacks else None


def start(folder: Path, *, port: int = 0, detached: bool = False) -> Server:
    """Start a server on loopback, installing it into `folder` where it is not there yet.

    Args:
        folder: Where installed servers are kept; made if missing, shared by concurrent callers.
        port: Where to listen, 0 for a free port.
        detached: Let it outlive this process. Otherwise it ends with it, however it ends.

    Raises:
        ServerError: Node is missing, or the server cannot be installed or does not start.
    """
    if lack := missing():
        raise ServerError(lack)
    package = _install(folder)
    process = subprocess.Popen(  # noqa: S603
        ["node", str(Path(__file__).with_suffix(".mjs")), str(package), str(port), *(["stay"] if detached else [])],  # noqa: S607
        stdin=subprocess.DEVNULL if detached else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(log := (folder / "sqs.log").open("w")),
        start_new_session=True,  # a Ctrl-C is for whoever started it, who ends it in order
        text=True,
    )
    log.close()
    assert process.stdout is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], _START_S)
        said = process.stdout.readline().strip() if ready else ""
        if not said:
            raise ServerError(
                f"the SQS server did not start within {_START_S} s; its last words:\n"
                f"{(folder / 'sqs.log').read_text()[-2_000:]}"
            )
    except BaseException:  # Ctrl-C, too: nobody would know of a detached server
        process.kill()
        process.wait()
        raise
    return Server(f"http://127.0.0.1:{said}", process.pid, process)


def stop(server: Server) -> None:
    """End a server and wait until it has ended; nothing happens if it has."""
    if server._process is None:
        was = born(server.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        while was and born(server.pid) == was and time.monotonic() < deadline:
            time.sleep(0.02)
        return
    server._process.terminate()
    try:
        server._process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        server._process.kill()
        server._process.wait()
    for pipe in (server._process.stdin, server._process.stdout):
        if pipe is not None:
            pipe.close()


def client(endpoint_url: str) -> SQSClient:
    """Make a client of a local server, free of whatever AWS settings this machine has."""
    import boto3
    from botocore.config import Config

    session = boto3.session.Session(
        aws_access_key_id=ENVIRONMENT["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
        region_name=REGION,
    )
    return session.client("sqs", endpoint_url=endpoint_url, config=Config(retries={"mode": "standard"}))


def create_queue(server: Server, name: str, **attributes: str) -> str:
    """Create a queue, with attributes by SQS's names, and return its URL."""
    created = client(server.url).create_queue(QueueName=name, Attributes=attributes)  # type: ignore[arg-type]
    return created["QueueUrl"]


def fill(queue_url: str, payloads: Iterable[str | bytes], *, threads: int = 2) -> int:
    """Send payloads to a queue of a local server, ten a call, and return how many.

    Args:
        queue_url: As `create_queue` returned it; the server is found by it.
        payloads: Message bodies, each up to 100 kB so that ten fit in a call; bytes are UTF-8.
        threads: Calls under way at once. Two keep a local server busy.

    Raises:
        ServerError: The server refused some; it names the first.
    """
    address = urlsplit(queue_url)
    sqs = client(f"{address.scheme}://{address.netloc}")

    def send(bodies: list[str]) -> int:
        entries: list[SendMessageBatchRequestEntryTypeDef] = [
            {"Id": str(i), "MessageBody": body} for i, body in enumerate(bodies)
        ]
        refused = sqs.send_message_batch(QueueUrl=queue_url, Entries=entries).get("Failed", [])
        if refused:
            raise ServerError(f"{len(refused)} payloads refused, the first with {refused[0]}")
        return len(bodies)

    texts = (payload if isinstance(payload, str) else payload.decode() for payload in payloads)
    sent = 0
    with ThreadPoolExecutor(threads) as pool:
        # A few thousand at a time, so that a generator of any length is never held as a whole.
        while batch := list(islice(_by_ten(texts), 500)):
            sent += sum(pool.map(send, batch))
    return sent


def _by_ten(items: Iterator[str]) -> Iterator[list[str]]:
    while ten := list(islice(items, 10)):
        yield ten


def _install(folder: Path) -> Path:
    """Install fauxqs, once however many ask at the same time, and return its package folder."""
    home = folder / f"fauxqs-{FAUXQS}"
    package = home / "node_modules" / "fauxqs"
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (home / "installed").exists():
            return package
        (home / "package.json").write_text(json.dumps({"private": True, "dependencies": {"fauxqs": FAUXQS}}))
        began = time.monotonic()
        try:
            subprocess.run(
                # Its engines field asks for Node 22, for the persistence that sqs.mjs does without.
                ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--engine-strict=false"],  # noqa: S607
                cwd=home,
                check=True,
                capture_output=True,
                text=True,
                timeout=_INSTALL_S,
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            told = (error.stderr or "").strip()[-1_000:] if isinstance(error.stderr, str) else ""
            raise ServerError(
                f"npm could not install fauxqs {FAUXQS} into {home} within {time.monotonic() - began:.0f} s: {told}"
            ) from error
        (home / "installed").touch()
    return package
