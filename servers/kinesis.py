"""A Kinesis server for tests and the demo: npm's kinesis-local, run by `kinesis.cjs`.

It splits and merges shards, and answers with `MillisBehindLatest`. It keeps everything in memory, deletes no messages
by their age, and checks neither credentials nor the limits of a shard.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import Any

from servers import npm
from servers.server import Server, ServerError, free_ports
from servers.sqs import ENVIRONMENT, REGION

_LOCKED = Path(__file__).parent / "kinesis-local"
KINESIS_LOCAL = npm.version(_LOCKED)
_ACTIVE_S = 30

missing = npm.missing
install = partial(npm.install, locked=_LOCKED)


def serve(folder: Path) -> AbstractContextManager[Server]:
    """Return a context that runs the server, see `npm.serve`."""
    return npm.serve(folder, _LOCKED, Path(__file__).with_suffix(".cjs"), *free_ports(2))


@cache
def client(endpoint: str) -> Any:
    """Return a client of a local server, independent of this machine's AWS settings."""
    import boto3

    return boto3.Session("local", "local", region_name=REGION).client("kinesis", endpoint_url=endpoint)


def create_stream(endpoint: str, name: str, shards: int = 1) -> str:
    """Create a stream, wait until it is active, and return its name."""
    client(endpoint).create_stream(StreamName=name, ShardCount=shards)
    return wait_until_active(endpoint, name)


def wait_until_active(endpoint: str, name: str) -> str:
    """Wait until a stream is created, or its shards are split or merged; return its name.

    Raises:
        ServerError: This takes longer than half a minute.
    """
    end = time.monotonic() + _ACTIVE_S
    while time.monotonic() < end:
        summary = client(endpoint).describe_stream_summary(StreamName=name)["StreamDescriptionSummary"]
        if summary["StreamStatus"] == "ACTIVE":
            return name
        time.sleep(0.02)
    raise ServerError(f"stream {name} is not active after {_ACTIVE_S} s")


__all__ = ["ENVIRONMENT", "REGION", "client", "create_stream", "install", "missing", "serve", "wait_until_active"]
