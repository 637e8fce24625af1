"""Acknowledgements to RabbitMQ: every ack action, in few frames, on the connection that received the messages."""

import logging
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
from pika.channel import Channel

from pipeline_platform.connectors.rabbitmq import RabbitmqSource
from pipeline_platform.connectors.rabbitmq.rabbitmq_options import ACK_ACTIONS
from pipeline_platform.source.contract import SourceError
from tests.fixtures.rabbitmq_source import acknowledged, numbers
from tests.fixtures.received import received


@pytest.mark.parametrize(
    ("word", "waiting", "dead", "after_close"),
    [("reject", 0, 3, 0), ("reject_and_requeue", 3, 0, 3), ("reject_and_requeue_once", 3, 0, 3)],
)
def test_each_ack_action_has_its_effect(rabbitmq, rabbitmq_queue, word, waiting, dead, after_close):
    letters = rabbitmq()
    queue = rabbitmq_queue(x_dead_letter_exchange="", x_dead_letter_routing_key=letters.queue)
    source, other = rabbitmq(queue), rabbitmq(queue)
    source.send(numbers(3))

    assert acknowledged(source, word, received(source)) == []

    # Dead-lettering takes a moment.
    assert len(received(rabbitmq(letters.queue, wait_time_s=5.0), dead or 1) if dead else []) == dead
    assert (other.backlog().messages, letters.backlog().messages) == (waiting, 0)
    source.close()
    assert len(received(other, 3)) == after_close


def test_reject_and_requeue_once_rejects_the_second_time():
    ack_policy = RabbitmqSource(
        name="flights", url="amqp://host", queue="q", on_failure="reject_and_requeue_once"
    ).ack_policy

    assert ack_policy.of_delivery("reject_and_requeue_once", redelivered=False) == "reject_and_requeue_once"
    assert ack_policy.of_delivery("reject_and_requeue_once", redelivered=True) == "reject"
    assert [word for word in ACK_ACTIONS if ack_policy.ends(word)] == ["ack", "reject"]


@pytest.mark.parametrize(
    ("word", "first", "then", "told"),
    [
        # Outstanding messages without a gap are acknowledged at once; messages after a gap separately.
        ("ack", [], range(1, 101), [("ack", 100, True)]),
        ("ack", [50], [*range(1, 50), *range(51, 101)], [("ack", 100, True)]),
        ("reject", [], [1, 2, 3, 50, 51], [("nack", 3, True), ("nack", 50, False), ("nack", 51, False)]),
        ("release", range(1, 11), [12, 11, 14], [("nack", 12, True), ("nack", 14, False)]),
        # From RabbitMQ 4.3 on, a delivery limit counts basic.reject and does not count basic.nack.
        ("reject_and_requeue", [], [1, 2, 50], [("reject", 1, False), ("reject", 2, False), ("reject", 50, False)]),
        ("reject_and_requeue_once", [1], [2, 3], [("reject", 2, False), ("reject", 3, False)]),
    ],
)
def test_messages_up_to_the_first_gap_are_acknowledged_in_one_frame(rabbitmq, monkeypatch, word, first, then, told):
    source, frames = rabbitmq(), list[tuple[str, int, bool]]()
    source.send(numbers(100))
    rows = received(source)
    if first:
        acknowledged(source, "release", [rows[tag - 1] for tag in first])

    def spy_on(name: str) -> None:
        call = getattr(Channel, f"basic_{name}")

        def spy(channel: Channel, tag: int, multiple: bool = False, **options: Any) -> None:
            frames.append((name, tag, multiple))
            call(channel, tag, *[multiple] * (name != "reject"), **options)

        monkeypatch.setattr(Channel, f"basic_{name}", spy)

    for name in "ack", "nack", "reject":
        spy_on(name)
    assert acknowledged(source, word, [rows[tag - 1] for tag in then]) == []
    source.close()

    assert frames == told
    removed = len(then) if ACK_ACTIONS[word].ends else 0
    assert source.backlog().messages == 100 - removed, "all others are back, and no other is gone"


def test_acknowledging_twice_is_harmless_and_has_no_effect_on_another_connection(rabbitmq, caplog):
    source = rabbitmq()
    source.send(numbers(4))
    rows = received(source)
    elsewhere = pickle.loads(pickle.dumps(source))

    with caplog.at_level(logging.WARNING, "pipeline_platform.connectors.rabbitmq.rabbitmq_source"):
        refused = acknowledged(elsewhere, "ack", rows[:2]) + acknowledged(elsewhere, "ack", rows[2:])

    assert [entry.lost for entry in refused] == [True] * 4
    assert len(caplog.records) == 1, "it is said once"
    assert (
        acknowledged(source, "ack", rows)
        == acknowledged(source, "ack", rows)
        == acknowledged(source, "reject", rows[:1])
        == []
    )
    assert source.backlog().messages == 0


def test_a_receive_may_be_decided_while_connected_or_if_all_messages_have_ids(rabbitmq):
    source = rabbitmq()

    def held(rows: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
        return [(rows[0]["ack_ref"], [row["ack_id"] for row in rows])]

    for note, decides in ({}, True), ({"message_id": None}, False):
        source.send(numbers(2), [None, note])
        rows = received(source, receive_id=f"r{decides}")
        assert source.extend(f"r{decides}", lambda rows=rows: held(rows))  # type: ignore[misc]
        source.close()
        with nullcontext() if decides else pytest.raises(SourceError, match=r"is closed.*have no id"):
            assert source.extend(f"r{decides}", lambda rows=rows: held(rows))  # type: ignore[misc]
        acknowledged(source, "ack", received(source))
    assert source.extend("of nobody", list)


def test_finished_receives_use_no_channels_of_their_connection(built, rabbitmq_server, rabbitmq_queue):
    source = built(f"{rabbitmq_server}?channel_max=4", rabbitmq_queue())
    unacknowledged = []
    for number in range(8):
        source.send(numbers(2))
        rows = received(source, receive_id=f"r{number}")
        if number == 0:  # a message without an acknowledgement stays leased
            unacknowledged, rows = rows[:1], rows[1:]
        assert acknowledged(source, "ack", rows) == []
        for _ in range(2):
            source.finish(f"r{number}")

    assert source.backlog().messages == 0
    assert acknowledged(source, "ack", unacknowledged) == []
