"""Payloads in S3, with servers of SQS and S3: pointers of SQS's extended clients, failures, outages, deletion."""

import json
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest
from botocore.session import Session

from pipeline_platform import Message, Pipeline, Processors, Producer, Share, TableBatcher
from pipeline_platform.connectors.sqs import S3Payloads, SqsSource, s3_payloads
from pipeline_platform.connectors.sqs.s3_payloads import MissingPayloadError, S3AwayError, S3Error
from pipeline_platform.model.failure import PayloadError
from pipeline_platform.run.finish import finish_others
from pipeline_platform.source.pauses import Patience
from pipeline_platform.tasks.handle import row_lane
from pipeline_platform.testing import test_batch as trial
from servers.server import free_ports
from servers.sqs import ENVIRONMENT
from tests.fixtures.flow import finish, flow_of, handled, publish, rows, run
from tests.fixtures.small_lake import Row, batch_of

POINTER = "software.amazon.payloadoffloading.PayloadS3Pointer"
LEGACY = "com.amazon.sqs.javamessaging.MessageS3Pointer"
SHORT = Patience(least_s=0.01, most_s=0.05, within_s=0.2)


def pointer(bucket: str, key: str, kind: str = POINTER) -> str:
    return json.dumps([kind, {"s3BucketName": bucket, "s3Key": key}])


def message_of(payload: str | bytes) -> Message:
    data = payload if isinstance(payload, bytes) else payload.encode()
    return next(Message.each(batch_of(data)))


@pytest.fixture
def endpoint(s3_server, monkeypatch) -> str:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture
def s3_client(endpoint):
    with closing(Session().create_client("s3", endpoint_url=endpoint)) as client:
        yield client


@pytest.fixture
def bucket(s3_client) -> str:
    s3_client.create_bucket(Bucket=(name := f"payloads-{uuid4().hex[:8]}"))
    return name


@pytest.fixture
def payloads(endpoint, bucket) -> S3Payloads:
    return S3Payloads(buckets=(bucket,), endpoint_url=endpoint, max_bytes=100)


@pytest.fixture
def put(s3_client, bucket):
    """Return a function that stores an object, and returns a pointer to it."""

    def put(content: bytes, kind: str = POINTER) -> str:
        s3_client.put_object(Bucket=bucket, Key=(key := f"folder/{uuid4().hex}"), Body=content)
        return pointer(bucket, key, kind)

    return put


@pytest.mark.parametrize("kind", [POINTER, LEGACY])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")], ids=["as Java", "as Python"])
def test_a_pointer_of_an_extended_client_is_resolved(payloads, put, kind, separators):
    body = json.dumps(json.loads(put(b"the payload", kind)), separators=separators)

    resolved = payloads.resolve(message_of(body))

    assert resolved.data == b"the payload"


@pytest.mark.parametrize(
    "payload",
    [
        b'{"number": 1}',
        b"\xff\xfe",
        b"",
        b"[1, 2]",
        b'["S3Pointer"',
        b'{"class": "PayloadS3Pointer"}',
        b'["S3Pointer", {}]',
    ],
)
def test_a_payload_without_a_pointer_stays_as_it_is(payload):
    message = message_of(payload)

    assert S3Payloads(buckets=("a-bucket",)).resolve(message) is message


@pytest.mark.parametrize(
    "place",
    [
        None,
        {},
        {"s3BucketName": "a-bucket"},
        {"s3BucketName": 1, "s3Key": "k"},
        {"s3BucketName": "a-bucket", "s3Key": ""},
        {"s3BucketName": "a-bucket", "s3Key": "k" * 1_025},
    ],
)
def test_a_pointer_that_is_not_valid_fails_its_message(place):
    with pytest.raises(PayloadError, match="no valid s3BucketName and s3Key"):
        S3Payloads(buckets=("a-bucket",)).resolve(message_of(json.dumps([POINTER, place])))


def test_a_pointer_into_another_bucket_is_not_followed():
    with pytest.raises(PayloadError, match=r"s3://secrets/key: is not in one of the buckets a-bucket"):
        S3Payloads(buckets=("a-bucket",)).resolve(message_of(pointer("secrets", "key")))


def test_a_missing_object_and_one_that_is_too_large_fail_with_their_names(payloads, bucket, put):
    large = put(b"x" * 101)
    with pytest.raises(MissingPayloadError, match=f"s3://{bucket}/gone: cannot be read: NoSuchKey"):
        payloads.resolve(message_of(pointer(bucket, "gone")))
    with pytest.raises(PayloadError, match=f"s3://{bucket}/folder/.*: has 101 bytes, and max_bytes allows 100"):
        payloads.resolve(message_of(large))
    assert payloads.resolve(message_of(put(b"x" * 100))).data == b"x" * 100


def test_a_missing_bucket_fails_the_message(endpoint):
    with pytest.raises(MissingPayloadError, match=r"s3://no-such-bucket/key: cannot be read: NoSuchBucket"):
        S3Payloads(buckets=("no-such-bucket",), endpoint_url=endpoint).resolve(
            message_of(pointer("no-such-bucket", "key"))
        )


def test_wrong_credentials_end_the_run_without_quoting_them(payloads, put, monkeypatch):
    body = put(b"1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2-hunter2")

    with pytest.raises(S3Error) as refused:
        payloads.resolve(message_of(body))

    assert not isinstance(refused.value, S3AwayError)
    assert "hunter2" not in str(refused.value)


def test_an_unavailable_server_is_asked_again_and_ends_the_run(monkeypatch, endpoint):
    monkeypatch.setattr(s3_payloads, "USUAL", SHORT)
    (port,) = free_ports(1)
    away, body = S3Payloads(buckets=("a-bucket",), endpoint_url=f"http://127.0.0.1:{port}"), pointer("a-bucket", "key")

    with pytest.raises(S3AwayError, match="is unavailable") as first:
        away.resolve(message_of(body))
    with pytest.raises(S3AwayError) as second:
        away.resolve(message_of(body))

    assert second.value is first.value, "another thread does not wait again"


def test_deleted_objects_are_gone_and_may_be_deleted_again(payloads, put):
    messages = [message_of(put(b"1")), message_of(put(b"2")), message_of(b"no pointer")]

    payloads.delete(messages)
    payloads.delete(messages)

    for message in messages[:2]:
        with pytest.raises(MissingPayloadError):
            payloads.resolve(message)


def test_a_deletion_that_fails_names_the_bucket(payloads, put, bucket, monkeypatch):
    message = message_of(put(b"1"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")

    with pytest.raises(RuntimeError, match="no valid credentials"):
        payloads.delete([message])


class Large(Pipeline):
    """Stores payloads that are in S3, and deletes their objects."""

    name = "large"
    producer = Producer(source="queue")
    processors = Processors(concurrency=1, threads=3, message_timeout=timedelta(seconds=5))
    batchers = {"kept": TableBatcher(schema=Row)}
    payloads: S3Payloads

    def handle_message(self, message: Message, context: Any) -> Message:
        return message.put(Row(text=self.payloads.resolve(message).data.decode()), batcher="kept")


class Deleting(Large):
    """The same, and deletes objects."""

    def acknowledge(self, ack_ref: str, successful: list[Message], failed: list[Message], context: Any) -> None:
        self.payloads.delete(successful)


class Fresh(SqsSource):
    """A queue whose messages were never delivered before: otherwise, Spark looks for duplicates."""

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        for batch in super().read(share, receive_id):
            again = batch.schema.get_field_index("redelivered")
            yield batch.set_column(again, batch.schema.field(again), pa.repeat(False, batch.num_rows))


@pytest.fixture
def flow(tasks_here, tmp_path, sqs_server, sqs_queue, payloads, monkeypatch):
    """Return a function that builds the flow of a pipeline and its queue."""
    monkeypatch.setattr(Large, "payloads", payloads, raising=False)
    source = Fresh(name="queue", queue_url=sqs_queue(), endpoint_url=sqs_server, message_attribute_names=("All",))
    monkeypatch.setattr(s3_payloads, "USUAL", SHORT)
    return lambda pipeline: flow_of(tmp_path, pipeline, source)


def send(flow: Any, *bodies: str) -> None:
    """Send bodies with the attribute of an extended client."""
    size = {"message_attributes": {"ExtendedPayloadSize": {"DataType": "Number", "StringValue": "11"}}}
    flow.source.send([body.encode() for body in bodies], [size] * len(bodies))


def test_a_run_stores_payloads_and_keeps_the_pointers(flow, put, bucket):
    large = flow(Large)
    bodies = [put(b"one"), put(b"two"), pointer(bucket, "gone"), "small"]
    send(large, *bodies)

    run(large)

    assert sorted(rows(large, "kept")["text"]) == ["one", "small", "two"]
    (failure,) = rows(large, "failed").to_dicts()
    assert (failure["kind"], failure["stage"]) == ("MissingPayloadError", "handle_message")
    assert f"s3://{bucket}/gone" in failure["reason"]
    assert {data.decode() for data in rows(large, "messages")["data"]} == set(bodies)
    run(large, "messages")
    assert sorted(rows(large, "kept")["text"]) == ["one", "small", "two"], "the objects are still there"


def test_an_unavailable_server_fails_the_run_and_no_message(flow, put, monkeypatch):
    large, body = flow(Large), put(b"one")
    (port,) = free_ports(1)
    away = S3Payloads(buckets=Large.payloads.buckets, endpoint_url=f"http://127.0.0.1:{port}")
    send(large, body, body)
    with monkeypatch.context() as outage:
        outage.setattr(Large, "payloads", away)
        with pytest.raises(RuntimeError, match="S3: is unavailable for s3://"):
            handled(large)
    (abandoned,) = large.ledger.unfinished()
    large.control.end(abandoned)
    finish_others(large)
    assert rows(large, "outcomes").height == 0

    run(large)

    assert rows(large, "kept")["text"].to_list() == ["one", "one"]
    assert rows(large, "failed").height == 0


def test_objects_are_deleted_after_publication_if_the_class_does_so(flow, put, s3_client, bucket):
    deleting = flow(Deleting)
    send(deleting, put(b"one"), put(b"two"), put(b"x" * 101))
    receive = handled(deleting)
    assert s3_client.list_objects_v2(Bucket=bucket)["KeyCount"] == 3
    publish(deleting, receive)

    finish(deleting, receive)

    assert s3_client.list_objects_v2(Bucket=bucket)["KeyCount"] == 1, "the object of the failed message stays"


def test_payloads_that_were_fetched_are_recorded_in_portions(payloads, put, monkeypatch):
    monkeypatch.setattr(row_lane, "HELD_BYTES", 100)
    monkeypatch.setattr(Large, "payloads", payloads, raising=False)
    sizes = list[int]()
    monkeypatch.setattr(row_lane.Handler, "portions", _counted(row_lane.Handler.portions, sizes))

    done = trial(Large, [put(b"x" * 60) for _ in range(6)])

    assert len(done.successful) == 6
    assert len(sizes) > 1


def _counted(portions: Any, sizes: list[int]) -> Any:
    def counted(self: Any, batch: Any) -> Any:
        for portion in portions(self, batch):
            sizes.append(len(portion))
            yield portion

    return counted


def test_a_transform_that_fetches_loses_no_message(payloads, put, monkeypatch):
    monkeypatch.setattr(row_lane, "HELD_BYTES", 100)
    monkeypatch.setattr(Large, "payloads", payloads, raising=False)

    class Early(Large):
        name = "early"

        def transform(self, event: Message) -> Message:
            return self.payloads.resolve(event)

        def handle_message(self, message: Message, context: Any) -> Message:
            return message.put(Row(text=message.data.decode()), batcher="kept")

    done = trial(Early, [put(b"x" * 60) for _ in range(6)])

    assert len(done.successful) == 6


class InBlocks(Pipeline):
    """Resolves the pointers of a block."""

    name = "in_blocks"
    producer = Producer(source="queue")
    batchers = {"kept": TableBatcher(schema=Row)}

    def __init__(self, payloads: S3Payloads | None = None) -> None:
        self.payloads = payloads or S3Payloads(buckets=("a-bucket",))

    def handle_messages(self, messages: pa.Table, context: Any) -> pa.Table:
        block = self.payloads.resolve_block(messages)
        block = block.append_column("text", block["data"].cast(pa.string()))
        return block.set_column(block.schema.get_field_index("batcher"), "batcher", pa.repeat("kept", len(block)))


def test_the_pointers_of_a_block_are_resolved_and_each_fails_alone(payloads, bucket, put):
    given = [put(b"first"), "plain", pointer(bucket, "gone"), pointer("secrets", "key"), put(b"last")]

    done = trial(InBlocks(payloads), given)

    assert [message.data["text"] for message in done.successful] == ["first", "plain", "last"]
    assert [message.failure.kind for message in done.failed] == ["MissingPayloadError", "PayloadError"]


def test_a_block_whose_payloads_are_too_large_is_handled_in_halves(payloads, put, monkeypatch):
    monkeypatch.setattr(s3_payloads, "_BLOCK_BYTES", 100)
    given = [put(f"{number}".encode() * 60) for number in range(5)]

    done = trial(InBlocks(payloads), given)

    assert [message.data["text"] for message in done.successful] == [f"{number}" * 60 for number in range(5)]


def test_an_outage_ends_the_run_of_a_block(monkeypatch):
    monkeypatch.setattr(s3_payloads, "USUAL", SHORT)
    away = S3Payloads(buckets=("a-bucket",), endpoint_url=f"http://127.0.0.1:{free_ports(1)[0]}")

    with pytest.raises(S3AwayError):
        trial(InBlocks(away), [pointer("a-bucket", "key")] * 20)
