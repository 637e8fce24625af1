"""An SQS server for tests and the demo, and a fast way to fill its queues.

The server is npm's fauxqs, run by `sqs.mjs`. It delivers and deletes thousands of messages per second from the demo's
336,776, while Moto's server stops beyond about 1,000 messages. It supports only the JSON protocol, like boto3, keeps
everything in memory and checks no credentials.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from servers import npm
from servers.server import Server, ServerError

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient

_LOCKED = Path(__file__).parent / "fauxqs"
FAUXQS = npm.version(_LOCKED)
REGION = "us-east-1"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local", "AWS_DEFAULT_REGION": REGION}
"""Variables that boto3 requires; the local server ignores them."""

missing = npm.missing
install = partial(npm.install, locked=_LOCKED)


def serve(folder: Path) -> AbstractContextManager[Server]:
    """Return a context that runs the server, see `npm.serve`."""
    return npm.serve(folder, _LOCKED, Path(__file__).with_suffix(".mjs"))


@cache
def client(endpoint: str) -> SQSClient:
    """Return a client of a local server, independent of this machine's AWS settings. Its creation takes 65 ms."""
    import boto3

    return boto3.Session("local", "local", region_name=REGION).client("sqs", endpoint_url=endpoint)


def create_queue(endpoint: str, name: str, **attributes: str) -> str:
    """Create a queue with attributes of SQS, and return its URL."""
    return client(endpoint).create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]  # type: ignore[arg-type]


def fill(queue_url: str, payloads: Iterable[str | bytes]) -> int:
    """Send payloads of up to 100 kB each to a queue of a local server; return their number.

    Raises:
        ServerError: The server refused payloads; the message contains the first refusal.
    """
    bodies = [payload if isinstance(payload, str) else payload.decode() for payload in payloads]
    sqs = client("http://" + urlsplit(queue_url).netloc)

    def send(first: int) -> None:
        ten = [{"Id": str(i), "MessageBody": body} for i, body in enumerate(bodies[first : first + 10])]
        refused = sqs.send_message_batch(QueueUrl=queue_url, Entries=ten).get("Failed", [])  # type: ignore[arg-type]
        if refused:
            raise ServerError(f"the SQS server refused {len(refused)} payloads, the first with {refused[0]}")

    with ThreadPoolExecutor(2) as pool:  # two parallel calls keep the server busy
        list(pool.map(send, range(0, len(bodies), 10)))
    return len(bodies)
