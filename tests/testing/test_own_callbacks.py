"""The testing kit calls a pipeline's own `acknowledge` as a run does."""

from typing import Any

import pytest

from pipeline_platform import Batcher, BatchInfo, Message, Pipeline, Producer
from pipeline_platform.testing import DummySource, test_batch

Call = tuple[str, list[Any], list[tuple[Any, str | None]]]


class Marks(Pipeline):
    """Keeps what it is told."""

    name = "marks"
    producer = Producer(source="queue")

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def handle_message(self, message: Message, context: Any) -> Message | list[Message]:
        """Change it, multiply it or fail."""
        if message.data.startswith(b"fail"):
            raise ValueError(message.data.decode())
        if message.data == b"several":
            return [message.put_data(1), message.put_data(2)]
        return message.put_data("changed")

    def acknowledge(self, ack_ref: str, successful: list[Message], failed: list[Message], context: Any) -> None:
        """Keep, and leave nothing of what was given."""
        self.calls.append(("own", [one.data for one in successful], [(one.data, one.reason) for one in failed]))
        successful.clear()
        failed.clear()

    def of_source(self, ack_ref: str, successful: list[Message], failed: list[Message]) -> None:
        """Keep what the source is told, too."""
        self.calls.append(("source", [one.data for one in successful], [(one.data, one.reason) for one in failed]))


def test_it_is_told_of_what_was_delivered_before_the_source_is():
    pipeline = Marks()
    test_batch(pipeline, [b"one", b"fail", b"several"], acknowledger=pipeline.of_source)
    assert pipeline.calls == [
        ("own", [b"one", b"several"], [(b"fail", "fail")]),
        ("source", ["changed", 1, 2], [(b"fail", "fail")]),
    ]


def test_where_it_raises_the_source_is_not_told():
    class Raises(Marks):
        name = "raises"

        def acknowledge(self, *_: Any) -> None:
            raise OSError("the database is away")

    pipeline = Raises()

    with pytest.raises(OSError, match="the database is away"):
        test_batch(pipeline, [b"one"], acknowledger=pipeline.of_source)

    assert pipeline.calls == []


def test_it_is_not_told_of_messages_that_come_again():
    pipeline = Marks()
    test_batch(pipeline, [b"one", b"fail"], source=DummySource(name="queue", on_failure="nack:0"))
    test_batch(pipeline, [b"fail"], source=DummySource(name="queue", on_failure="nack:0"))
    assert pipeline.calls == [("own", [b"one"], [])]


def test_thousands_are_told_a_thousand_at_a_time():
    pipeline = Marks()
    test_batch(pipeline, [*[b"one"] * 1_001, *[b"fail"] * 1_000])
    counts = [(len(successful), len(failed)) for _, successful, failed in pipeline.calls]
    assert counts == [(1_000, 0), (1, 999), (0, 1)]


class BySource(Pipeline):
    """The source of a test names no partition, so batches have none."""

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
