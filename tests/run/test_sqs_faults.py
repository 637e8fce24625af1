"""Faults of SQS during runs: each message once in every table, none lost, and the reason reported."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pipeline_platform.run import steps
from pipeline_platform.source.contract import SourceAwayError, SourceError
from pipeline_platform.spark.engine import TaskError
from servers import sqs
from servers.server import Server
from tests.fixtures.flow import begun
from tests.fixtures.sqs_between import Body
from tests.fixtures.sqs_flow import SqsGround

MANY = 240
"""More than the driver receives and acknowledges by itself, so tasks of Spark do."""
SECRET = "AKIA-not-to-be-told"


@pytest.fixture
def words(sqs_ground):
    """Return the number of waiting messages."""
    told = sorted(f"word {number:03}" for number in range(MANY))
    sqs_ground.fill(told)
    return told


def run_to_end(ground: SqsGround) -> None:
    """Run without faults until the queue is empty and no receive is unfinished."""
    ground.fake.meddle.clear()
    flow = ground.flow()
    while ground.count() or flow.ledger.unfinished():
        ground.run(flow)


@pytest.mark.faults
def test_a_server_that_is_away_for_a_moment_in_a_receive_and_in_an_acknowledgement_costs_nothing(sqs_ground, words):
    sqs_ground.fake.cut("ReceiveMessage", range(3, 8))
    sqs_ground.fake.cut("DeleteMessageBatch", range(3, 8))
    flow = sqs_ground.flow()
    assert sqs_ground.run(flow).acknowledged == MANY
    assert sqs_ground.words(flow) == words
    assert sqs_ground.count() == 0


@pytest.mark.faults
def test_a_server_that_stays_away_in_a_receive_leaves_what_came_to_be_handled(sqs_ground, words):
    sqs_ground.fake.cut("ReceiveMessage", range(5, 10_000))
    flow = sqs_ground.flow()
    assert sqs_ground.run(flow, 90).acknowledged == len(sqs_ground.words(flow)) == 40
    run_to_end(sqs_ground)
    assert sqs_ground.words(flow) == words


@pytest.mark.faults
def test_a_server_that_gives_a_task_nothing_fails_the_receive_by_its_reason(sqs_ground, words):
    flow = sqs_ground.flow(visibility_timeout=4)  # a task that goes on may lease something yet
    receive = begun(flow)
    sqs_ground.fake.refuse("ReceiveMessage", "AccessDeniedException", "not authorized")
    with pytest.raises(TaskError, match="Allow sqs:GetQueueAttributes, sqs:ReceiveMessage"):
        steps.receive_messages(flow, receive)
    flow.control.end(receive.receive_id)
    run_to_end(sqs_ground)
    assert sqs_ground.words(flow) == words


@pytest.mark.faults
def test_what_was_received_by_a_server_s_answer_that_never_came_is_back_after_the_timeout(sqs_ground, words):
    sqs_ground.fake.cut("ReceiveMessage", range(3, 5), after=True)
    flow = sqs_ground.flow(visibility_timeout=4)
    sqs_ground.run(flow)
    assert len(sqs_ground.words(flow)) == MANY - 20
    run_to_end(sqs_ground)
    assert sqs_ground.words(flow) == words


@pytest.mark.faults
def test_a_server_that_stays_away_in_an_acknowledgement_is_told_by_the_next_run(sqs_ground, words):
    sqs_ground.fake.cut("DeleteMessageBatch", range(3, 10_000), after=True)
    flow = sqs_ground.flow()
    first = sqs_ground.run(flow)
    assert first.unacknowledged == MANY - first.acknowledged > 0
    assert any("does not answer" in error for error in first.errors)
    run_to_end(sqs_ground)
    assert sqs_ground.words(flow) == words


@contextmanager
def standing_still(server: Server) -> Iterator[None]:
    """Halt a server for two seconds."""
    server.stop()
    wake = threading.Timer(2, server.start)
    wake.start()
    yield
    wake.join()


def test_a_server_that_stands_still_and_goes_on_costs_nothing(sqs_ground, own_sqs_server):
    url = sqs.create_queue(own_sqs_server.address, "still")
    sqs.fill(url, ["one", "two"])
    flow = sqs_ground.flow(queue_url=url, endpoint_url=own_sqs_server.address)
    receive = begun(flow)
    with standing_still(own_sqs_server):
        steps.receive_messages(flow, receive)
    sqs_ground.go_on(flow, receive)
    with standing_still(own_sqs_server):
        assert steps.acknowledge(flow, receive).acknowledged == 2
    assert flow.source.backlog().messages == 0
    assert sqs_ground.words(flow) == ["one", "two"]


def half_refused(number: int, body: Body) -> Body:
    """Pass every other entry to the server, and refuse the others."""
    del number
    told, kept = body["Entries"][::2], body["Entries"][1::2]
    error = {"SenderFault": False, "Code": "InternalError", "Message": "try again"}
    failed = [{"Id": entry["Id"], **error} for entry in kept]
    return {**body, "Entries": told, "Failed": failed}


def test_half_an_acknowledgement_that_is_refused_is_reported_and_told_again(sqs_ground, words):
    sqs_ground.fake.meddle["DeleteMessageBatch"] = half_refused
    flow = sqs_ground.flow()
    first = sqs_ground.run(flow)
    assert (first.acknowledged, first.unacknowledged) == (MANY // 2, MANY // 2)
    assert any(error.endswith("InternalError: try again") for error in first.errors)
    assert sqs_ground.words(flow) == words, "they are visible before they are acknowledged"
    run_to_end(sqs_ground)
    assert sqs_ground.words(flow) == words


def test_a_queue_that_is_deleted_in_a_run_is_named_and_its_tables_stay_whole(sqs_ground, words):
    flow = sqs_ground.flow()
    receive = sqs_ground.work(flow)
    client, name = sqs.client(sqs_ground.server), sqs_ground.url.rsplit("/", 1)[1]
    client.delete_queue(QueueUrl=sqs_ground.url)

    answer = steps.acknowledge(flow, receive)

    assert answer.unacknowledged == MANY
    assert all("does not exist" in error and "Create it" in error for error in answer.errors)
    with pytest.raises(SourceError, match=r"does not exist.*Create it"):
        begun(flow)
    sqs.create_queue(sqs_ground.server, name)
    sqs_ground.run(flow)
    assert flow.ledger.unfinished() == []
    assert sqs_ground.words(flow) == words


@pytest.mark.parametrize("code", ["AccessDeniedException", "ExpiredToken"])
def test_credentials_that_are_revoked_in_a_run_are_named_without_being_told(sqs_ground, words, code, caplog):
    flow = sqs_ground.flow()
    said = "not authorized" if code == "AccessDeniedException" else f"{SECRET} is expired"
    sqs_ground.fake.refuse("DeleteMessageBatch", code, said)
    sqs_ground.fake.refuse("ChangeMessageVisibilityBatch", code, said)

    with caplog.at_level(logging.WARNING):
        first = sqs_ground.run(flow)

    expected = "Allow sqs:GetQueueAttributes" if code == "AccessDeniedException" else "no valid credentials"
    assert first.acknowledged == 0
    assert all(expected in error for error in first.errors)
    assert SECRET not in " ".join(first.errors) + caplog.text
    sqs_ground.fake.refuse("GetQueueAttributes", code, said)
    with pytest.raises(SourceError, match=expected):
        begun(flow)
    run_to_end(sqs_ground)
    assert sqs_ground.words(flow) == words


def test_a_server_that_is_away_when_a_run_begins_may_be_tried_again(sqs_ground):
    flow = sqs_ground.flow()
    sqs_ground.fake.cut("GetQueueAttributes", range(1, 7))
    with pytest.raises(SourceAwayError, match="does not answer"):
        flow.source.backlog()
    begun(flow)
