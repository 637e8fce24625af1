"""Files that notifications of a bucket name, through SQS and Pub/Sub, each row once."""

import json
from typing import Any
from unittest.mock import Mock
from urllib.parse import quote_plus
from uuid import uuid4

import pytest

from pipeline_platform.connectors.files import FileSource, notifications
from pipeline_platform.connectors.files.catalog import Catalog
from pipeline_platform.connectors.sqs import SqsSource
from pipeline_platform.lake.storage import Lake
from pipeline_platform.source.contract import SourceAwayError
from pipeline_platform.sql.database import Database
from servers import pubsub, sqs
from tests.fixtures.files import deliveries, lines, source_at

TEST_EVENT = json.dumps({"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": "lake"}).encode()


def event(*keys: str, name: str = "ObjectCreated:Put", bucket: Any = "lake") -> bytes:
    """Return a notification of S3 with a record for each key."""
    of = [{"bucket": {"name": bucket}, "object": {"key": quote_plus(key, safe="/"), "sequencer": "0"}} for key in keys]
    return json.dumps({"Records": [{"eventSource": "aws:s3", "eventName": name, "s3": s3} for s3 in of]}).encode()


@pytest.fixture
def root(s3):
    return Lake(root=f"s3://lake/{uuid4().hex[:8]}/incoming", storage_options=s3)


@pytest.fixture
def queue(sqs_queue, sqs_server, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", sqs_server)
    monkeypatch.setenv("AWS_REGION", sqs.REGION)
    return sqs_queue()


@pytest.fixture
def source(tmp_path, root, queue, s3):
    options = {"notifications": queue, "storage_options": s3, "pattern": "day/*", "list_every_s": None}
    return source_at(tmp_path, root.root, list_root=False, **options)


def left(queue: str) -> int:
    """Return the number of messages in a queue, leased ones included."""
    endpoint = queue.rpartition("/")[0].rpartition("/")[0]
    attributes = sqs.client(endpoint).get_queue_attributes(QueueUrl=queue, AttributeNames=["All"])["Attributes"]
    return sum(int(attributes[f"ApproximateNumberOfMessages{kind}"]) for kind in ("", "NotVisible"))


def key_of(root: Lake, path: str) -> str:
    return f"{root.root.removeprefix('s3://lake/')}/{path}"


def test_named_files_are_read_once_and_their_notifications_removed(source, root, queue, monkeypatch):
    monkeypatch.setattr(FileSource, "_found", lambda _: pytest.fail("listed"))
    names = ["day/a b+ü.jsonl", "day/c.jsonl", "day/d.jsonl"]
    for number, name in enumerate(names):
        root.write(name, lines(number))
    keys = [key_of(root, name) for name in names]
    twice = event(keys[0])
    sns = json.dumps({"Type": "Notification", "Message": event(keys[2]).decode()}).encode()
    sqs.fill(queue, [TEST_EVENT, event(keys[1], keys[0]), twice, twice, sns])

    assert source.backlog().messages == 3
    assert sorted(row["data"] for row in deliveries(source)) == [lines(number).strip() for number in range(3)]
    source.finish("r", list)
    sqs.fill(queue, [twice])

    assert source.backlog().messages == 0
    assert left(queue) == 0


def test_objects_that_are_removed_replaced_or_left_out_are_not_read(source, root, queue):
    for name in ("day/old.jsonl", "day/_hidden.jsonl", "other.jsonl"):
        root.write(name, lines(1))
    root.write("day/old.jsonl", lines(1, 2))
    outside = f"{key_of(root, '').rpartition('/')[0]}-2/day/a.jsonl"
    names = ["day/gone.jsonl", "day/", "day/_hidden.jsonl", "day//a.jsonl", "other.jsonl"]
    created = [event(outside), *(event(key_of(root, name)) for name in names)]
    key = key_of(root, "day/old.jsonl")
    sqs.fill(queue, [*created, event(key, name="ObjectRemoved:Delete"), event(key), event(key)])

    assert [row["sequence"] for row in deliveries(source)] == [1, 2]
    assert left(queue) == 0


def test_other_messages_stay_in_the_queue(source, root, queue, caplog):
    root.write("day/a.jsonl", lines(1))
    key = key_of(root, "day/a.jsonl")
    others = [event(key, bucket="other"), event(key, bucket=[])]
    sqs.fill(queue, [b"an order", b"[1]", b'{"Records": [{}]}', b"[" * 200_000, *others, event(key)])

    assert len(deliveries(source)) == 1
    assert left(queue) == 6
    assert caplog.text.count("stays in the queue: it is not a notification of S3 or Google Cloud Storage") == 4
    for bucket in ("other", "[]"):
        assert caplog.text.count(f"stays in the queue: it names bucket '{bucket}', and root bucket 'lake'") == 1
    assert "an order" not in caplog.text


@pytest.mark.parametrize(
    ("of", "name", "error"),
    [
        (FileSource, "_version", OSError("the store does not answer")),
        (Catalog, "add", SourceAwayError("the catalog does not answer")),
    ],
)
def test_notifications_whose_files_could_not_be_recorded_are_redelivered(
    of, name, error, source, root, queue, monkeypatch
):
    monkeypatch.setattr(notifications, "_LEASE_S", 1)
    root.write("day/a.jsonl", lines(1))
    sqs.fill(queue, [event(key_of(root, "day/a.jsonl"))])
    with monkeypatch.context() as away:
        away.setattr(of, name, Mock(side_effect=error))
        with pytest.raises(SourceAwayError, match="does not answer"):
            source.backlog()

    assert source.wait(20)
    assert [row["sequence"] for row in deliveries(source)] == [1]
    assert left(queue) == 0


@pytest.fixture
def denied(monkeypatch):
    """Deny access to day/a.jsonl."""
    look_up = FileSource._version

    def version(source, path):
        if path == "day/a.jsonl":
            raise OSError("access denied")
        return look_up(source, path)

    monkeypatch.setattr(FileSource, "_version", version)


def test_an_object_that_cannot_be_looked_up_does_not_delay_others(source, root, queue, denied, caplog):
    root.write("day/b.jsonl", lines(1))
    sqs.fill(queue, [event(key_of(root, f"day/{name}.jsonl")) for name in ("a", "b")])

    assert source.backlog().messages == 1
    assert left(queue) == 1
    assert "stays in the queue: access denied" in caplog.text


@pytest.mark.parametrize("look", [lambda source: source.backlog().messages, lambda source: len(deliveries(source))])
@pytest.mark.parametrize("away", ["object", "queue"])
def test_files_in_the_catalog_are_read_while_the_object_or_the_queue_is_unavailable(
    source, root, queue, denied, monkeypatch, caplog, look, away
):
    root.write("day/b.jsonl", lines(1))
    sqs.fill(queue, [event(key_of(root, "day/b.jsonl"))])
    assert source.backlog().messages == 1
    sqs.fill(queue, [event(key_of(root, "day/a.jsonl"))])
    if away == "queue":
        refused = Mock(side_effect=SourceAwayError("access denied"))
        monkeypatch.setattr(SqsSource, "backlog", refused)
        monkeypatch.setattr(SqsSource, "plan", refused)

    assert look(source) == 1
    assert left(queue) == 1
    assert "left notifications in the queue, and continues with the files in the catalog: " in caplog.text
    assert "access denied" in caplog.text


def test_a_listing_finds_the_files_whose_notifications_were_lost(tmp_path, root, queue, s3, monkeypatch):
    options = {"notifications": queue, "storage_options": s3, "list_every_s": None}
    root.write("before.jsonl", lines(1))
    source = source_at(tmp_path, root.root, **options)
    assert [row["redelivered"] for row in deliveries(source)] == [True]
    root.write("lost.jsonl", lines(2))
    root.write("named.jsonl", lines(3))
    sqs.fill(queue, [event(key_of(root, "named.jsonl"))])

    (named,) = deliveries(source_at(tmp_path, root.root, **options))
    assert [named["partition"], named["redelivered"]] == ["named.jsonl", False]

    now = Database.now
    monkeypatch.setattr(Database, "now", lambda *of: now(*of) + 86_401 * 1_000_000)
    source.abandon("r", list)
    assert sorted(row["data"] for row in deliveries(source)) == [lines(number).strip() for number in (1, 2, 3)]


def test_objects_named_through_pubsub_are_read(tmp_path, root, s3, subscribed, pubsub_server, monkeypatch):
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", pubsub_server)
    topic = subscribed()
    source = source_at(tmp_path, root.root, storage_options=s3, list_root=False, notifications=topic._path)
    root.write("a b+c%20.jsonl", lines(1))
    named = {"bucketId": "lake", "objectId": key_of(root, "a b+c%20.jsonl")}
    kinds = ["OBJECT_DELETE", "OBJECT_FINALIZE", "OBJECT_FINALIZE", "OBJECT_METADATA_UPDATE"]
    topic.send([b""] * 4, [{"attributes": {"eventType": kind, **named}} for kind in kinds])

    assert source.backlog().messages is None, "Pub/Sub reports no backlog"
    assert [row["data"] for row in deliveries(source)] == [b'{"number": 1}']
    source.abandon("r", list)
    assert source.backlog()[:1] == (1,)
    assert pubsub.PROJECT in source.notifications
    source.close()


def test_two_sources_of_the_same_notifications_share_a_place():
    made = [
        FileSource(name=name, root=f"s3://{name}", catalog=f"sqlite:///{name}", notifications="https://sqs:80/1/q")
        for name in ("a1b", "b2c")
    ]
    assert made[0].places & made[1].places == {"queue '1/q' at sqs:80"}
