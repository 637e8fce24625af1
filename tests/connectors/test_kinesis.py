"""Kinesis as a source: deliveries, positions, and shards that split and merge, on a local server."""

import json
import threading
import time
from collections import defaultdict
from datetime import UTC, datetime, timedelta

import pytest

from pipeline_platform.connectors.kinesis.aggregated_records import hash_key_of
from pipeline_platform.source.contract import SourceError
from servers import kinesis as server
from tests.fixtures.kinesis import HASH_KEYS, aggregated, client, finish, held, merge, open_shards, received, split


def payloads(rows):
    return [row["data"] for row in rows]


# Deliveries


def test_a_row_contains_the_message_and_its_kinesis_metadata(kinesis_source):
    source = kinesis_source()
    before = time.time()
    source.send([b"\x00 payload"], [{"partition_key": 'Żółć "1"'}])

    (row,) = received(source, "a")

    metadata = json.loads(row["metadata"])
    created, shard, sequence = row["message_id"].split(":")
    assert before - 1 < metadata.pop("timestamp") / 1_000 < time.time() + 1
    assert metadata == {
        "stream": source.stream,
        "shard": shard,
        "sequence_number": sequence,
        "sub_sequence_number": None,
        "partition_key": 'Żółć "1"',
    }
    assert (shard, before - 60 < int(created) < time.time() + 1) == ("shardId-000000000000", True)
    assert (row["data"], row["partition"], row["attempt"]) == (b"\x00 payload", 'Żółć "1"', 1)
    assert abs((row["published_at"] - datetime.now(UTC)).total_seconds()) < 60


def test_messages_of_an_aggregated_record_are_delivered_each(kinesis_source):
    source = kinesis_source()
    keys = [("a", b"1"), ("b", b"2"), ("a", b"3"), ("c", b"4"), ("c", b"5")]
    source.send([b"before", aggregated(keys), b"after"], [{"partition_key": "x"}] * 3)

    rows = []
    for receive_id in "abcde":
        some = received(source, receive_id, demand=2)
        assert len(some) <= 2
        rows += some
        if receive_id == "b":  # a crash in the middle of the record
            source.abandon(receive_id, list)
            again = received(source, "again", demand=2)
            assert [row["redelivered"] for row in again] == [True, True]
            assert [row["message_id"] for row in again] == [row["message_id"] for row in some]
            finish(source, "again", again)
        else:
            finish(source, receive_id, some)

    assert payloads(rows) == [b"before", b"1", b"2", b"3", b"4", b"5", b"after"]
    assert [row["partition"] for row in rows] == ["x", "a", "b", "a", "c", "c", "x"]
    assert [row["message_id"].split(":")[3:] for row in rows] == [[], ["0"], ["1"], ["2"], ["3"], ["4"], []]
    assert len({row["message_id"] for row in rows}) == 7
    assert sorted(row["sequence"] for row in rows) == [row["sequence"] for row in rows]
    assert source.backlog().messages == 0


def test_aggregated_messages_outside_the_range_of_their_shard_are_left_to_the_other_shard(kinesis_source):
    source = kinesis_source(shards=2)
    first, second = 5, HASH_KEYS - 5
    record = aggregated([("k", b"mine"), ("k", b"theirs")], [first, second])
    source.send([record], [{"partition_key": "k", "explicit_hash_key": first}])

    assert payloads(received(source, "a")) == [b"mine"]


def test_a_received_message_can_be_sent_again_with_its_key(kinesis_source):
    source = kinesis_source()
    source.send([b"one"], [{"partition_key": "k"}])
    (row,) = received(source, "a")
    source.send([row["data"]], [json.loads(row["metadata"])])
    finish(source, "a", [row])

    (again,) = received(source, "b")
    assert (again["data"], again["partition"], again["message_id"] == row["message_id"]) == (b"one", "k", False)


# Where reading starts


def test_reading_starts_at_the_newest_message_or_at_a_time(kinesis_source, kinesis_stream):
    stream = kinesis_stream(2)
    assert kinesis_source(stream).send([b"old"]) == 1
    time.sleep(1.1)  # times of iterators are whole seconds
    between = datetime.now(UTC)
    latest = kinesis_source(stream, store="latest", start="LATEST")
    assert latest.backlog().messages == 0
    time.sleep(1.1)
    kinesis_source(stream).send([b"new"])

    since = kinesis_source(stream, store="since", start=f"AT_TIMESTAMP:{between.isoformat()}")
    future = kinesis_source(stream, store="past", start=f"AT_TIMESTAMP:{(between - timedelta(days=400)).isoformat()}")
    oldest = kinesis_source(stream, store="oldest")
    found = [payloads(received(source, "a")) for source in (latest, since, future, oldest)]
    assert [sorted(some) for some in found] == [[b"new"], [b"new"], [b"new", b"old"], [b"new", b"old"]]


def test_after_the_loss_of_the_control_store_all_messages_are_marked_as_delivered(kinesis_source, kinesis_stream):
    stream = kinesis_stream()
    source = kinesis_source(stream)
    source.send([b"one"])
    first = received(source, "a")
    finish(source, "a", first)
    again = received(kinesis_source(stream, store="another"), "a")

    assert [row["redelivered"] for row in again] == [True]
    assert [row["message_id"] for row in again] == [row["message_id"] for row in first]
    assert again[0]["sequence"] > first[0]["sequence"]


def test_a_stream_that_is_created_again_is_read_from_its_beginning(kinesis_source, kinesis_stream):
    source = kinesis_source(start="LATEST")
    assert source.backlog().messages == 0
    source.send([b"before"])
    rows = received(source, "a")
    finish(source, "a", rows)
    client(source).delete_stream(StreamName=source.stream)
    time.sleep(1.1)  # creation times are whole seconds
    kinesis_stream(1, source.stream)
    source.close()
    source.send([b"after"])

    (share,) = source.plan(10, 1, "planned")
    part, *_ = share.at["shards"]
    other = share.model_copy(update={"at": {"shards": [[rows[0]["ack_ref"], *part[1:]]]}})
    with pytest.raises(SourceError, match="was deleted and created again since this receive was planned"):
        list(source.read(other, "planned"))
    source.abandon("planned", list)
    (row,) = received(source, "b")
    assert row["data"] == b"after"
    assert row["message_id"].split(":")[0] != rows[0]["message_id"].split(":")[0]
    assert source.location(rows[0]["message_id"]).endswith("is acknowledged")
    assert source.location(row["message_id"]).endswith("is waiting, leased by a run, or has expired")
    assert source.location("4711").startswith("not found: '4711'")


# Crashes and stopped runs


def test_a_shard_is_leased_to_one_receive_and_released_with_its_messages_marked(kinesis_source):
    source = kinesis_source()
    source.send([b"%d" % number for number in range(6)], [{"partition_key": "k"}] * 6)
    first = received(source, "a", demand=4)
    assert payloads(first) == [b"0", b"1", b"2", b"3"]
    assert (received(source, "b"), source.backlog().messages, source.holders()) == ([], 0, {"a"})

    source.abandon("a", list)
    finish(source, "a", first)  # too late: it is released
    assert source.holders() == set()
    again = received(source, "c")
    assert payloads(again) == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert all(row["redelivered"] for row in again[:4])
    finish(source, "a", first)
    assert source.holders() == {"c"}


def test_a_stopped_run_continues_at_its_first_unstarted_message(kinesis_source):
    source = kinesis_source()
    source.send([b"%d" % number for number in range(6)], [{"partition_key": "k"}] * 6)
    rows = received(source, "a", demand=5)
    not_begun, begun = [rows[2], rows[4]], [rows[0], rows[1], rows[3]]
    for _ in range(2):
        source.give_back("a", lambda: held(not_begun), lambda: held(begun))
        finish(source, "a", rows)
    again = received(source, "b")
    assert payloads(again) == [b"2", b"3", b"4", b"5"]
    assert all(row["redelivered"] for row in again[:3])
    finish(source, "b", again)

    source.send([b"6"])
    rows = received(source, "c")
    source.give_back("c", lambda: held(rows), list)
    finish(source, "c", rows)
    assert payloads(received(source, "d")) == [b"6"], "no message was started"


def test_two_processes_may_finish_the_same_receive(kinesis_source, monkeypatch):
    """The second process has looked at the positions before the first finished and a later receive got the shard."""
    source = kinesis_source()
    source.send([b"1", b"2"], [{"partition_key": "k"}] * 2)
    rows = received(source, "a", demand=1)
    control = type(source.positions)
    reserve = control.reserve

    def late(self, *given):
        monkeypatch.setattr(control, "reserve", reserve)
        finish(source, "a", rows)
        later = received(source, "b")
        assert payloads(later) == [b"2"]
        finish(source, "b", later)
        return reserve(self, *given)

    monkeypatch.setattr(control, "reserve", late)
    finish(source, "a", rows)
    assert received(source, "c") == []


# Shards that split and merge


def test_children_are_read_after_all_messages_of_their_parents_are_acknowledged(kinesis_source):
    source = kinesis_source(shards=2)

    def send(text: str) -> None:
        source.send([f"{text}{n}".encode() for n in range(20)], [{"partition_key": f"{n}"} for n in range(20)])

    numbers: dict[str, list[int]] = defaultdict(list)

    def rows_of(receive_id: str, demand: int = 1_000) -> list:
        rows = received(source, receive_id, demand)
        for row in rows:
            numbers[row["partition"]].append(row["sequence"])
        return rows

    send("a")
    first = rows_of("1", demand=10)
    split(source, 0)
    merge(source, 3, 1)
    send("b")
    assert {row["data"][:1] for row in first} == {b"a"}
    assert rows_of("2") == [], "both parents are leased"
    finish(source, "1", first)
    rest = rows_of("3")
    assert {row["data"][:1] for row in rest} == {b"a"}
    assert len(rest) == 10
    assert rows_of("4") == []
    finish(source, "3", rest)
    children = rows_of("5")
    assert sorted(payloads(children)) == sorted(f"b{n}".encode() for n in range(20))
    assert {row["ack_ref"][-2:] for row in children} == {"02", "04"}
    finish(source, "5", children)
    assert all(some == sorted(some) for some in numbers.values()), "numbers increase along shards"
    assert source.backlog().messages == 0


def test_no_message_is_lost_or_out_of_order_while_shards_split_and_merge(kinesis_source):
    source = kinesis_source(shards=2)
    keys, each = [f"key {n}" for n in range(10)], 60
    sent, expected = threading.Event(), {key: [*range(each)] for key in keys}

    def send() -> None:
        for number in range(each):
            source.send([b"%d" % number] * len(keys), [{"partition_key": key} for key in keys])
            time.sleep(0.02)
        sent.set()

    def reshard() -> None:
        for _ in range(3):
            time.sleep(0.2)
            split(source, int(open_shards(source)[0]["ShardId"][-12:]))
            found = sorted(open_shards(source), key=lambda shard: int(shard["HashKeyRange"]["StartingHashKey"]))
            merge(source, *(int(shard["ShardId"][-12:]) for shard in found[-2:]))

    threads = [threading.Thread(target=work) for work in (send, reshard)]
    for thread in threads:
        thread.start()
    came: dict[str, list[int]] = defaultdict(list)
    end, receives = time.monotonic() + 60, 0
    while time.monotonic() < end and sum(map(len, came.values())) < each * len(keys):
        rows = received(source, f"{receives}", demand=40)
        receives += 1
        if receives % 5 == 0:
            source.abandon(f"{receives - 1}", list)
            continue
        for row in rows:
            came[row["partition"]].append(int(row["data"]))
        finish(source, f"{receives - 1}", rows)
    for thread in threads:
        thread.join()
    assert dict(came) == expected
    assert len(client(source).list_shards(StreamName=source.stream)["Shards"]) == 2 + 3 * 3


def test_a_shard_that_expired_with_its_messages_is_reported_once(kinesis_source, monkeypatch, caplog):
    source = kinesis_source()
    source.send([b"one"])
    assert source.backlog().messages is None
    split(source)
    listed = source._api.shards
    monkeypatch.setattr(source._api, "shards", lambda: (listed()[0][1:], listed()[1]))
    assert "shardId-000000000000 expired before all its messages were read" in source.backlog().lost
    assert received(source, "a") == []
    assert ["expired" in message for message in caplog.messages] == [True]
    assert source.backlog().lost == ""
    source.send([b"two"])
    assert payloads(received(source, "b")) == [b"two"]


# The backlog


def test_the_backlog_reports_the_oldest_message_and_no_number(kinesis_source):
    source = kinesis_source(shards=2)
    assert source.backlog()[:2] == (0, None)
    assert source.wait(0) is False
    source.send([b"one"])
    time.sleep(0.05)
    source.send([b"%d" % number for number in range(10)])
    found = source.backlog()
    shares = source.plan(1_000, 2, "a")
    assert sum(share.messages for share in shares) == 11, "a run counts a few messages"
    rows = [row for share in shares for batch in source.read(share, "a") for row in batch.to_pylist()]
    row = min(rows, key=lambda row: row["published_at"])
    assert (found.messages, len(rows)) == (None, 11)
    assert found.oldest is not None
    assert abs(found.oldest - row["published_at"]) < timedelta(milliseconds=2)
    assert row["data"] == b"one"


def test_a_missing_stream_is_an_error_with_the_fix(kinesis_source, kinesis_stream):
    source = kinesis_source("not-there")
    with pytest.raises(SourceError, match="source 'kinesis': stream 'not-there' does not exist"):
        source.backlog()
    arn = f"arn:aws:kinesis:{server.REGION}:000000000000:stream/{kinesis_stream()}"
    by_arn = kinesis_source(arn)
    assert by_arn.send([b"one"]) == 1
    assert payloads(received(by_arn, "a")) == [b"one"]


def test_a_partition_key_determines_the_shard(kinesis_source):
    source = kinesis_source(shards=4)
    keys = [f"{number}" for number in range(40)]
    source.send([key.encode() for key in keys], [{"partition_key": key} for key in keys])
    found = {row["partition"]: int(row["ack_ref"][-12:]) for row in received(source, "a", concurrency=3)}
    assert found == {key: hash_key_of(key) * 4 // HASH_KEYS for key in keys}
