"""Pub/Sub as a source: requests, deliveries and acknowledgements."""

import json
import os
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from pipeline_platform.connectors.pubsub import PubsubSource
from pipeline_platform.connectors.pubsub.pubsub_source import requests_of
from pipeline_platform.model.message import DELIVERIES
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.contract import Share, SourceError
from tests.fixtures.received import received

PATH = "projects/shop/subscriptions/flights"


def source(**options):
    return PubsubSource(**{"name": "flights", "subscription": PATH, **options})


def requests(source, monkeypatch, operation):
    """Return a list that records the parameters of each following call of a source."""
    made, call = [], getattr(source._client, operation)

    def recording(**parameters):
        made.append(parameters)
        return call(**parameters)

    monkeypatch.setattr(source._client, operation, recording)
    return made


@pytest.mark.parametrize(
    ("demand", "concurrency", "shares"),
    [(2_000, 2, [1_000, 1_000]), (1_001, 4, [501, 500]), (3, 4, [3]), (9_001, 2, [4_501, 4_500]), (0, 2, [])],
)
def test_shares_are_equal_and_at_least_a_full_pull(demand, concurrency, shares):
    assert [share.messages for share in source().plan(demand, concurrency, "r1")] == shares


# Receiving


def test_two_empty_pulls_end_a_share(subscribed, monkeypatch):
    flights = subscribed()
    pulls = requests(flights, monkeypatch, "pull")

    assert received(flights, 10) == []
    assert [call.pop("retry") is not None for call in pulls] == [True, True]
    assert pulls == [{"subscription": flights._path, "max_messages": 10, "timeout": 2.0}] * 2


def test_a_pull_that_times_out_counts_as_empty(subscribed, monkeypatch):
    flights = subscribed(pull_timeout_s=0.1)  # the server waits for half a second
    pulls = requests(flights, monkeypatch, "pull")

    assert received(flights, 10) == []
    assert [call["timeout"] for call in pulls] == [0.1, 0.1]


def test_rows_contain_messages_and_their_pubsub_metadata(subscribed):
    flights = subscribed()
    flights.send([b"\x00\xff"], [{"attributes": {"trace": "Żółć"}, "ordering_key": "UA"}])

    (batch,) = flights.read(Share(messages=1), "r1")

    assert batch.schema == DELIVERIES
    (row,) = batch.to_pylist()
    metadata = json.loads(row.pop("metadata"))
    assert metadata.keys() == {"publish_time", "attributes", "ordering_key"}
    assert (metadata["attributes"], metadata["ordering_key"]) == ({"trace": "Żółć"}, "UA")
    assert row["published_at"].isoformat()[:23] == metadata["publish_time"][:23]
    assert abs(datetime.now(UTC) - row.pop("published_at")) < timedelta(minutes=1)
    assert row.pop("message_id")
    assert row.pop("ack_id")
    assert row == {
        "source": "flights",
        "data": b"\x00\xff",
        "ack_ref": flights._path,
        "attempt": 1,
        "redelivered": True,
        "partition": "UA",
        "sequence": None,
    }


def test_a_message_may_lack_payload_attributes_and_key(subscribed):
    flights = subscribed()
    flights.send([b"", b"x"], [{"attributes": {"only": "these"}}, None])

    rows = sorted(received(flights, 2), key=lambda row: row["data"])

    assert [row["data"] for row in rows] == [b"", b"x"]
    assert [row["partition"] for row in rows] == [None, None]
    assert json.loads(rows[1]["metadata"]).keys() == {"publish_time"}


def test_deliveries_are_counted_with_a_dead_letter_policy(subscribed):
    dead = subscribed()
    flights = subscribed({"dead_letter_policy": {"dead_letter_topic": dead._topic, "max_delivery_attempts": 5}})
    flights.send([b"poison"])
    counts = []
    for _ in range(5):
        (row,) = received(flights, 1)
        counts.append(json.loads(row["metadata"])["delivery_attempt"])
        flights.release(row["ack_ref"], [row["ack_id"]])

    assert counts == [1, 2, 3, 4, 5]
    assert received(flights, 1) == []
    assert [row["data"] for row in received(dead, 1)] == [b"poison"]


def test_a_deadline_is_set_if_the_subscription_has_another(subscribed, monkeypatch):
    for own, ours, calls in ((20, 20, []), (20, 60, [60]), (60, 20, [20])):
        flights = subscribed({"ack_deadline_seconds": own}, ack_deadline_s=ours)
        flights.send([b"1", b"2"])
        deadlines = requests(flights, monkeypatch, "modify_ack_deadline")

        assert len(received(flights, 2)) == 2
        assert [call["ack_deadline_seconds"] for call in deadlines] == calls


def test_messages_of_a_key_arrive_in_publish_order(subscribed):
    flights = subscribed({"enable_message_ordering": True})
    flights.send((b"%d" % n for n in range(6)), ({"ordering_key": "AB"[n % 2]} for n in range(6)))
    came = {"A": [], "B": []}
    while rows := received(flights, 2):
        assert received(flights, 1) == [], "none of a key while earlier ones of it are held"
        for row in rows:
            came[row["partition"]].append(int(row["data"]))
        flights.ack(flights._path, [row["ack_id"] for row in rows])

    assert came == {"A": [0, 2, 4], "B": [1, 3, 5]}


# Acknowledging


def test_messages_are_acknowledged_by_2_500_and_long_ids_in_requests_that_pubsub_takes(subscribed, monkeypatch):
    flights = subscribed()
    acks = requests(flights, monkeypatch, "acknowledge")

    flights.ack(flights._path, [str(n) for n in range(6_000)])

    assert sorted(len(call["ack_ids"]) for call in acks) == [1_000, 2_500, 2_500]
    acks.clear()
    flights.ack(flights._path, [f"{n:0500}" for n in range(3_000)])

    sizes = [sum(map(len, call["ack_ids"])) for call in acks]
    assert sum(sizes) == 3_000 * 500
    assert max(sizes) < 512 * 1024


@pytest.mark.parametrize(("action", "deadlines"), [("nack", [0]), ("nack:600", [600]), ("noop", [])])
def test_every_ack_action_becomes_a_pubsub_request(subscribed, monkeypatch, action, deadlines):
    flights = subscribed(ack_deadline_s=10)
    flights.send([b"1", b"2"])
    ids = [row["ack_id"] for row in received(flights, 2)]
    acks, changes = requests(flights, monkeypatch, "acknowledge"), requests(flights, monkeypatch, "modify_ack_deadline")

    assert flights.acknowledge(action, flights._path, ids) == []

    assert [call["ack_deadline_seconds"] for call in changes] == deadlines
    assert acks == []
    assert len(received(flights, 2)) == (2 if action == "nack" else 0)


def test_messages_of_a_deleted_subscription_are_lost_after_it_is_replaced(subscribed):
    before = "projects/local/subscriptions/before"

    refused = subscribed().ack(before, ["a", "b"])

    assert [(entry.ack_id, entry.lost) for entry in refused] == [("a", True), ("b", True)]
    assert refused[0].reason == f"{before} was deleted"


# Sending


def test_messages_are_published_in_requests_that_pubsub_takes(subscribed, monkeypatch):
    monkeypatch.setattr("pipeline_platform.connectors.pubsub.pubsub_source.PUBLISH_MESSAGES", 3)
    monkeypatch.setattr("pipeline_platform.connectors.pubsub.pubsub_source.PUBLISH_BYTES", 10)
    flights = subscribed()
    payloads = [b"1", b"2", b"3", b"4", b"x" * 8, b"y" * 50, b"z"]

    assert flights.send(payloads) == len(payloads)

    assert Counter(row["data"] for row in received(flights, 10)) == Counter(payloads)


def test_attributes_count_in_the_size_of_a_request():
    attributes = {f"attribute {number}": "ä" * 500 for number in range(100)}

    source = PubsubSource(name="p", subscription="projects/p/subscriptions/s")
    requests = [*requests_of([(b"", {"attributes": attributes})] * 200, source)]

    assert [len(request) for request in requests] == [49, 49, 49, 49, 4]


def test_a_request_has_one_ordering_key():
    source = PubsubSource(name="p", subscription="projects/p/subscriptions/s")
    keys = ["A", "A", "B", None, None, "A"]

    requests = requests_of([(b"%d" % n, {"ordering_key": key}) for n, key in enumerate(keys)], source)

    sent = [[(message["data"], message["ordering_key"]) for message in request] for request in requests]
    assert sent == [[(b"0", "A"), (b"1", "A")], [(b"2", "B")], [(b"3", ""), (b"4", "")], [(b"5", "A")]]


@pytest.mark.parametrize("metadata", [{"attributes": {"n": 1}}, {"attributes": {1: "n"}}, {"ordering_key": 7}])
def test_invalid_metadata_is_refused_with_the_number_of_the_message(subscribed, metadata):
    with pytest.raises(SourceError, match="message 1 has invalid metadata"):
        subscribed().send([b"a", b"b"], [None, metadata])


def test_a_failed_send_names_the_option_to_set(subscribed):
    with pytest.raises(SourceError, match=r"topic is not set.*Set topic"):
        subscribed().model_copy(update={"topic": None}).send([b"a"])
    gone = subscribed().model_copy(update={"topic": "gone"})
    with pytest.raises(SourceError, match=r"topic 'projects/local/topics/gone'.* does not exist"):
        gone.send([b"a"])


# Processes


def test_a_fork_makes_a_connection_of_its_own(subscribed):
    flights = subscribed()
    ours = flights._client

    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if flights._client is not ours and flights.backlog() == Backlog(None) else 1)
        finally:
            os._exit(2)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert flights._client is ours
    assert flights.backlog() == Backlog(None)
