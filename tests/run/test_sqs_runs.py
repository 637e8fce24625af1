"""Whole runs over SQS: number of requests, leases during work, and messages of a killed run."""

import logging

import pytest

from pipeline_platform.run.lease import held
from tests.fixtures.flow import received

pytestmark = pytest.mark.usefixtures("tasks_here")


def test_a_full_queue_costs_a_fifth_of_a_request_for_each_message(sqs_ground):
    sqs_ground.fill(f"word {number}" for number in range(2_500))
    flow = sqs_ground.flow()
    first = sqs_ground.run(flow, 1_993)
    assert first.acknowledged == 1_993
    assert sum(sqs_ground.fake.calls.values()) <= 0.21 * 1_993, sqs_ground.fake.calls
    assert sqs_ground.fake.calls["ChangeMessageVisibilityBatch"] == 0, "nothing was due"


def test_the_rest_of_a_queue_costs_no_poll_of_many_tasks_for_nothing(sqs_ground):
    sqs_ground.fill(f"word {number}" for number in range(25))
    assert sqs_ground.run(sqs_ground.flow(), 2_000).acknowledged == 25
    assert sqs_ground.fake.calls["ReceiveMessage"] == 3
    assert sqs_ground.fake.calls["GetQueueAttributes"] == 2


def test_a_message_that_another_receive_took_does_not_end_the_run_that_had_it(sqs_ground, caplog):
    sqs_ground.fill(["one", "two", "three"])
    flow = sqs_ground.flow()
    receive = received(flow)
    ((url, handles),) = held(flow, receive)
    sqs_ground.source(flow).release(url, handles[:1])
    flow.beats.clear()  # both leases are due
    with caplog.at_level(logging.WARNING):
        sqs_ground.go_on(flow, receive)
    assert "Could not renew the leases of 1 of 3 messages" in caplog.text
    assert sqs_ground.words(flow) == ["one", "three", "two"]
