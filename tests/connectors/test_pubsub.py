"""Pub/Sub as a source: what it asks for, what it hands out, and what becomes of acknowledgements."""

import json
import os
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from pydantic import ValidationError

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
    """The parameters of each call that a source makes from here on."""
    made, call = [], getattr(source._client, operation)

    def recording(**parameters):
        made.append(parameters)
        return call(**parameters)

    monkeypatch.setattr(source._client, operation, recording)
    return made


# Options


@pytest.mark.parametrize(
    "subscription", ["", "shop/flights", "projects/shop/topics/flights", "projects//subscriptions/f", PATH + "/", None]
)
def test_a_subscription_is_a_path_or_a_name(subscription):
    with pytest.raises(ValidationError, match="subscription"):
        source(subscription=subscription, project="shop")


def test_a_name_alone_takes_the_project():
    assert source(subscription="flights", project="shop")._path == PATH
    assert source(project="other")._path == PATH
    assert source(topic="late", project="shop")._topic == "projects/shop/topics/late"
    for option, project in (("subscription", None), ("subscription", "projects/shop"), ("topic", None)):
        with pytest.raises(ValidationError, match=f"{option} 'flights' is a name alone and project is .*set project"):
            source(**{option: "flights"}, project=project)


@pytest.mark.parametrize(
    ("option", "lowest", "highest"),
    [
        ("max_number_of_messages", 1, 1_000),
        ("ack_deadline_s", 10, 600),
        ("pull_timeout_s", 0.1, 60),
        ("timeout_s", 1, 20),
    ],
)
def test_numbers_keep_to_what_pubsub_allows(option, lowest, highest):
    assert [getattr(source(**{option: allowed}), option) for allowed in (lowest, highest)] == [lowest, highest]
    for refused in (lowest - 0.5, highest + 1, "many"):
        with pytest.raises(ValidationError, match=rf"{option}\n"):
            source(**{option: refused})


def test_what_is_no_option_is_refused_and_what_is_unset_has_a_value():
    with pytest.raises(ValidationError, match=r"receive_interval\n.*Extra inputs"):
        source(receive_interval=5)
    unset = source()
    assert (unset.max_number_of_messages, unset.pull_timeout_s, unset.credentials_file) == (1_000, 2.0, None)


def test_the_lease_follows_the_deadline_and_is_not_set_by_itself():
    assert source(ack_deadline_s=30).lease_s == 30.0
    assert source(ack_deadline_s=30).extend_every_s == 10.0
    with pytest.raises(ValidationError, match="set that one, and leave lease_s out"):
        source(lease_s=60)
    again = PubsubSource.model_validate(source(ack_deadline_s=77).model_dump())
    assert again == source(ack_deadline_s=77), "what is dumped can be loaded"


@pytest.mark.parametrize("option", ["on_success", "on_failure"])
def test_a_source_says_what_becomes_of_messages_by_pubsub_s_words(option):
    for known in ("ack", "noop", "nack", "nack:0", "nack:600"):
        assert getattr(source(**{option: known}), option) == known
    with pytest.raises(ValidationError, match=rf"{option}: flights acknowledges .*up to 600.*, not 'nack:601'"):
        source(**{option: "nack:601"})
    with pytest.raises(ValidationError, match=rf"{option}: flights acknowledges .*not 'reject'"):
        source(**{option: "reject"})
    assert (source().on_success, source().on_failure) == ("ack", "ack")


@pytest.mark.parametrize(
    ("demand", "concurrency", "shares"),
    [(2_000, 2, [1_000, 1_000]), (1_001, 4, [501, 500]), (3, 4, [3]), (9_001, 2, [4_501, 4_500]), (0, 2, [])],
)
def test_shares_are_equal_and_no_smaller_than_a_pull_is_good_for(demand, concurrency, shares):
    assert [share.messages for share in source().plan(demand, concurrency, "r1")] == shares


# Receiving


def test_more_than_the_demand_stays_and_no_pull_asks_for_more(subscribed, monkeypatch):
    flights = subscribed(max_number_of_messages=10)
    flights.send(b"%d" % n for n in range(30))
    pulls = requests(flights, monkeypatch, "pull")

    rows = received(flights, 25)

    assert len({row["message_id"] for row in rows}) == 25
    assert sorted(call["max_messages"] for call in pulls)[-3:] == [5, 10, 10]
    assert len(received(flights, 10)) == 5


def test_an_empty_subscription_gives_nothing_after_two_pulls(subscribed, monkeypatch):
    flights = subscribed()
    pulls = requests(flights, monkeypatch, "pull")

    assert received(flights, 10) == []
    assert [call.pop("retry") is not None for call in pulls] == [True, True]
    assert pulls == [{"subscription": flights._path, "max_messages": 10, "timeout": 2.0}] * 2


def test_a_pull_that_waits_for_too_long_is_an_empty_one(subscribed, monkeypatch):
    flights = subscribed(pull_timeout_s=0.1)  # the server waits for half a second
    pulls = requests(flights, monkeypatch, "pull")

    assert received(flights, 10) == []
    assert [call["timeout"] for call in pulls] == [0.1, 0.1]


def test_rows_hold_what_pubsub_said(subscribed):
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


def test_a_message_without_payload_attributes_or_key_is_one(subscribed):
    flights = subscribed()
    flights.send([b"", b"x"], [{"attributes": {"only": "these"}}, None])

    rows = sorted(received(flights, 2), key=lambda row: row["data"])

    assert [row["data"] for row in rows] == [b"", b"x"]
    assert [row["partition"] for row in rows] == [None, None]
    assert json.loads(rows[1]["metadata"]).keys() == {"publish_time"}


def test_deliveries_are_counted_where_a_dead_letter_policy_does(subscribed):
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


def test_a_deadline_is_set_where_the_subscription_s_own_is_another(subscribed, monkeypatch):
    for own, ours, calls in ((20, 20, []), (20, 60, [60]), (60, 20, [20])):
        flights = subscribed({"ack_deadline_seconds": own}, ack_deadline_s=ours)
        flights.send([b"1", b"2"])
        deadlines = requests(flights, monkeypatch, "modify_ack_deadline")

        assert len(received(flights, 2)) == 2
        assert [call["ack_deadline_seconds"] for call in deadlines] == calls


def test_a_key_s_messages_come_in_the_order_in_which_they_were_published(subscribed):
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


def test_messages_are_acknowledged_by_2_500(subscribed, monkeypatch):
    flights = subscribed()
    flights.send(b"%d" % n for n in range(6_000))
    ids = [row["ack_id"] for row in received(flights, 6_000)]
    acks = requests(flights, monkeypatch, "acknowledge")

    assert flights.acknowledge("ack", flights._path, ids) == []

    assert sorted(len(call["ack_ids"]) for call in acks) == [1_000, 2_500, 2_500]
    assert flights.acknowledge("ack", flights._path, ids) == [], "twice is harmless"
    assert flights.acknowledge("ack", flights._path, []) == []
    assert received(flights, 10) == []


def test_long_ids_are_acknowledged_in_requests_that_pubsub_takes(subscribed, monkeypatch):
    flights = subscribed()
    acks = requests(flights, monkeypatch, "acknowledge")

    flights.ack(flights._path, [f"{n:0500}" for n in range(3_000)])

    sizes = [sum(map(len, call["ack_ids"])) for call in acks]
    assert sum(sizes) == 3_000 * 500
    assert max(sizes) < 512 * 1024


@pytest.mark.parametrize(("action", "deadlines"), [("nack", [0]), ("nack:600", [600]), ("noop", [])])
def test_every_word_is_asked_to_pubsub_as_a_deadline(subscribed, monkeypatch, action, deadlines):
    flights = subscribed(ack_deadline_s=10)
    flights.send([b"1", b"2"])
    ids = [row["ack_id"] for row in received(flights, 2)]
    acks, changes = requests(flights, monkeypatch, "acknowledge"), requests(flights, monkeypatch, "modify_ack_deadline")

    assert flights.acknowledge(action, flights._path, ids) == []

    assert [call["ack_deadline_seconds"] for call in changes] == deadlines
    assert acks == []
    assert len(received(flights, 2)) == (2 if action == "nack" else 0)


def test_what_a_subscription_held_is_lost_once_it_is_gone_and_another_took_its_place(subscribed):
    before = "projects/local/subscriptions/before"

    refused = subscribed().ack(before, ["a", "b"])

    assert [(entry.ack_id, entry.lost) for entry in refused] == [("a", True), ("b", True)]
    assert refused[0].reason == f"{before} is no subscription any more"


# Sending


def test_messages_are_published_in_requests_that_pubsub_takes(subscribed, monkeypatch):
    monkeypatch.setattr("pipeline_platform.connectors.pubsub.pubsub_source.PUBLISH_MESSAGES", 3)
    monkeypatch.setattr("pipeline_platform.connectors.pubsub.pubsub_source.PUBLISH_BYTES", 10)
    flights = subscribed()
    payloads = [b"1", b"2", b"3", b"4", b"x" * 8, b"y" * 50, b"z"]

    assert flights.send(payloads) == len(payloads)

    assert Counter(row["data"] for row in received(flights, 10)) == Counter(payloads)


def test_what_is_published_beside_payloads_counts_in_the_size_of_a_request():
    attributes = {f"attribute {number}": "ä" * 500 for number in range(100)}

    requests = [*requests_of([b""] * 200, [{"attributes": attributes}] * 200, "p")]

    assert [len(request) for request in requests] == [49, 49, 49, 49, 4]


@pytest.mark.parametrize("metadata", [{"attributes": {"n": 1}}, {"attributes": {1: "n"}}, {"ordering_key": 7}])
def test_what_pubsub_does_not_take_beside_a_payload_is_refused_by_number(subscribed, metadata):
    with pytest.raises(SourceError, match="message 1 cannot be published: its metadata must have"):
        subscribed().send([b"a", b"b"], [None, metadata])


def test_what_cannot_be_sent_says_which_option_to_set(subscribed):
    with pytest.raises(SourceError, match=r"topic is unset.*set it"):
        subscribed().model_copy(update={"topic": None}).send([b"a"])
    gone = subscribed().model_copy(update={"topic": "gone"})
    with pytest.raises(SourceError, match=r"topic 'projects/local/topics/gone'.* is not there"):
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


def test_what_is_closed_connects_again_when_it_is_used(subscribed):
    flights = subscribed()
    flights.backlog()
    flights.close()
    flights.close()

    assert flights.backlog() == Backlog(None)
