"""Acknowledgements to RabbitMQ: every ack action, in few frames, on the connection that received the messages."""

import logging
import pickle
from contextlib import nullcontext
from typing import Any

import pytest

from pipeline_platform.connectors.rabbitmq import RabbitmqSource, rabbitmq_source
from pipeline_platform.connectors.rabbitmq.rabbitmq_options import ACK_ACTIONS
from pipeline_platform.source.contract import SourceError
from tests.fixtures.rabbitmq_source import acknowledged, numbers
from tests.fixtures.received import received


@pytest.mark.parametrize(
    ("word", "waiting", "dead", "after_close"),
    [("ack", 0, 0, 0), ("reject", 0, 3, 0), ("reject_and_requeue", 3, 0, 3),
     ("reject_and_requeue_once", 3, 0, 3), ("noop", 0, 0, 3)],
)  # fmt: skip
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
        ("ack", [], range(1, 101), [(100, True)]),
        ("ack", [50], [*range(1, 50), *range(51, 101)], [(100, True)]),
        ("reject", [], [1, 2, 3, 50, 51], [(3, True), (50, False), (51, False)]),
        ("ack", range(1, 11), [12, 11, 14], [(12, True), (14, False)]),
    ],
)
def test_messages_up_to_the_first_gap_are_acknowledged_in_one_frame(rabbitmq, monkeypatch, word, first, then, told):
    source, frames = rabbitmq(), list[tuple[int, bool]]()
    source.send(numbers(100))
    rows = received(source)
    if first:
        acknowledged(source, "reject_and_requeue", [rows[tag - 1] for tag in first])
    tell = rabbitmq_source._CALLS[word]

    def spy(channel: Any, tag: int, multiple: bool) -> None:
        frames.append((tag, multiple))
        tell(channel, tag, multiple)

    monkeypatch.setitem(rabbitmq_source._CALLS, word, spy)  # type: ignore[arg-type]
    assert acknowledged(source, word, [rows[tag - 1] for tag in then]) == []
    source.close()

    assert frames == told
    assert source.backlog().messages == 100 - len(then), "all others are back, and no other is gone"


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
