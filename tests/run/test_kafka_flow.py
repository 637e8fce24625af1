"""Whole flows over Kafka: each message once in the tables, and the group at the end, despite crashes."""

import os
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import polars as pl
import pytest
from confluent_kafka import Consumer

from pipeline_platform.connectors.kafka import KafkaSource
from pipeline_platform.lake.decisions.ledger import Receive
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.run import steps
from pipeline_platform.run.finish import finish_others
from pipeline_platform.run.flow import Flow
from tests.fixtures.flow import begun, finish, flow_of, kinds, publish, received, rows, run, worked
from tests.fixtures.flow_pipelines import Obedient, Word
from tests.fixtures.kafka_source import lag, until


@pytest.fixture
def flow(kafka, kafka_topic, tmp_path, tasks_here):
    """A pipeline over a topic of three partitions."""
    return flow_of(tmp_path, Obedient, kafka(kafka_topic(3)))  # the control store is the one of the source's positions


def send(flow: Flow, *words: str) -> None:
    flow.source.send([word.encode() for word in words], ({"partition": n % 3} for n in range(len(words))))


def numbers(first: int, past: int) -> list[str]:
    return [f"word {number:04}" for number in range(first, past)]


def lags(flow: Flow) -> list[int | None]:
    (topic,) = flow.source.topics  # type: ignore[attr-defined]
    return lag(flow.source, topic, 3)  # type: ignore[arg-type]


def assert_each_once(flow: Flow, words: list[str]) -> None:
    assert sorted(rows(flow, "words")["word"]) == sorted(words)
    assert rows(flow, "messages")["message_id"].n_unique() >= len(words)
    assert lags(flow) == [0, 0, 0]
    assert flow.source.backlog().messages == 0
    assert flow.source.holders() == set()
    assert flow.ledger.unfinished() == []


def test_each_message_is_once_in_a_table_and_the_lag_is_gone(flow):
    words = numbers(0, 900)
    send(flow, *words[:400], "raise", *words[400:])
    run(flow)
    assert_each_once(flow, words)
    assert kinds(flow) == {"raise": "ValueError"}
    partitions = rows(flow, "messages").group_by("partition").len()
    assert sorted(partitions["len"]) == [300, 300, 301]


def decided(flow: Flow) -> Receive:
    receive = worked(flow)
    steps.decide(flow, receive)
    return receive


def test_a_group_that_takes_no_offsets_is_told_by_the_next_run(flow):
    send(flow, *numbers(0, 30))
    receive = decided(flow)
    steps.publish(flow, receive)
    (topic,) = flow.source.topics  # type: ignore[attr-defined]
    member = Consumer({
        "bootstrap.servers": flow.source.bootstrap_servers,  # type: ignore[attr-defined]
        "group.id": flow.source.group_id,  # type: ignore[attr-defined]
        "enable.auto.commit": False,
    })  # fmt: skip
    member.subscribe([topic])
    until(lambda: member.poll(0.1) is not None or bool(member.assignment()))

    answer = steps.acknowledge(flow, receive)
    member.close()

    assert (answer.acknowledged, answer.unacknowledged) == (0, 30)
    assert "has active members" in answer.errors[0]
    (left,) = flow.control.over("obedient")
    assert left.receive_id == receive.receive_id, "the sensor asks for a run to finish it, though nothing waits"
    assert lags(flow) == [10, 10, 10]
    run(flow)
    assert_each_once(flow, numbers(0, 30))


@pytest.mark.parametrize("dies", [False, True])
def test_a_run_that_is_drained_leaves_the_rest_of_its_ranges_to_the_next(flow, monkeypatch, dies):
    flow = replace(flow, producer=BoundProducer(InTurn))
    words = [f"sleep 0.1{number:04}" for number in range(30)]
    send(flow, *words)
    receive = received(flow)
    flow.control.drain("in_turn", "moves", timedelta(seconds=1))
    steps.handle_messages(flow, receive)
    publish(flow, receive)
    if dies:
        with monkeypatch.context() as patch:
            patch.setattr(KafkaSource, "finish", end)
            with pytest.raises(KeyboardInterrupt):
                steps.acknowledge(flow, receive)
        flow.control.let_go("test")
        finish_others(flow)
    else:
        steps.acknowledge(flow, receive)

    begun = sorted(rows(flow, "words")["word"])
    left = [partition[sum(word in begun for word in partition) :] for partition in (words[n::3] for n in range(3))]
    assert begun == sorted({*words} - {word for some in left for word in some}), "of each partition the first"
    assert len(begun) < 30
    assert lags(flow) == [len(some) for some in left]
    assert flow.source.backlog().messages == 30 - len(begun)
    assert (flow.source.holders(), flow.ledger.unfinished()) == (set(), [])

    flow.control.resume("in_turn")
    again = run(flow)

    assert_each_once(flow, words)
    came_to = rows(flow, "outcomes").filter(pl.col("receive_id") == again.receive_id)["outcome"]
    assert came_to.to_list() == ["handled"] * (30 - len(begun)), "nothing is read twice that was handled"


def test_what_two_tasks_of_a_drained_run_left_of_a_partition_is_read_once(kafka, kafka_topic, tmp_path, local_worker):
    """The offsets of the receive are handled, free, handled and free."""
    flow = flow_of(tmp_path, Marking, kafka(kafka_topic(3)), worker=local_worker)
    words = [f"{tmp_path / 'task'} {number:04}" for number in range(80)]
    flow.source.send([word.encode() for word in words], ({"partition": 0} for _ in words))
    receive = received(flow)

    def drain_once_both_tasks_work() -> None:
        until(lambda: len([*tmp_path.glob("task*")]) == 2)
        flow.control.drain("marking", "moves", timedelta(0))

    draining = threading.Thread(target=drain_once_both_tasks_work)
    draining.start()
    steps.handle_messages(flow, receive)
    draining.join()
    finish(flow, receive)

    begun = rows(flow, "words").height
    (place,) = (place for place in flow.source.positions.places("kafka").values() if place.spans)  # type: ignore[attr-defined]
    assert 0 < place.acknowledged_to < begun, "the first task's"
    assert [(span.past - span.first, span.holder) for span in place.spans] == [(begun - place.acknowledged_to, None)]

    flow.control.resume("marking")
    again = run(flow)

    assert_each_once(flow, words)
    assert rows(flow, "messages").filter(pl.col("receive_id") == again.receive_id).height == 80 - begun


class Marking(Obedient):
    """A pipeline that leaves a file per process, and takes time for each message."""

    name = "marking"

    def handle_message(self, message, context):
        path, _ = message.data.decode().split()
        Path(f"{path}{os.getpid()}").touch()
        time.sleep(0.2)
        return message.put_data(Word(word=message.data.decode())).put_batcher("words")


def end(*_: object) -> None:
    raise KeyboardInterrupt


class InTurn(Obedient):
    """One partition after the other."""

    name = "in_turn"
    partition_by = "source"


def test_what_a_stalled_run_reserves_after_it_was_given_up_is_given_back(flow):
    send(flow, *numbers(0, 30))
    stalled = begun(flow)
    flow.control.let_go("test")
    assert finish_others(flow) == [stalled.receive_id]
    flow.source.plan(100, 1, stalled.receive_id)
    assert flow.source.backlog().messages == 0
    run(flow)
    assert_each_once(flow, numbers(0, 30))
