"""Poison messages: the run ends, and every other message is handled."""

from typing import Any

import pytest
from pydantic import BaseModel

from pipeline_platform import Batcher, BatchInfo, Message, Pipeline, Processors, Producer, TableBatcher
from tests.fixtures.faults import fault
from tests.fixtures.flow import rows, run

# The Spark lane


class Numbers(BaseModel):
    number: int


class Casting(Pipeline):
    """Parse numbers, and raise for a text that is not a number."""

    name = "casting"
    producer = Producer(source="queue")
    batchers = {"numbers": TableBatcher(schema=Numbers)}

    def handle_messages(self, messages: Any, context: Any) -> Any:
        from pyspark.sql import functions as f

        return messages.withColumns({"number": f.col("data").cast("string").cast("long"), "batcher": f.lit("numbers")})

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        for message in messages:
            if message.data == b"kill":
                fault("kill")
        return messages


def _odd(data: bytes) -> int:
    if (number := int(data)) % 2:
        return number
    raise ValueError(f"{number} is even")


class Odd(Casting):
    """A pipeline that calls a function of this file, which Spark's workers import from the deployment."""

    name = "odd"

    def handle_messages(self, messages: Any, context: Any) -> Any:
        from pyspark.sql import functions as f

        return messages.withColumns({"number": f.udf(_odd, "long")("data"), "batcher": f.lit("numbers")})


@pytest.mark.faults
@pytest.mark.parametrize(
    ("pipeline", "payloads", "kinds"),
    [
        (Odd, [b"7", b"8"], {"TaskError"}),
        (
            Casting,
            [b"x0", b"1", b"x2", b"kill", b"4" * (16 * 2**20 + 1)],
            {"CAST_INVALID_INPUT", "worker killed", "too large"},
        ),
    ],
    ids=["a Python function raises", "handle_failed dies"],
)
def test_rows_that_fail_cost_no_other(filled, pipeline, payloads, kinds):
    flow = filled(pipeline, payloads)
    run(flow)
    good = sorted(int(payload) for payload in payloads if len(payload) == 1 and payload != b"8")
    assert sorted(rows(flow, "numbers")["number"]) == good
    failed = rows(flow, "failed")
    assert (failed.height, set(failed["kind"])) == (len(payloads) - len(good), kinds)


def test_a_query_that_is_wrong_by_itself_fails_the_run(filled, monkeypatch):
    monkeypatch.setattr(Casting, "handle_messages", lambda self, messages, context: messages.select("nothing"))
    flow = filled(Casting, [b"1"])
    with pytest.raises(Exception, match="nothing"):
        run(flow)
    assert not flow.tables["outcomes"].files(flow.tables["outcomes"].open())


class Large(Pipeline):
    """Put all messages into one batch, unchanged."""

    name = "large"
    producer = Producer(source="queue")
    processors = Processors(max_message_bytes=128 * 2**20)
    batchers = {"called": Batcher(batch_size=10)}

    def handle_message(self, message: Message, context: Any) -> Message:
        return message.put_batcher("called")

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        return messages


@pytest.mark.faults
def test_messages_of_a_hundred_megabytes_do_not_end_a_spark_that_others_share(filled_on_spark):
    """The JVM has 1 GB: payloads do not go through it."""
    large = 100 * 2**20
    flow = filled_on_spark(Large, [b"x" * large, b"small", b"y" * large, b"z" * large])
    run(flow)
    assert rows(flow, "called").height == 4
    assert rows(flow, "called")["batch_id"].n_unique() == 4, "a batch has 128 MB of payloads and data at the most"
