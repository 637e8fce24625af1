"""Whole runs over RabbitMQ: each message once in every table, and none left in the queue, despite crashes."""

import json

import pytest

from pipeline_platform.connectors.rabbitmq import RabbitmqSource
from pipeline_platform.run import steps
from pipeline_platform.run.flow import Flow
from pipeline_platform.source.contract import SourceError
from tests.fixtures.flow import finish, flow_of, kinds, rows, run, worked
from tests.fixtures.flow_pipelines import Obedient


@pytest.fixture
def started(tmp_path, tasks_here, rabbitmq):
    """A flow over a queue, and flows of later runs over the same queue and lake."""

    def start(queue: str = "", **options: object) -> Flow:
        source = rabbitmq(queue, name="queue", **options)
        return flow_of(tmp_path, Obedient, source)

    return start


def source_of(flow: Flow) -> RabbitmqSource:
    assert isinstance(flow.source, RabbitmqSource)
    return flow.source


def words(flow: Flow) -> list[str]:
    return sorted([*rows(flow, "words")["word"], *rows(flow, "batches")["data"]])


SENT = [f"word {number}" for number in range(60)]
BATCHED = [f"batch {number}" for number in range(6)]
ARRIVED = sorted([*SENT, *(json.dumps({"word": text}, separators=(",", ":")) for text in BATCHED)])


def test_messages_that_come_again_are_known_where_the_connection_was_lost_before_the_decision(started):
    flow = started()
    source_of(flow).send([text.encode() for text in (*SENT, *BATCHED)])
    receive = worked(flow)
    source_of(flow).close()  # as a lost connection does
    assert source_of(flow).backlog().messages == len(SENT) + len(BATCHED)

    told = finish(flow, receive)
    later = started(source_of(flow).queue)
    run(later)
    source_of(later).close()

    assert (told.acknowledged, told.lost, told.unacknowledged) == (0, len(SENT) + len(BATCHED), 0)
    assert words(later) == ARRIVED
    assert source_of(later).backlog().messages == 0


@pytest.mark.parametrize("requeued", [0, 2, 5], ids=["none", "some", "all"])
def test_messages_that_share_an_id_are_all_handled_whatever_is_requeued(started, requeued):
    flow = started()
    source = source_of(flow)
    ids = [{"message_id": id_} for id_ in ("other", *["order-1"] * 4)]
    source.send([b"unrelated", b"created", b"paid", b"raise", b"shipped"], ids)
    for share in source.plan(requeued, 1, "before"):
        assert sum(batch.num_rows for batch in source.read(share, "before")) == requeued
    source.close()

    run(flow)

    assert words(flow) == ["created", "paid", "shipped", "unrelated"]
    assert kinds(flow) == {"raise": "ValueError"}
    assert sorted(rows(flow, "outcomes")["outcome"]) == ["failed", *["handled"] * 4]
    assert sum(rows(flow, "messages")["redelivered"]) == requeued


def test_messages_without_an_id_are_not_decided_once_their_connection_is_lost(started):
    flow = started()
    source_of(flow).send([text.encode() for text in SENT], [{"message_id": None}] * len(SENT))
    receive = worked(flow)
    source_of(flow).close()
    with pytest.raises(SourceError, match="received the messages is closed"):
        steps.decide(flow, receive)
    later = started(source_of(flow).queue)
    run(later)
    source_of(later).close()
    assert words(later) == sorted(SENT), "each once, by the run that could acknowledge it"
    assert source_of(later).backlog().messages == 0
