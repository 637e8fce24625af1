"""A real SQS server for tests, started once a session, and queues on it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from pipelines.local_servers import sqs


@pytest.fixture(scope="session")
def servers_folder() -> Path:
    """Where servers are installed, once for all sessions."""
    return Path(os.environ.get("PIPELINE_SERVERS", Path(__file__).parent.parent / ".servers"))


@pytest.fixture(scope="session")
def sqs_server(servers_folder: Path) -> Iterator[sqs.Server]:
    """A server of its own for the session; a machine without Node skips, CI does not."""
    if lack := sqs.missing():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"no SQS server: {lack}")
    server = sqs.start(servers_folder)
    yield server
    sqs.stop(server)


@pytest.fixture
def sqs_queue(sqs_server: sqs.Server, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Create queues of that server, given attributes by SQS's names; their clients find credentials."""
    for name, value in sqs.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)

    def create(**attributes: str) -> str:
        suffix = ".fifo" if attributes.get("FifoQueue") == "true" else ""
        return sqs.create_queue(sqs_server, f"queue-{uuid4().hex[:8]}{suffix}", **attributes)

    return create
