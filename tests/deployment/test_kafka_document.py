"""What `docs/connect/kafka.md` shows is run on a real server, and what it lists is there."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline_platform.connectors.kafka import KafkaSource
from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.message import Message
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.source.patience import patiently
from pipeline_platform.tasks.handle.handle_messages import Handler
from tests.fixtures.documents import deployed, source_of
from tests.fixtures.kafka_source import lag

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "connect" / "kafka.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", DOCUMENT, re.S)


@pytest.fixture
def shown(kafka_server: str, kafka_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the document's Python defines where it says that it goes."""
    kafka_topic(2, name="payments")
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", kafka_server)
    return deployed(BLOCKS)


def test_its_pipeline_handles_what_its_source_receives(shown: dict[str, Any], tmp_path: Path) -> None:
    source: KafkaSource = source_of(shown, "payments_topic")
    source.open(ControlStore(f"sqlite:///{tmp_path}/control.sqlite"))
    patiently(source.check_ready)
    payment = b'{"number": 1, "amount": 9.5, "country": "PL"}'
    source.send([payment, payment, b"{}"], [{"key": "card"}, None, {"key": "card"}])
    shares = source.plan(10, 1, "r1")
    pipeline: type[Pipeline] = shown["Payments"]

    handled: list[Message] = [
        message
        for share in shares
        for batch in source.read(share, "r1")
        for message in Handler(pipeline(), None).handle(batch)
    ]
    source.finish("r1")

    assert sorted(message.batch_key for message in handled if not message.failure) == ["card", "unknown"]
    (failure,) = [message.failure for message in handled if message.failure]
    assert "amount" in failure.reason
    assert lag(source, "payments", 2) == [0, 0]


def test_its_options_are_all_there_are() -> None:
    table = DOCUMENT.partition("## Options")[2].partition("`client_options` refuses")[0]
    columns = [row.split(" | ") for row in re.findall(r"^\| .* \|$", table, re.M)]
    listed = {name for row in columns for name in re.findall(r"`(\w+)[`=]", row[1])}

    assert KafkaSource.model_fields.keys() - {"name"} <= listed
    assert listed - KafkaSource.model_fields.keys() <= {"earliest", "latest", "ack"}
