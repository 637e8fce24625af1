"""What `docs/connect/rabbitmq.md` shows is run on a real server, and what it lists is there."""

import re
from pathlib import Path
from typing import Any

import pytest

from pipeline_platform.connectors.rabbitmq import RabbitmqSource
from pipeline_platform.connectors.rabbitmq.rabbitmq_options import WORDS, Binding, ConsumeOptions, Declare
from pipeline_platform.model.message import Message
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.tasks.handle.handle_messages import Handler
from tests.fixtures.documents import deployed, source_of

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "connect" / "rabbitmq.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", DOCUMENT, re.S)


@pytest.fixture
def shown(rabbitmq_server: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the document's Python defines where it says that it goes."""
    monkeypatch.setenv("ORDERS_RABBITMQ_URL", rabbitmq_server)
    return deployed(BLOCKS)


def test_its_pipeline_handles_what_its_source_receives(shown: dict[str, Any]) -> None:
    source: RabbitmqSource = source_of(shown, "orders_queue")
    payloads = [b'{"number": 1, "total": 9.5}', b'{"number": 2, "total": 1}', b'{"number": 3}']
    places = [{"exchange": "shop", "routing_key": f"orders.{region}"} for region in ("north", "south", "south")]
    assert source.backlog().messages == 0, "the sensor's look made the queue"
    source.send(payloads, places)
    waiting = source.model_copy(update={"wait_time_s": 5.0})
    (share,) = waiting.plan(3, 1, "r1")
    batches = list(waiting.read(share, "r1"))
    pipeline: type[Pipeline] = shown["Orders"]

    handled: list[Message] = [message for batch in batches for message in Handler(pipeline(), None).handle(batch)]

    assert sorted(message.batch_key for message in handled if not message.failure) == ["north", "south"]
    (failure,) = [message.failure for message in handled if message.failure]
    assert "total" in failure.reason
    for batch in batches:
        assert waiting.acknowledge("ack", batch.column("ack_ref")[0].as_py(), batch.column("ack_id").to_pylist()) == []
    waiting.close()
    assert source.backlog().messages == 0
    source.close()


def test_its_options_are_all_there_are() -> None:
    table = DOCUMENT.partition("## Options")[2].partition("\n\n`")[0]
    rows = re.findall(r"^\| (`.*?) \|(.*)", table, re.M)
    listed = {name for names, _ in rows for name in re.findall(r"`(\w+)`", names)}
    described = " ".join(text for _, text in rows)

    assert listed == RabbitmqSource.model_fields.keys() - {"name"}
    inner = {*Declare.model_fields, *Binding.model_fields, *ConsumeOptions.model_fields, *WORDS}
    assert {name for name in inner if f"`{name}`" not in described} == {"auto_delete"}
