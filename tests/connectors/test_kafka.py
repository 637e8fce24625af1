"""Kafka as a source: options, deliveries and the offsets that Kafka's own tools report, on a real server."""

import base64
import ctypes
import json
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Producer, cimpl
from confluent_kafka.admin import AdminClient, NewPartitions

from pipeline_platform.connectors.kafka.cluster import Cluster
from pipeline_platform.source.contract import SourceError
from tests.fixtures.kafka_source import (
    delete_topic,
    lag,
    offsets,
    offsets_there,
    patiently_send,
    received,
    report_no_topic_ids,
    set_group,
    until,
)  # fmt: skip

# Receiving


def test_a_row_contains_the_message_and_its_kafka_metadata(kafka, kafka_topic):
    topic = kafka_topic(2)
    source = kafka(topic)
    beside = {"partition": 1, "key": 'Żółć "1"', "headers": [["trace", "t1"], ["trace", b"\xff\x00"], ["none", None]]}
    before = time.time()
    source.send([b"\x00 payload"], [beside])

    (row,) = received(source, "a")

    metadata = json.loads(row.pop("metadata"))
    assert before - 1 < metadata.pop("timestamp") / 1_000 < time.time() + 1
    assert metadata == {
        "topic": topic,
        "partition": 1,
        "offset": 0,
        "key": 'Żółć "1"',
        "headers": [["trace", "t1"], ["trace", {"base64": base64.b64encode(b"\xff\x00").decode()}], ["none", None]],
        "timestamp_type": "create",
    }
    topic_id, partition, offset = row["message_id"].split(":")
    assert (len(topic_id), partition, offset) == (22, "1", "0")
    assert {name: row[name] for name in ("source", "data", "attempt", "partition", "sequence", "published_at")} == {
        "source": "kafka", "data": b"\x00 payload", "attempt": 1, "partition": f"{topic}:1", "sequence": 0,
        "published_at": None,
    }  # fmt: skip


def test_messages_of_two_topics_have_different_ids_if_the_cluster_reports_no_topic_ids(kafka, kafka_topic, monkeypatch):
    report_no_topic_ids(monkeypatch)
    topics = sorted([kafka_topic(), kafka_topic()])
    source = kafka(*topics)
    source.send([b"one", b"two"], [{"topic": topic} for topic in topics])

    rows = received(source, "a")
    source.finish("a")

    assert sorted(row["message_id"] for row in rows) == [f"{topic}:0:0" for topic in topics]
    assert [source.location(f"{topic}:0:0").split(":")[0] for topic in topics] == [
        f"offset 0 of {topic} [0] is acknowledged" for topic in topics
    ]


def test_whereabouts_compares_an_offset_with_the_committed_offset(kafka, kafka_topic):
    topic = kafka_topic()
    source = kafka(topic)
    source.send([b"one", b"two"])
    (topic_id, *_), *_ = [row["message_id"].split(":") for row in received(source, "a")]
    before = source.location(f"{topic_id}:0:1")
    source.finish("a")

    group = f"group {source.group_id} has committed"
    assert before == f"offset 1 of {topic} [0] is waiting or leased by a run: {group} 0"
    assert source.location(f"{topic_id}:0:1") == f"offset 1 of {topic} [0] is acknowledged: {group} 2"
    assert source.location(f"{topic_id}:0:2") == f"not found: {topic} [0] has offsets from 0 to before 2"
    assert source.location("4711").startswith("not found: '4711'")


def test_a_received_message_can_be_sent_again_unchanged(kafka, kafka_topic):
    topic = kafka_topic()
    source = kafka(topic)
    source.send([b"one"], [{"key": b"\xfe", "headers": {"a": b"\xff", "b": "text"}}])
    (row,) = received(source, "a")
    metadata = json.loads(row["metadata"])
    source.send([row["data"]], [metadata])
    (again,) = received(source, "b")
    assert again["data"] == b"one"
    told = json.loads(again["metadata"])
    assert [told[name] for name in ("key", "headers")] == [metadata[name] for name in ("key", "headers")]


def test_the_time_that_the_broker_took_a_message_is_when_it_was_published(kafka, kafka_topic):
    source = kafka(kafka_topic(message_timestamp_type="LogAppendTime"))
    source.send([b"one"])
    (row,) = received(source, "a")
    assert abs(row["published_at"].timestamp() - time.time()) < 60
    metadata = json.loads(row["metadata"])
    assert metadata["timestamp_type"] == "log_append"
    assert row["published_at"].timestamp() * 1_000 == metadata["timestamp"]


def test_a_tombstone_is_an_empty_message_with_a_mark(kafka, kafka_topic, kafka_server):
    source = kafka(topic := kafka_topic())
    producer = Producer({"bootstrap.servers": kafka_server})
    producer.produce(topic, None, key=b"gone")
    producer.produce(topic, b"", key=b"here")
    producer.flush()
    tombstone, empty = received(source, "a", concurrency=1)
    assert tombstone["data"] == empty["data"] == b""
    assert json.loads(tombstone["metadata"])["tombstone"] is True
    assert "tombstone" not in json.loads(empty["metadata"])

    source.send(
        [tombstone["data"], empty["data"], b"new"],
        [json.loads(row["metadata"]) for row in (tombstone, empty, tombstone)],
    )

    again = received(source, "b", concurrency=1)
    assert [row["data"] for row in again] == [b"", b"", b"new"]
    assert [json.loads(row["metadata"]).get("tombstone", False) for row in again] == [True, False, False]


def test_a_header_name_that_is_not_utf_8_loses_no_message(kafka, kafka_topic, kafka_server):
    source = kafka(topic := kafka_topic())
    known = {"headers": {"name": "value"}}
    source.send([b"before"] * 100, [known] * 100)
    send_header(kafka_server, topic, b"gr\xfc\xdfe")
    source.send([b"after"], [known])

    rows = received(source, "a")

    assert [row["data"] for row in rows] == [*[b"before"] * 100, b"one", b"after"]
    headers = [json.loads(row["metadata"])["headers"] for row in rows]
    assert headers == [*[[["name", "value"]]] * 100, None, [["name", "value"]]]


def send_header(server: str, topic: str, name: bytes) -> None:
    """Send a message with a header by librdkafka itself: the Python client accepts only text as names."""
    library = ctypes.CDLL(cimpl.__file__)
    for function in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_headers_new"):
        getattr(library, function).restype = ctypes.c_void_p
    error = ctypes.create_string_buffer(512)
    options = ctypes.c_void_p(library.rd_kafka_conf_new())
    library.rd_kafka_conf_set(options, b"bootstrap.servers", server.encode(), error, len(error))
    producer = ctypes.c_void_p(library.rd_kafka_new(0, options, error, len(error)))
    headers = ctypes.c_void_p(library.rd_kafka_headers_new(1))
    library.rd_kafka_header_add(headers, name, ctypes.c_ssize_t(-1), b"value", ctypes.c_ssize_t(-1))
    to, value, flags, beside, end = map(ctypes.c_int, (1, 4, 7, 10, 0))
    copied, size = ctypes.c_int(2), ctypes.c_size_t(3)
    message = (to, topic.encode(), value, b"one", size, flags, copied, beside, headers, end)
    assert library.rd_kafka_producev(producer, *message) == 0
    assert library.rd_kafka_flush(producer, 30_000) == 0
    library.rd_kafka_destroy(producer)


def test_demand_is_shared_fairly_over_partitions_and_topics(kafka, kafka_topic):
    few, many = kafka_topic(), kafka_topic(2)
    source = kafka(few, many)
    source.send([b""] * 4, [{"topic": few}] * 4)
    source.send([b""] * 40, [{"topic": many, "partition": n % 2} for n in range(40)])
    rows = received(source, "a", demand=24)
    assert [sum(row["partition"] == name for row in rows) for name in (f"{few}:0", f"{many}:0", f"{many}:1")] == [
        4, 10, 10,
    ]  # fmt: skip
    with pytest.raises(SourceError, match="names no topic, and the source reads several"):
        source.send([b""])


def test_ranges_with_others_between_them_are_read_once_each(kafka, kafka_topic):
    """Offsets released by crashed receives lie between offsets that other receives have leased."""
    source = kafka(kafka_topic())
    source.send(b"%d" % number for number in range(5_000))
    for nth in range(5):
        assert len(received(source, f"r{nth}", demand=1_000)) == 1_000
    for nth in (0, 2, 4):
        source.abandon(f"r{nth}", list)
    rows = received(source, "again", concurrency=1)
    assert offsets(rows) == [*range(1_000), *range(2_000, 3_000), *range(4_000, 5_000)]
    assert all(row["redelivered"] for row in rows)


# Where reading begins


def test_latest_and_a_timestamp_skip_older_messages(kafka, kafka_topic):
    topic = kafka_topic()
    kafka(topic).send([b"old"])
    time.sleep(0.05)
    since = f"timestamp:{datetime.now(UTC).isoformat()}"
    time.sleep(0.05)
    kafka(topic).send([b"new"])

    def seen(policy: str) -> list[bytes]:
        source = kafka(topic, name=policy, group_id=f"{topic} {policy}", offset_reset_policy=policy)
        return [row["data"] for row in received(source, policy)]

    assert seen("latest") == []
    assert seen(since) == [b"new"]
    assert seen("timestamp:2999-01-01T00:00:00Z") == []
    assert seen("earliest") == [b"old", b"new"]


@pytest.mark.parametrize("lost", ["oldest", "newest", "time"])
def test_a_partition_whose_leader_does_not_answer_is_left_out_until_it_does(kafka, kafka_topic, monkeypatch, lost):
    source = kafka(kafka_topic(2), offset_reset_policy="timestamp:2999-01-01T00:00:00Z")
    source.send([b"0", b"1"], [{"partition": 0}, {"partition": 1}])
    asked = Cluster.offsets

    def offsets(cluster: Cluster, partitions: Any, at: int, **more: Any) -> Any:
        answers = asked(cluster, partitions, at, **more)
        if {OFFSET_BEGINNING: "oldest", OFFSET_END: "newest"}.get(at, "time") != lost:
            return answers
        return lambda: {partition: offset for partition, offset in answers().items() if partition.partition == 0}

    with monkeypatch.context() as patch:
        patch.setattr(Cluster, "offsets", offsets)
        assert [extent.begin for extent in source.extents().values()] == [1]
    assert [extent.begin for extent in source.extents().values()] == [1, 1]


def test_a_partition_added_later_is_read_from_its_beginning(kafka, kafka_topic, kafka_server):
    topic = kafka_topic()
    source = kafka(topic, offset_reset_policy="latest")
    assert source.backlog().messages == 0
    admin = AdminClient({"bootstrap.servers": kafka_server})
    admin.create_partitions([NewPartitions(topic, 2)])[topic].result(10)
    patiently_send(source, [b"first"], {"partition": 1})
    assert [(row["data"], row["redelivered"]) for row in received(source, "a")] == [(b"first", False)]


def test_a_pattern_matches_new_topics_but_not_internal_topics(kafka, kafka_topic, kafka_server):
    first = kafka_topic()
    source = kafka(topic_pattern=f"{first}|.*-{first}|__.*", offset_reset_policy="latest")
    assert source.backlog().messages == 0
    second = kafka_topic(name=f"new-{first}")
    source.send([b"1", b"2"], [{"topic": first}, {"topic": second}])
    assert {row["partition"] for row in received(source, "a")} == {f"{first}:0", f"{second}:0"}


def test_a_recreated_topic_is_a_different_topic(kafka, kafka_topic, kafka_server):
    source = kafka(topic := kafka_topic())
    source.send([b"1", b"2"])
    before = received(source, "a")
    delete_topic(kafka_server, topic)
    kafka_topic(name=topic)
    patiently_send(source, [b"1"])

    after = received(source, "b")
    source.finish("a")
    assert lag(source, topic) == [1], "the offsets of the topic that is gone are told to nobody"
    source.finish("b")

    assert [row["data"] for row in after] == [b"1"]
    assert not {row["message_id"] for row in before} & {row["message_id"] for row in after}
    assert not after[0]["redelivered"]
    assert lag(source, topic) == [0]


def test_offsets_set_by_an_operator_are_followed(kafka, kafka_topic, caplog):
    source = kafka(topic := kafka_topic())
    source.send(b"%d" % number for number in range(10))
    received(source, "a")
    source.finish("a")

    set_group(source, topic, 4)
    back = received(source, "b")
    source.finish("b")
    source.send(b"%d" % number for number in range(10))
    set_group(source, topic, 15)
    forward = received(source, "c")

    assert offsets(back) == [*range(4, 10)]
    assert all(row["redelivered"] for row in back)
    assert offsets(forward) == [*range(15, 20)]
    assert [text.split(" ", 2)[2] for text in caplog.messages if " was set " in text] == [
        "was set back from offset 10 to 4", "was set forward from offset 10 to 15",
    ]  # fmt: skip


# What is missing in a range


def test_messages_of_aborted_transactions_are_skipped_and_ranges_still_end(kafka, kafka_topic, kafka_server):
    source = kafka(topic := kafka_topic())
    everything = kafka(topic, name="everything", group_id=f"{topic}-all", isolation_level="read_uncommitted")
    producer = Producer({"bootstrap.servers": kafka_server, "transactional.id": topic})
    producer.init_transactions(30)
    for number in range(6):
        producer.begin_transaction()
        producer.produce(topic, b"%d" % number)
        producer.flush()
        producer.commit_transaction(30) if number % 2 else producer.abort_transaction(30)
    producer.begin_transaction()
    producer.produce(topic, b"open")
    producer.flush()

    assert source.backlog().messages == 12, "each message, and the marker that ends its transaction"
    assert [row["data"] for row in received(source, "a", concurrency=1)] == [b"1", b"3", b"5"]
    assert [row["data"] for row in received(everything, "e", concurrency=3)] == [b"%d" % n for n in range(6)] + [
        b"open"
    ]
    source.finish("a")
    assert source.backlog().messages == 0, "what is in an open transaction does not wait yet"
    producer.commit_transaction(30)
    until(lambda: source.backlog().messages == 2)  # a broker may answer before it has written the marker
    assert [row["data"] for row in received(source, "b")] == [b"open"]
    source.finish("b")
    assert lag(source, topic) == [0]


def test_a_receive_of_only_gaps_ends_and_advances_the_position(kafka, kafka_topic, kafka_server):
    source = kafka(topic := kafka_topic())
    producer = Producer({"bootstrap.servers": kafka_server, "transactional.id": topic})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"never")
    producer.flush(30)  # or what is not sent yet never comes to have an offset
    producer.abort_transaction(30)
    until(lambda: source.backlog().messages == 2)
    assert received(source, "a") == []
    source.finish("a")
    assert lag(source, topic) == [0]


def test_a_compacted_topic_is_read_with_its_gaps(kafka, kafka_topic, kafka_server):
    settings = {"cleanup_policy": "compact", "segment_ms": "200", "min_cleanable_dirty_ratio": "0.01"}
    source = kafka(topic := kafka_topic(**settings, min_compaction_lag_ms="0", max_compaction_lag_ms="300"))
    for number in range(20):
        source.send([b"%d" % number] * 10, [{"key": f"k{number % 2}"}] * 10)
        time.sleep(0.05)
    time.sleep(0.3)
    source.send([b"rolls the segment"], [{"key": "last"}])
    until(lambda: len(offsets_there(kafka_server, topic)) < 100)
    there = offsets_there(kafka_server, topic)

    rows = received(source, "a", concurrency=3)

    assert set(offsets(rows)) <= set(there), "no message comes that is not there"
    assert {row["data"] for row in rows} >= {b"18", b"19", b"rolls the segment"}
    source.finish("a")
    assert source.backlog().messages == 0
