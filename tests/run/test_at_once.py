"""Ten messages at once on a real Spark: two tasks with five threads each, whose messages wait for each other."""

import random
import time
from pathlib import Path

from pydantic import BaseModel

from pipeline_platform.model.message import Message
from pipeline_platform.model.options import Processors, Producer, TableBatcher
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.run import steps
from pipeline_platform.run.begin import begin
from tests.fixtures.flow import WINDOW, Filled, rows, run
from tests.fixtures.flow_pipelines import Word

LONG_S = 120
"""Waited for at the most by a message that waits for others."""


class Meeting(BaseModel):
    """Where messages meet."""

    folder: str = ""


class AtOnce(Pipeline):
    """Holds each message until all ten have begun."""

    name = "at_once"
    producer = Producer(source="queue")
    processors = Processors(concurrency=2, threads=5, max_demand=5)
    batchers = {"words": TableBatcher(schema=Word)}
    context = Meeting()

    def handle_message(self, message: Message, context: Meeting) -> Message:
        """Meet the others."""
        word = message.data.decode()
        (Path(context.folder) / word).touch()
        until = time.monotonic() + LONG_S
        while len(list(Path(context.folder).iterdir())) < 10:
            if time.monotonic() > until:
                return message.failed("the others have not begun")
            time.sleep(0.01)
        return message.put(Word(word=word), batcher="words")


def partition(message: Message) -> int:
    return int(message.data.split(b"-")[1])


class InOrder(AtOnce):
    """Ten partitions of three messages each, of which the first ones meet; each writes down its place."""

    name = "in_order"
    processors = Processors(concurrency=2, threads=5, max_demand=15, partition_by=partition)

    def handle_message(self, message: Message, context: Meeting) -> Message:
        """Meet the others, and then be late."""
        handled = super().handle_message(message, context)
        time.sleep(random.uniform(0, 0.05))
        with (Path(context.folder).parent / f"partition-{partition(message)}").open("ab") as diary:
            diary.write(message.data[-1:])
        return handled


def test_ten_partitions_are_at_work_at_once_and_each_in_order(filled_on_spark: Filled, tmp_path: Path) -> None:
    words = [f"word-{number}-{place}" for place in range(3) for number in range(10)]
    flow, folder = filled_on_spark(InOrder, [word.encode() for word in words]), tmp_path / "meeting"
    folder.mkdir()

    run(flow, context={"folder": str(folder)})

    assert sorted(rows(flow, "words")["word"]) == sorted(words)
    assert [(tmp_path / f"partition-{number}").read_text() for number in range(10)] == ["012"] * 10


def test_ten_messages_are_at_work_at_once_in_two_tasks(filled_on_spark: Filled, tmp_path: Path) -> None:
    words = [f"word-{number}" for number in range(10)]
    flow, folder = filled_on_spark(AtOnce, [word.encode() for word in words]), tmp_path / "meeting"
    folder.mkdir()

    receive = begin(flow, origin="source", run_id="test", windows=[WINDOW], context={"folder": str(folder)})
    steps.receive_messages(flow, receive)
    manifest = steps.handle_messages(flow, receive)
    steps.decide(flow, receive)
    steps.publish(flow, receive)

    assert (manifest.total("handled"), manifest.total("failed")) == (10, 0)
    assert sorted(rows(flow, "words")["word"]) == words
