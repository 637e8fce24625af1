"""The testing kit calls the callback `acknowledge` as a run does."""

from typing import Any

import pytest

from pipeline_platform import Batcher, BatchInfo, Message, Pipeline, Producer
from pipeline_platform.testing import DummySource, test_batch

Call = tuple[str, list[Any], list[tuple[Any, str | None]]]


class Marks(Pipeline):
    """Records the calls of `acknowledge`."""

    name = "marks"
    producer = Producer(source="queue")

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def handle_message(self, message: Message, context: Any) -> Message | list[Message]:
        """Change the message, return children, or raise."""
        if message.data.startswith(b"fail"):
            raise ValueError(message.data.decode())
        if message.data == b"several":
            return [message.put_data(1), message.put_data(2)]
        return message.put_data("changed")

    def acknowledge(self, ack_ref: str, successful: list[Message], failed: list[Message], context: Any) -> None:
        """Record the call, and clear the given lists."""
        self.calls.append(("own", *_told(successful, failed)))
        successful.clear()
        failed.clear()

    def of_source(self, ack_ref: str, successful: list[Message], failed: list[Message]) -> None:
        """Record the call for the source."""
        self.calls.append(("source", *_told(successful, failed)))


def _told(successful: list[Message], failed: list[Message]) -> tuple[list[Any], list[tuple[Any, str | None]]]:
    return [message.data for message in successful], [(message.data, message.reason) for message in failed]


def test_the_callback_gets_messages_as_delivered_before_the_source_is_acknowledged():
    pipeline = Marks()
    test_batch(pipeline, [b"one", b"fail", b"several"], acknowledger=pipeline.of_source)
    assert pipeline.calls == [
        ("own", [b"one", b"several"], [(b"fail", "fail")]),
        ("source", ["changed", 1, 2], [(b"fail", "fail")]),
    ]


def test_the_source_is_not_acknowledged_if_the_callback_raises():
    class Raises(Marks):
        name = "raises"

        def acknowledge(self, *_: Any) -> None:
            raise OSError("the database is away")

    pipeline = Raises()

    with pytest.raises(OSError, match="the database is away"):
        test_batch(pipeline, [b"one"], acknowledger=pipeline.of_source)

    assert pipeline.calls == []


def test_the_callback_does_not_get_messages_that_are_redelivered():
    pipeline = Marks()
    test_batch(pipeline, [b"one", b"fail"], source=DummySource(name="queue", on_failure="nack:0"))
    test_batch(pipeline, [b"fail"], source=DummySource(name="queue", on_failure="nack:0"))
    assert pipeline.calls == [("own", [b"one"], [])]


class BySource(Pipeline):
    """A pipeline with the partitions of its source; the source of a test has no partitions."""

    name = "by_source"
    producer = Producer(source="memory")
    partition_by = "source"
    batchers = {"out": Batcher(batch_size=2)}

    def handle_message(self, message: Message, context: Any) -> Message:
        return message.put(message.data.decode(), batcher="out")

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        return [message.put(f"{batch_info.partition}: {message.data}") for message in messages]


def test_without_a_partition_from_the_source_batches_have_none():
    done = test_batch(BySource, ["a", "b", "c"])
    assert [(info.partition, info.size) for info in done.batches] == [(None, 2), (None, 1)]
    assert [message.data for message in done.successful] == ["None: a", "None: b", "None: c"]
