"""SQS as a source: requests, deliveries and acknowledgements."""

import json
import logging
import os
import threading
from unittest.mock import Mock

import boto3
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws

from pipeline_platform.connectors.sqs import SqsSource
from pipeline_platform.model.message import DELIVERIES
from pipeline_platform.source.contract import Share, SourceError
from servers import sqs as local
from tests.fixtures.received import received

URL = "https://sqs.eu-west-1.amazonaws.com/123456789012/flights"


def source(**options):
    return SqsSource(**{"name": "flights", "queue_url": URL, **options})


# Receiving, on moto


@pytest.fixture
def aws(monkeypatch):
    """Moto's SQS in this process, and a client of it. One thread per task: Moto's backend is not thread-safe."""
    monkeypatch.setattr("pipeline_platform.source.calls.THREADS", 1)
    with mock_aws():
        yield boto3.client("sqs", region_name="eu-west-1")


@pytest.fixture
def queue(aws):
    return aws.create_queue(QueueName="flights")["QueueUrl"]


def calls(source, operation):
    """Return a list that records the parameters of each following call of a source."""
    made = []
    source._client.meta.events.register(
        f"provide-client-params.sqs.{operation}", lambda params, **_: made.append(dict(params))
    )
    return made


def send(aws, queue, count):
    for i in range(count):
        aws.send_message(QueueUrl=queue, MessageBody=f"message {i}")


def test_three_short_polls_or_a_long_poll_end_a_share(aws, queue):
    short, long = source(queue_url=queue), source(queue_url=queue, wait_time_seconds=1)
    polls, waits = calls(short, "ReceiveMessage"), calls(long, "ReceiveMessage")

    assert received(short, 10) == []
    assert received(long, 10) == []
    assert [call["WaitTimeSeconds"] for call in polls] == [0, 0, 0]
    assert [call["WaitTimeSeconds"] for call in waits] == [1]


def test_a_call_requests_ten_messages_or_the_rest_of_the_demand(aws, queue):
    asked = calls(flights := source(queue_url=queue), "ReceiveMessage")
    received(flights, 30)
    options = {"QueueUrl": queue, "MaxNumberOfMessages": 10, "WaitTimeSeconds": 0, "VisibilityTimeout": 900}
    names = {"MessageSystemAttributeNames": ["ApproximateReceiveCount", "SentTimestamp"], "MessageAttributeNames": []}
    assert asked[0] == options | names


def test_rows_contain_messages_and_their_sqs_metadata(aws, queue):
    sent = aws.send_message(
        QueueUrl=queue,
        MessageBody="Żółć",
        MessageAttributes={
            "trace": {"DataType": "String", "StringValue": "t1"},
            "raw": {"DataType": "Binary", "BinaryValue": b"\x00\xff"},
            "other": {"DataType": "Number", "StringValue": "1"},
        },
    )
    flights = source(queue_url=queue, attribute_names=["SenderId"], message_attribute_names=["trace", "raw"])

    (batch,) = flights.read(Share(messages=1), "r1")

    assert batch.schema == DELIVERIES
    (row,) = batch.to_pylist()
    metadata = json.loads(row.pop("metadata"))
    assert row.pop("ack_id")
    assert row.pop("published_at").timestamp() * 1_000 == int(metadata["attributes"]["SentTimestamp"])
    assert row == {
        "source": "flights",
        "message_id": sent["MessageId"],
        "data": "Żółć".encode(),
        "ack_ref": queue,
        "attempt": 1,
        "redelivered": True,
        "partition": None,
        "sequence": None,
    }
    assert metadata["md5_of_body"] == sent["MD5OfMessageBody"]
    assert metadata["attributes"].keys() == {"ApproximateReceiveCount", "SenderId", "SentTimestamp"}
    assert metadata["message_attributes"] == {
        "trace": {"DataType": "String", "StringValue": "t1"},
        "raw": {"DataType": "Binary", "BinaryValue": "AP8="},
    }


def test_a_corrupt_body_is_skipped_and_loses_no_other_message(aws, queue, caplog, monkeypatch):
    send(aws, queue, 3)
    flights = source(queue_url=queue)
    receive = flights._client.receive_message

    def damaged(**params):
        reply = receive(**params)
        for message in reply.get("Messages", []):
            message["Body"] += "!" if message["Body"] == "message 1" else ""
        return reply

    monkeypatch.setattr(flights._client, "receive_message", damaged)
    with caplog.at_level(logging.WARNING):
        assert sorted(row["data"] for row in received(flights, 3)) == [b"message 0", b"message 2"]
    assert "corrupt body" in caplog.text


def failing(source, monkeypatch, operation, code, message=""):
    """Let an operation of a source's client fail with an error of AWS."""
    error = ClientError({"Error": {"Code": code, "Message": message}}, operation)
    monkeypatch.setattr(source._client, operation, Mock(side_effect=error))


# Acknowledging, on moto


STALE = {"SenderFault": True, "Code": "ReceiptHandleIsInvalid", "Message": "The input receipt handle is invalid."}


@pytest.mark.parametrize(
    ("failure", "lost"),
    [
        (STALE, True),
        (STALE | {"Code": "AWS.SimpleQueueService.MessageNotInflight"}, True),
        (STALE | {"Code": "InvalidParameterValue", "Message": "Reason: The receipt handle has expired."}, True),
        (STALE | {"Code": "InvalidParameterValue", "Message": "Total VisibilityTimeout is beyond the limit"}, False),
    ],
)
@pytest.mark.parametrize(
    ("act", "operation"), [("ack", "delete_message_batch"), ("release", "change_message_visibility_batch")]
)
def test_refused_entries_are_returned_and_an_expired_handle_is_lost(
    aws, queue, monkeypatch, failure, lost, act, operation
):
    flights = source(queue_url=queue)
    monkeypatch.setattr(flights._client, operation, lambda **_: {"Failed": [{"Id": "1", **failure}]})

    (refused,) = getattr(flights, act)(queue, ["a", "b"])

    assert (refused.ack_id, refused.lost) == ("b", lost)
    assert refused.reason.endswith(failure["Message"])


def test_messages_of_a_deleted_queue_are_lost_after_it_is_replaced(aws, queue):
    refused = source(queue_url=queue).ack(queue + "-before", ["a", "b"])
    assert [(entry.ack_id, entry.lost) for entry in refused] == [("a", True), ("b", True)]
    assert refused[0].reason.endswith("flights-before was deleted")


def test_a_delay_above_the_maximum_of_sqs_is_reduced(aws, queue):
    send(aws, queue, 12)
    flights = source(queue_url=queue)
    changes = calls(flights, "ChangeMessageVisibilityBatch")

    flights.release(queue, [row["ack_id"] for row in received(flights, 12)], delay_s=100_000)

    assert [len(call["Entries"]) for call in changes] == [10, 2]
    assert {entry["VisibilityTimeout"] for call in changes for entry in call["Entries"]} == {42_300}


@pytest.mark.parametrize(("per_call", "order"), [(10, ["0", "1", "2", "0", "3"]), (1, ["0", "0", "1", "2", "3"])])
def test_a_released_message_of_a_group_is_redelivered_after_its_batch_and_before_others(aws, per_call, order):
    url = aws.create_queue(QueueName="orders.fifo", Attributes={"FifoQueue": "true"})["QueueUrl"]
    orders = source(queue_url=url, max_number_of_messages=per_call)
    attributes = [{"MessageGroupId": "group", "MessageDeduplicationId": str(number)} for number in range(4)]
    orders.send([b"0", b"1", b"2", b"3"], [{"attributes": each} for each in attributes])

    came, is_released = [], False
    while rows := received(orders, 3):
        came += [row["data"].decode() for row in rows]
        if not is_released:
            orders.release(url, [rows.pop(0)["ack_id"]])
            is_released = True
        orders.ack(url, [row["ack_id"] for row in rows])
    assert came == order


# Configuration errors are raised before a lease


@pytest.fixture
def no_settings(monkeypatch, tmp_path):
    """Remove all AWS settings: no credentials, no region, no profile."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return monkeypatch


def test_the_region_is_that_of_the_queue(no_settings):
    assert source()._client.meta.region_name == "eu-west-1"
    assert source(region_name="us-east-2")._client.meta.region_name == "us-east-2"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"queue_url": "http://127.0.0.1:1/1/flights"}, r"region_name is unset.*Set region_name or AWS_DEFAULT_REGION"),
        ({}, r"no valid credentials.*AWS_ACCESS_KEY_ID.*a profile or a role"),
        ({"profile_name": "nobody"}, r"no valid credentials.*\(ProfileNotFound; profile_name nobody\)"),
    ],
)
def test_missing_settings_are_named(no_settings, options, said):
    with pytest.raises(SourceError, match=said):
        source(**options).check_ready()


def test_an_endpoint_of_the_environment_is_named(no_settings, sqs_server):
    for name, value in local.ENVIRONMENT.items():
        no_settings.setenv(name, value)
    no_settings.setenv("AWS_ENDPOINT_URL_SQS", sqs_server)
    with pytest.raises(SourceError, match=f"does not exist .*endpoint_url unset, so {sqs_server}"):
        source(queue_url=f"{sqs_server}/123456789012/nowhere").check_ready()


def test_an_endpoint_that_does_not_answer_is_named(no_settings):
    for name, value in local.ENVIRONMENT.items():
        no_settings.setenv(name, value)
    no_settings.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(SourceError, match=r"endpoint_url \(http://127.0.0.1:1\) does not answer"):
        source(endpoint_url="http://127.0.0.1:1").check_ready()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("InvalidClientTokenId", r"no valid credentials .*\(InvalidClientTokenId"),
        ("SignatureDoesNotMatch", r"no valid credentials .*\(SignatureDoesNotMatch"),
        ("ExpiredToken", r"no valid credentials .*\(ExpiredToken"),
        ("InvalidSecurity", r"no valid credentials .*\(InvalidSecurity"),
        ("AccessDenied", "Allow sqs:GetQueueAttributes"),
    ],
)
def test_errors_contain_a_fix_and_never_quote_rejected_credentials(aws, monkeypatch, code, said):
    flights = source()
    failing(flights, monkeypatch, "get_queue_attributes", code, "AKIA0123 is wrong")
    with pytest.raises(SourceError, match=said) as told:
        flights.check_ready()
    assert ("AKIA" in str(told.value)) == (code == "AccessDenied")


# A real server: threads, processes, its own clock


def test_a_long_poll_waits_for_messages(sqs_server, sqs_queue):
    queue = sqs_queue()
    flights = source(queue_url=queue, endpoint_url=sqs_server, wait_time_seconds=5)
    late = threading.Timer(0.5, local.fill, [queue, ["late"]])
    late.start()
    assert [row["data"] for row in received(flights, 1)] == [b"late"]
    late.join()
