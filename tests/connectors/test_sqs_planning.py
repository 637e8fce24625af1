"""What a run asks of SQS: shares of whole calls, within the quota of messages in flight, and for so long."""

import logging
import time
from collections.abc import Callable, Iterator

import pytest

from pipeline_platform.connectors.sqs import SqsSource
from pipeline_platform.source.contract import Share
from servers import sqs
from tests.fixtures.sqs_between import Between, between

Made = Callable[..., SqsSource]
BEYOND_TWELVE_HOURS = (
    "Value 900 for parameter VisibilityTimeout is invalid. Reason: Total VisibilityTimeout for the message is beyond "
    "the limit [43200 seconds]"
)


@pytest.fixture
def fake(sqs_server: str) -> Iterator[Between]:
    with between(sqs_server) as one:
        yield one


@pytest.fixture
def made(fake: Between, sqs_queue: Callable[..., str]) -> Made:
    """A source over a new queue of so many messages, with the fake between."""

    def make(waiting: int, **options: object) -> SqsSource:
        url = sqs_queue()
        sqs.fill(url, (f"message {number}" for number in range(waiting)))
        return SqsSource(name="flights", queue_url=url, endpoint_url=fake.endpoint, **options)  # type: ignore[arg-type]

    return make


def held(source: SqsSource, share: Share) -> list[str]:
    return [ack_id for batch in source.read(share, "r1") for ack_id in batch.column("ack_id").to_pylist()]


@pytest.mark.parametrize(
    ("demand", "concurrency", "shares"),
    [(100, 2, [50, 50]), (101, 2, [60, 41]), (3, 4, [3]), (25, 4, [10, 10, 5]), (99, 1, [99]), (0, 2, [])],
)
def test_shares_are_of_whole_calls_and_as_equal_as_that_allows(
    made: Made, demand: int, concurrency: int, shares: list[int]
) -> None:
    assert [share.messages for share in made(110).plan(demand, concurrency, "r1")] == shares


@pytest.mark.parametrize(("waiting", "shares"), [(0, [10]), (7, [10]), (25, [20, 5])])
def test_no_more_is_planned_than_seems_to_wait_but_a_call(made: Made, waiting: int, shares: list[int]) -> None:
    assert [share.messages for share in made(waiting).plan(1_000, 2, "r1")] == shares


def test_tasks_that_wait_for_messages_plan_for_all_that_is_wanted(made: Made) -> None:
    assert [share.messages for share in made(0, wait_time_seconds=1).plan(40, 2, "r1")] == [20, 20]


def test_no_more_is_planned_than_the_quota_leaves(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    flights = made(60, max_in_flight=50)
    assert flights.backlog().messages == 50
    assert len(held(flights, Share(messages=30))) == 30

    with caplog.at_level(logging.WARNING):
        (share,) = flights.plan(30, 1, "r2")

    assert share.messages == 20
    assert "30 messages were asked for, and max_in_flight (50) leaves 20" in caplog.text
    assert len(held(flights, share)) == 20
    assert flights.plan(30, 1, "r3") == []
    assert flights.backlog().messages == 0, "no run can be asked for what cannot be received"


def test_a_queue_at_its_quota_ends_a_share_with_what_it_has(
    made: Made, fake: Between, caplog: pytest.LogCaptureFixture
) -> None:
    flights = made(200)
    fake.refuse("ReceiveMessage", "OverLimit", "Too many messages in flight", beyond=5)

    with caplog.at_level(logging.WARNING):
        assert len(held(flights, Share(messages=200))) == 50

    assert "OverLimit" in caplog.text
    assert fake.calls["ReceiveMessage"] < 20, "it is not asked on and on"


def test_a_share_ends_after_a_third_of_the_lease(made: Made, fake: Between) -> None:
    flights = made(500, visibility_timeout=1)

    def slow(number: int, body: object) -> None:
        time.sleep(0.2)

    fake.meddle["ReceiveMessage"] = slow

    assert 0 < len(held(flights, Share(messages=500))) < 500


def test_messages_that_were_received_twelve_hours_ago_are_no_others_yet(
    made: Made, fake: Between, caplog: pytest.LogCaptureFixture
) -> None:
    flights = made(3)
    handles = held(flights, Share(messages=3))
    refused = {"SenderFault": True, "Code": "InvalidParameterValue", "Message": BEYOND_TWELVE_HOURS}
    fake.meddle["ChangeMessageVisibilityBatch"] = lambda _, body: {
        "Failed": [{"Id": entry["Id"], **refused} for entry in body["Entries"]]
    }

    with caplog.at_level(logging.WARNING):
        assert flights.extend("r1", lambda: [(flights.queue_url, handles)])

    assert "3 of 3 messages cannot be hidden for longer: InvalidParameterValue" in caplog.text


def test_messages_that_are_all_others_by_now_are_no_longer_held(made: Made) -> None:
    flights = made(3)
    handles = held(flights, Share(messages=3))
    flights.release(flights.queue_url, handles)

    assert not flights.extend("r1", lambda: [(flights.queue_url, handles)])


def test_an_extension_that_takes_longer_than_a_third_of_the_lease_says_what_to_change(
    made: Made, fake: Between, caplog: pytest.LogCaptureFixture
) -> None:
    flights = made(20, visibility_timeout=1)
    handles = held(flights, Share(messages=20))

    def slow(number: int, body: object) -> None:
        time.sleep(0.5)

    fake.meddle["ChangeMessageVisibilityBatch"] = slow
    with caplog.at_level(logging.WARNING):
        flights.extend("r1", lambda: [(flights.queue_url, handles)])

    assert "more than a third of visibility_timeout (1 s)" in caplog.text
    assert "Raise it, or lower the demand of a run" in caplog.text
