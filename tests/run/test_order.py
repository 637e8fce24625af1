"""Order in whole runs: pulls, retries and replays with crashes between, from real servers."""

import time
from collections import defaultdict
from typing import Any

from pipeline_platform import Batcher, BatchInfo, Message, Pipeline, Processors, Producer, TableBatcher
from pipeline_platform.run.flow import Flow
from tests.fixtures.flow import flow_of, handled, rows, run
from tests.fixtures.flow_pipelines import Word

Handled = dict[str, list[int]]


def group(message: Message) -> int:
    """A payload contains its partition, its number there, and a fault."""
    return int(message.data.split()[0])


class InOrder(Pipeline):
    """A pipeline that records when each message was handled."""

    name = "in_order"
    producer = Producer(source="queue")
    processors = Processors(concurrency=3, partition_by=group)
    batchers = {"words": TableBatcher(schema=Word)}

    def handle_message(self, message: Message, context: Any) -> Message:
        payload = message.data.decode()
        if payload.endswith("fail") and message.attempt == 1:
            raise ValueError("as told")
        return message.put(Word(word=stamped(payload)), batcher="words")


class BySource(InOrder):
    """A pipeline in order by the source's partition."""

    name = "by_source"
    processors = Processors(concurrency=3)
    partition_by = "source"


class Batches(Pipeline):
    """The Spark lane, with batches by first letter."""

    name = "batches"
    producer = Producer(source="queue")
    batchers = {
        "out": Batcher(
            schema=Word, batch_size=4, concurrency=2, partition_by=lambda message: ord(message.data["word"][0])
        )
    }

    def handle_messages(self, messages: Any, context: Any) -> Any:
        from pyspark.sql import functions as f

        return messages.withColumns({"word": f.col("data").cast("string"), "batcher": f.lit("out")})

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        return [
            message.put(Word(word=stamped(f"{batch_info.partition} {message.data.word[1:]}"))) for message in messages
        ]


def stamped(text: str) -> str:
    return f"{time.monotonic_ns():020} {text}"


def by_partition(flow: Flow, table: str = "words") -> Handled:
    """Return the numbers of messages by partition, in the order in which they were handled."""
    order: Handled = defaultdict(list)
    for word in sorted(rows(flow, table)["word"]):
        _, partition, number, *_ = word.split()
        order[partition].append(int(number))
    return order


def test_what_a_dead_run_left_is_handled_before_what_came_later(filled):
    flow = filled(InOrder, [f"{number % 3} {number}".encode() for number in range(60)])
    handled(flow, run_id="dead", demand=40)
    flow.control.let_go("dead")
    run(flow)
    assert by_partition(flow) == {str(part): list(range(part, 60, 3)) for part in range(3)}
    assert flow.source.backlog().messages == 0


def test_the_spark_lane_s_batches_keep_the_order_of_their_partition(filled):
    flow = filled(Batches, [f"{'abc'[number % 3]} {number}".encode() for number in range(60)])
    run(flow)
    found = by_partition(flow, "out")
    assert found == {str(ord("abc"[part])): list(range(part, 60, 3)) for part in range(3)}


def test_kafka_s_partitions_keep_their_order_in_a_pull_a_backfill_and_a_replay(
    kafka, kafka_topic, tmp_path, spark_session
):
    source = kafka(topic := kafka_topic(3), one_receive_per_partition=True)
    payloads = [f"{number % 3} {number}{' fail' if number % 10 == 4 else ''}" for number in range(90)]
    source.send([payload.encode() for payload in payloads], ({"partition": n % 3} for n in range(90)))
    flow = flow_of(tmp_path, BySource, source, session=spark_session)

    run(flow)

    good = {str(part): [n for n in range(part, 90, 3) if n % 10 != 4] for part in range(3)}
    assert by_partition(flow) == good
    assert sorted(rows(flow, "failed")["partition"].unique()) == [f"{topic}:{part}" for part in range(3)]
    run(flow, "failed")
    failed = {str(part): [n for n in range(part, 90, 3) if n % 10 == 4] for part in range(3)}
    assert by_partition(flow) == {part: good[part] + failed[part] for part in good}
    run(flow, "messages")
    assert by_partition(flow) == {str(part): list(range(part, 90, 3)) for part in range(3)}
