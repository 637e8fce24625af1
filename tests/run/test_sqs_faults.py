"""Faults of SQS during runs: each message once in every table, none lost, and the reason reported."""

import pytest

from tests.fixtures.sqs_flow import SqsGround

MANY = 240
"""More than the driver receives and acknowledges by itself, so tasks of Spark do."""


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
def test_what_was_received_by_a_server_s_answer_that_never_came_is_back_after_the_timeout(sqs_ground, words):
    sqs_ground.fake.cut("ReceiveMessage", range(3, 5), after=True)
    flow = sqs_ground.flow(visibility_timeout=4)
    sqs_ground.run(flow)
    assert len(sqs_ground.words(flow)) == MANY - 20
    run_to_end(sqs_ground)
    assert sqs_ground.words(flow) == words
