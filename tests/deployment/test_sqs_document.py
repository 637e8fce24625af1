"""What docs/connect/sqs.md shows is run, on a real queue."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline_platform.connectors.sqs import SqsSource
from pipeline_platform.connectors.sqs import sqs_refusals as aws_refusals
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.tasks.handle.handle_messages import Handler
from tests.fixtures.documents import deployed, source_of

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "connect" / "sqs.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", DOCUMENT, re.S)


def test_the_pipeline_handles_what_its_queue_gives(
    sqs_queue: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = sqs_queue()
    monkeypatch.setenv("ORDERS_QUEUE_URL", url)
    monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", url.rsplit("/", 2)[0])
    shown = deployed(BLOCKS)
    orders: type[Pipeline] = shown["Orders"]
    queue: SqsSource = source_of(shown, "orders_queue")

    queue.send([json.dumps({"id": n, "customer": "Zoë", "total": 1.5}).encode() for n in range(3)] + [b"no order"])
    (share,) = queue.plan(10, 2, "r1")
    (batch,) = queue.read(share, "r1")
    messages = Handler(orders(), None).handle(batch)
    assert queue.ack(url, batch.column("ack_id").to_pylist()) == []
    assert queue.backlog().messages == 0

    assert orders.producer.source == queue.name
    assert sorted(message.data.id for message in messages if message.status == "ok") == [0, 1, 2]
    (failed,) = [message for message in messages if message.failure]
    assert failed.data == b"no order"


def test_every_option_of_the_source_is_told() -> None:
    ours = set(SqsSource.model_fields) - {"name", "lease_s"}

    assert {name for name in ours if f"`{name}`" not in DOCUMENT} == set()


def test_the_document_names_the_permissions_that_an_error_names() -> None:
    (said,) = [text for codes, text in aws_refusals._EXPLANATIONS.items() if codes.startswith("AccessDenied")]
    asked = set(re.findall(r"sqs:\w+", said))

    assert len(asked) == 5
    assert asked <= set(re.findall(r"sqs:\w+", DOCUMENT))
