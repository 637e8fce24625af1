"""What `docs/connect/pubsub.md` shows is run on a real server, and what it lists is there."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline_platform.connectors.pubsub import PubsubSource
from pipeline_platform.model.message import Message
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.tasks.handle.handle_messages import Handler
from tests.connectors.test_pubsub import received
from tests.fixtures.documents import deployed, source_of

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "connect" / "pubsub.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", DOCUMENT, re.S)


@pytest.fixture
def shown(subscribed: Callable[..., PubsubSource], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the document's Python defines where it says that it goes."""
    there = subscribed()
    there.send(
        [b'{"number": 1, "total": 9.5}', b'{"number": 2, "total": 1}', b'{"number": 3}'],
        [{"attributes": {"region": "north"}}, None, None],
    )
    monkeypatch.setenv("ORDERS_SUBSCRIPTION", there._path)
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", str(there.emulator_host))
    return deployed(BLOCKS)


def test_its_pipeline_handles_what_its_source_receives(shown: dict[str, Any]) -> None:
    source: PubsubSource = source_of(shown, "orders_subscription")
    (share,) = source.plan(3, 1, "r1")
    (batch,) = source.read(share, "r1")
    pipeline: type[Pipeline] = shown["Orders"]

    handled: list[Message] = Handler(pipeline(), None).handle(batch)

    assert sorted(message.batch_key for message in handled if not message.failure) == ["north", "unknown"]
    (failure,) = [message.failure for message in handled if message.failure]
    assert "total" in failure.reason
    assert source.ack(batch.column("ack_ref")[0].as_py(), batch.column("ack_id").to_pylist()) == []
    assert received(source, 1) == []


def test_its_options_are_all_there_are() -> None:
    table = DOCUMENT.partition("## Options")[2].partition("##")[0]
    listed = {name for names in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", names)}

    assert listed == PubsubSource.model_fields.keys() - {"name", "lease_s"}
