"""`test_batch` of a pipeline with `partition_by`: what fails, and which batches there are."""

from typing import Any

from pipeline_platform import Batcher, BatchInfo, Message, Pipeline, Producer
from pipeline_platform.testing import test_batch


def first_number(message: Message) -> int:
    return int(message.data.split()[0])


class Accounts(Pipeline):
    """A payload begins with its account."""

    name = "accounts"
    producer = Producer(source="memory")
    partition_by = first_number
    batchers = {"out": Batcher(batch_size=2)}

    def handle_message(self, message: Message, context: Any) -> Message:
        return message.put(message.data.decode(), batcher="out")

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        return [message.put(f"{batch_info.partition}: {message.data}") for message in messages]


def test_batches_hold_one_partition_each_and_what_has_none_fails() -> None:
    done = test_batch(Accounts, ["1 a", "2 b", "one c", "1 d", "1 e"])

    assert [message.data for message in done.successful] == ["1: 1 a", "2: 2 b", "1: 1 d", "1: 1 e"]
    assert [(message.data, message.reason.split(":")[0]) for message in done.failed] == [
        (b"one c", "invalid literal for int() with base 10")
    ]
    assert [(info.partition, info.size) for info in done.batches] == [(1, 2), (2, 1), (1, 1)]


def test_where_nothing_has_a_partition_all_fail() -> None:
    done = test_batch(Accounts, ["one", "two"])

    assert (len(done.successful), len(done.failed), done.batches) == (0, 2, [])


class BySource(Accounts):
    """The source of a test names no partition, so batches have none."""

    name = "by_source"
    partition_by = "source"


def test_without_a_partition_from_the_source_batches_have_none() -> None:
    done = test_batch(BySource, ["a", "b", "c"])

    assert [(info.partition, info.size) for info in done.batches] == [(None, 2), (None, 1)]
    assert [message.data for message in done.successful] == ["None: a", "None: b", "None: c"]
