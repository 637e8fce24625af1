"""SQS as a source: what it asks for, what it hands out, and what becomes of acknowledgements."""

import json
import logging
import pickle
import threading
import time
from collections import Counter

import boto3
import pytest
from moto import mock_aws
from pydantic import ValidationError

import resources.sqs
from demo import sqs as local
from pipeline_platform.model.message import DELIVERIES
from pipeline_platform.source.contract import Backlog, Share, SourceError
from resources.sqs import SqsSource
from tests.fixtures.processes import PROCESSES

URL = "https://sqs.eu-west-1.amazonaws.com/123456789012/flights"


def source(**options):
    return SqsSource(**{"name": "flights", "queue_url": URL, **options})


def received(source, demand, concurrency=1):
    """All that one receive reads, as rows."""
    return [
        row
        for share in source.plan(demand, concurrency, "r1")
        for batch in source.read(share, "r1")
        for row in batch.to_pylist()
    ]


# Options


@pytest.mark.parametrize(
    "url", ["", "flights", "sqs.eu-west-1.amazonaws.com/1/flights", "ftp://sqs/1/flights", None, 1]
)
def test_queue_url_must_be_a_url(url):
    with pytest.raises(ValidationError, match=r"queue_url\n"):
        source(queue_url=url)


def test_queue_url_is_required_and_the_error_says_how_to_find_it():
    with pytest.raises(ValidationError, match=r"queue_url\n.*required"):
        SqsSource(name="flights")
    with pytest.raises(ValidationError, match="aws sqs get-queue-url"):
        source(queue_url="https://sqs.eu-west-1.amazonaws.com/")


@pytest.mark.parametrize(
    ("option", "lowest", "highest"),
    [("max_number_of_messages", 1, 10), ("wait_time_seconds", 0, 20), ("visibility_timeout", 1, 43_200)],
)
def test_numbers_keep_to_what_sqs_allows(option, lowest, highest):
    for allowed in (lowest, highest):
        assert getattr(source(**{option: allowed}), option) == allowed
    for refused in (lowest - 1, highest + 1, "many"):
        with pytest.raises(ValidationError, match=rf"{option}\n"):
            source(**{option: refused})


def test_defaults():
    assert source().max_number_of_messages == 10
    assert source().wait_time_seconds == 0
    assert (source().visibility_timeout, source().lease_s) == (900, 900.0)
    assert (source().on_success, source().on_failure) == ("ack", "ack")


def test_the_lease_follows_the_visibility_timeout_and_is_not_set_by_itself():
    assert source(visibility_timeout="1200").lease_s == 1200.0
    with pytest.raises(ValidationError, match="set that one, and leave lease_s out"):
        source(lease_s=60)
    again = SqsSource.model_validate(source(visibility_timeout=77).model_dump())
    assert again == source(visibility_timeout=77), "what is dumped can be loaded"


def test_attributes_are_those_that_sqs_knows():
    every = resources.sqs.AttributeName.__args__
    assert source(attribute_names=list(every)).attribute_names == every
    with pytest.raises(ValidationError, match=r"attribute_names\.1\n.*SenderId"):
        source(attribute_names=["All", "Sender"])
    with pytest.raises(ValidationError, match=r"message_attribute_names\n.*not empty"):
        source(message_attribute_names=["trace", ""])
    with pytest.raises(ValidationError, match=r"message_attribute_names\n"):
        source(message_attribute_names="trace")


@pytest.mark.parametrize("option", ["on_success", "on_failure"])
def test_actions_keep_to_twelve_hours_from_the_receive(option):
    assert getattr(source(**{option: "nack:42300"}), option) == "nack:42300"
    with pytest.raises(ValidationError, match=rf"{option} delays by 42301 s.*use 'nack:42300' or less"):
        source(**{option: "nack:42301"})
    with pytest.raises(ValidationError, match=rf"{option}\n"):
        source(**{option: "reject"})


def test_unknown_options_are_refused():
    with pytest.raises(ValidationError, match="queue_name"):
        source(queue_name="flights")


# Planning: no server is asked


@pytest.mark.parametrize(
    ("demand", "concurrency", "shares"),
    [(100, 2, [50, 50]), (101, 2, [51, 50]), (3, 4, [3]), (25, 4, [9, 8, 8]), (0, 2, [])],
)
def test_shares_are_equal_and_no_smaller_than_a_call_is_good_for(demand, concurrency, shares):
    assert [share.messages for share in source().plan(demand, concurrency, "r1")] == shares


# Receiving, on moto


@pytest.fixture
def aws(monkeypatch):
    """Moto's SQS in this process, and a client of it. One thread a task: its backend is not made for more."""
    monkeypatch.setattr(resources.sqs, "THREADS", 1)
    with mock_aws():
        yield boto3.client("sqs", region_name="eu-west-1")


@pytest.fixture
def queue(aws):
    return aws.create_queue(QueueName="flights")["QueueUrl"]


def calls(source, operation):
    """The parameters of each call that a source makes from here on."""
    made = []
    source._client.meta.events.register(
        f"provide-client-params.sqs.{operation}", lambda params, **_: made.append(dict(params))
    )
    return made


def send(aws, queue, count):
    for i in range(count):
        aws.send_message(QueueUrl=queue, MessageBody=f"message {i}")


def test_less_than_the_demand_is_read_in_one_call_and_the_queue_asked_until_it_seems_empty(aws, queue):
    send(aws, queue, 2)
    flights = source(queue_url=queue)
    asked = calls(flights, "ReceiveMessage")

    rows = received(flights, 10)

    assert sorted(row["data"] for row in rows) == [b"message 0", b"message 1"]
    assert [call["MaxNumberOfMessages"] for call in asked] == [10, 8, 8, 8], "three empty replies end it"


def test_more_than_the_demand_stays_in_the_queue(aws, queue):
    send(aws, queue, 30)
    flights = source(queue_url=queue)
    asked = calls(flights, "ReceiveMessage")

    assert len(received(flights, 25)) == 25
    assert [call["MaxNumberOfMessages"] for call in asked] == [10, 10, 5]
    assert flights.backlog() == Backlog(5)


def test_calls_ask_for_no_more_than_max_number_of_messages(aws, queue):
    send(aws, queue, 6)
    flights = source(queue_url=queue, max_number_of_messages=2)
    asked = calls(flights, "ReceiveMessage")

    assert len(received(flights, 5)) == 5
    assert [call["MaxNumberOfMessages"] for call in asked] == [2, 2, 1]


def test_an_empty_queue_gives_nothing_after_three_short_polls_or_one_long_one(aws, queue):
    short, long = source(queue_url=queue), source(queue_url=queue, wait_time_seconds=1)
    polls, waits = calls(short, "ReceiveMessage"), calls(long, "ReceiveMessage")

    assert received(short, 10) == []
    assert received(long, 10) == []
    assert [call["WaitTimeSeconds"] for call in polls] == [0, 0, 0]
    assert [call["WaitTimeSeconds"] for call in waits] == [1]


def test_what_was_received_is_hidden_for_the_visibility_timeout(aws, queue):
    send(aws, queue, 1)
    flights = source(queue_url=queue, visibility_timeout=1)
    (first,) = received(flights, 1)
    assert received(flights, 1) == []

    time.sleep(1.1)

    (again,) = received(flights, 1)
    assert again["message_id"] == first["message_id"], "the same at every delivery"
    assert again["ack_id"] != first["ack_id"]


def test_rows_hold_what_sqs_said(aws, queue):
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
    published = row.pop("published_at")
    assert published.timestamp() * 1_000 == int(metadata["attributes"]["SentTimestamp"])
    assert row == {
        "source": "flights",
        "message_id": sent["MessageId"],
        "data": "Żółć".encode(),
        "ack_ref": queue,
        "attempt": 1,
        "redelivered": True,
    }
    assert metadata["md5_of_body"] == sent["MD5OfMessageBody"]
    assert metadata["attributes"].keys() == {"ApproximateReceiveCount", "SenderId", "SentTimestamp"}
    assert metadata["attributes"]["ApproximateReceiveCount"] == "1"
    assert metadata["message_attributes"] == {
        "trace": {"DataType": "String", "StringValue": "t1"},
        "raw": {"DataType": "Binary", "BinaryValue": "AP8="},
    }


def test_fifo_groups_and_numbers_are_in_the_metadata(aws):
    queue = aws.create_queue(QueueName="flights.fifo", Attributes={"FifoQueue": "true"})["QueueUrl"]
    for i in range(2):
        aws.send_message(QueueUrl=queue, MessageBody=f"{i}", MessageGroupId="UA", MessageDeduplicationId=f"{i}")

    rows = received(source(queue_url=queue), 2)

    told = [json.loads(row["metadata"])["attributes"] for row in rows]
    assert {t["MessageGroupId"] for t in told} == {"UA"}
    assert len({t["SequenceNumber"] for t in told}) == len(rows)


def test_a_damaged_body_is_left_to_its_lease_and_costs_no_other(aws, queue, caplog, monkeypatch):
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
    assert "damaged on their way" in caplog.text


def test_batches_are_bounded_by_rows_and_by_bytes(aws, queue, monkeypatch):
    send(aws, queue, 45)
    monkeypatch.setattr(resources.sqs, "BATCH_ROWS", 20)
    flights = source(queue_url=queue, visibility_timeout=1)
    assert [batch.num_rows for batch in flights.read(Share(messages=45), "r1")] == [20, 20, 5]

    time.sleep(1.1)
    monkeypatch.setattr(resources.sqs, "BATCH_BYTES", 50)
    assert [batch.num_rows for batch in flights.read(Share(messages=20), "r1")] == [10, 10], "one call's worth each"


def failing_after(calls, error, call):
    """A client's method that fails from a call on."""
    lock, count = threading.Lock(), iter(range(10_000))

    def method(**params):
        with lock:
            number = next(count)
        if number >= calls:
            raise error
        return call(**params)

    return method


def over_limit():
    from botocore.exceptions import ClientError

    return ClientError({"Error": {"Code": "OverLimit", "Message": "Too many messages in flight"}}, "ReceiveMessage")


def test_an_error_after_something_was_received_ends_the_share_with_what_there_is(aws, queue, caplog, monkeypatch):
    send(aws, queue, 30)
    flights = source(queue_url=queue)
    monkeypatch.setattr(
        flights._client, "receive_message", failing_after(1, OSError("gone"), flights._client.receive_message)
    )
    assert len(received(flights, 30)) == 10
    assert "ended after 10 messages" in caplog.text

    with pytest.raises(SourceError, match="OSError: gone"):
        received(flights, 30)


def test_too_many_in_flight_is_an_end_and_no_failure(aws, queue, caplog, monkeypatch):
    flights = source(queue_url=queue)
    monkeypatch.setattr(flights._client, "receive_message", failing_after(0, over_limit(), None))
    assert received(flights, 30) == []
    assert "OverLimit" in caplog.text


# Acknowledging, on moto


def test_messages_are_deleted_in_tens(aws, queue):
    send(aws, queue, 25)
    flights = source(queue_url=queue)
    rows = received(flights, 25)
    deletes = calls(flights, "DeleteMessageBatch")

    assert flights.ack(queue, [row["ack_id"] for row in rows]) == []

    assert [len(call["Entries"]) for call in deletes] == [10, 10, 5]
    assert [entry["Id"] for entry in deletes[1]["Entries"]] == [str(i) for i in range(10)]
    told = aws.get_queue_attributes(QueueUrl=queue, AttributeNames=["All"])["Attributes"]
    assert told["ApproximateNumberOfMessages"] == told["ApproximateNumberOfMessagesNotVisible"] == "0"


def test_nothing_to_acknowledge_is_no_call(aws, queue):
    flights = source(queue_url=queue)
    made = calls(flights, "*")
    assert flights.ack(queue, []) == flights.release(queue, []) == []
    assert made == []


def test_only_what_is_named_is_deleted(aws, queue):
    send(aws, queue, 4)
    flights = source(queue_url=queue, visibility_timeout=1)
    rows = received(flights, 4)

    flights.ack(queue, [row["ack_id"] for row in rows if row["data"] in {b"message 2", b"message 3"}])

    time.sleep(1.1)
    assert sorted(row["data"] for row in received(flights, 4)) == [b"message 0", b"message 1"]


def refusing(source, monkeypatch, refuse, operation="delete_message_batch"):
    """Let SQS refuse entries that `refuse(handle, attempt)` gives a failure for; return the handles by call."""
    made, attempts = [], Counter()

    def call(QueueUrl, Entries):  # noqa: N803 - boto3's names
        made.append([entry["ReceiptHandle"] for entry in Entries])
        attempts.update(made[-1])
        failed = [
            {"Id": entry["Id"], **failure}
            for entry in Entries
            if (failure := refuse(entry["ReceiptHandle"], attempts[entry["ReceiptHandle"]]))
        ]
        return {"Successful": [], "Failed": failed}

    monkeypatch.setattr(source._client, operation, call)
    monkeypatch.setattr(resources.sqs.time, "sleep", lambda seconds: None)
    return made


BUSY = {"SenderFault": False, "Code": "InternalError", "Message": "try again"}
STALE = {"SenderFault": True, "Code": "ReceiptHandleIsInvalid", "Message": "The input receipt handle is invalid."}


def test_an_entry_that_fails_for_a_while_is_tried_again_alone(aws, queue, monkeypatch):
    flights = source(queue_url=queue)
    made = refusing(flights, monkeypatch, lambda handle, attempt: BUSY if handle == "b" and attempt < 3 else None)

    assert flights.ack(queue, ["a", "b", "c"]) == []
    assert made == [["a", "b", "c"], ["b"], ["b"]]


def test_an_entry_that_goes_on_failing_is_reported_and_holds_back_no_other(aws, queue, monkeypatch):
    flights = source(queue_url=queue)
    made = refusing(flights, monkeypatch, lambda handle, attempt: BUSY if handle == "h3" else None)

    (refused,) = flights.ack(queue, [f"h{i}" for i in range(25)])

    assert refused == ("h3", "InternalError: try again", False)
    assert Counter(handle for call in made for handle in call) == {f"h{i}": 4 if i == 3 else 1 for i in range(25)}


@pytest.mark.parametrize(
    ("failure", "lost"),
    [
        (STALE, True),
        (STALE | {"Code": "AWS.SimpleQueueService.MessageNotInflight"}, True),
        (STALE | {"Code": "InvalidParameterValue", "Message": "Reason: The receipt handle has expired."}, True),
        (STALE | {"Code": "InvalidParameterValue", "Message": "Total VisibilityTimeout is beyond the limit"}, False),
    ],
)
@pytest.mark.parametrize(("act", "operation"), [("ack", "delete"), ("release", "change_message_visibility")])
def test_our_own_fault_is_not_tried_again_and_a_stale_handle_is_lost(
    aws, queue, monkeypatch, failure, lost, act, operation
):
    flights = source(queue_url=queue)
    name = "delete_message_batch" if operation == "delete" else "change_message_visibility_batch"
    made = refusing(flights, monkeypatch, lambda handle, attempt: failure if handle == "b" else None, name)

    (refused,) = getattr(flights, act)(queue, ["a", "b"])

    assert (refused.ack_id, refused.lost) == ("b", lost)
    assert len(made) == 1


def test_a_failed_call_is_reported_by_entry_and_holds_back_no_other_ten(aws, queue, monkeypatch):
    send(aws, queue, 30)
    flights = source(queue_url=queue)
    handles = [row["ack_id"] for row in received(flights, 30)]
    delete = flights._client.delete_message_batch

    def fails_for_the_second_ten(QueueUrl, Entries):  # noqa: N803 - boto3's names
        if Entries[0]["ReceiptHandle"] == handles[10]:
            raise OSError("cut off")
        return delete(QueueUrl=QueueUrl, Entries=Entries)

    monkeypatch.setattr(flights._client, "delete_message_batch", fails_for_the_second_ten)
    refused = flights.ack(queue, handles)

    assert [entry.ack_id for entry in refused] == handles[10:20]
    assert all("cut off" in entry.reason and not entry.lost for entry in refused)


def test_where_calls_go_on_failing_the_rest_are_not_tried_but_reported(aws, queue, monkeypatch):
    flights = source(queue_url=queue)
    done = {"Successful": [], "Failed": []}
    made = []
    method = failing_after(1, OSError("gone"), lambda **_: done)
    monkeypatch.setattr(flights._client, "delete_message_batch", lambda **p: made.append(p) or method(**p))

    refused = flights.ack(queue, [f"h{i}" for i in range(100)])

    assert len(made) == 1 + resources.sqs.FAILED_CALLS
    assert [entry.ack_id for entry in refused] == [f"h{i}" for i in range(10, 100)]
    assert refused[-1].reason.startswith("not tried after 3 failed calls")


def test_when_no_call_succeeds_the_source_is_to_blame(aws, queue):
    missing = queue + "-gone"
    with pytest.raises(SourceError, match=r"queue_url '.*-gone' is no queue there"):
        source(queue_url=missing).ack(missing, ["a", "b"])


def test_what_a_queue_held_is_lost_once_it_is_gone_and_another_took_its_place(aws, queue):
    refused = source(queue_url=queue).ack(queue + "-before", ["a", "b"])
    assert [(one.ack_id, one.lost) for one in refused] == [("a", True), ("b", True)]
    assert refused[0].reason.endswith("flights-before is no queue any more")


def test_released_messages_come_back_at_once_or_after_a_delay(aws, queue):
    send(aws, queue, 2)
    flights = source(queue_url=queue)
    now, later = received(flights, 2)

    assert flights.release(queue, [now["ack_id"]]) == []
    assert flights.release(queue, [later["ack_id"]], delay_s=1) == []

    assert [row["message_id"] for row in received(flights, 2)] == [now["message_id"]]
    time.sleep(1.1)
    assert [row["message_id"] for row in received(flights, 2)] == [later["message_id"]]


def test_a_delay_beyond_what_sqs_knows_is_cut(aws, queue):
    send(aws, queue, 12)
    flights = source(queue_url=queue)
    changes = calls(flights, "ChangeMessageVisibilityBatch")

    flights.release(queue, [row["ack_id"] for row in received(flights, 12)], delay_s=100_000)

    assert [len(call["Entries"]) for call in changes] == [10, 2]
    assert {entry["VisibilityTimeout"] for call in changes for entry in call["Entries"]} == {42_300}


# What cannot work is said before anything is leased


@pytest.fixture
def no_settings(monkeypatch, tmp_path):
    """A machine that knows of no AWS: no credentials, no region, no profile."""
    import os

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return monkeypatch


def test_a_queue_that_is_not_there_is_named(aws):
    with pytest.raises(SourceError, match=r"source 'flights': queue_url '.*/flights' is no queue there.*Create it"):
        source().refuse_or_pass()


def test_the_region_is_that_of_the_queue(no_settings):
    assert source()._client.meta.region_name == "eu-west-1"
    assert source(region_name="us-east-2")._client.meta.region_name == "us-east-2"


def test_no_region_names_the_option(no_settings):
    with pytest.raises(SourceError, match=r"region_name is unset.*Set region_name or AWS_DEFAULT_REGION"):
        source(queue_url="http://127.0.0.1:1/1/flights").refuse_or_pass()


def test_no_credentials_and_no_such_profile_name_where_they_are_looked_for(no_settings):
    for options in ({}, {"profile_name": "nobody"}):
        with pytest.raises(SourceError, match=r"no valid credentials.*AWS_ACCESS_KEY_ID.*a profile or a role"):
            source(**options).refuse_or_pass()


@pytest.mark.parametrize("code", ["InvalidClientTokenId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidSecurity"])
def test_refused_credentials_are_never_repeated(aws, monkeypatch, code):
    from botocore.exceptions import ClientError

    flights = source()
    refusal = ClientError({"Error": {"Code": code, "Message": "AKIA0123 is wrong"}}, "GetQueueAttributes")
    monkeypatch.setattr(flights._client, "get_queue_attributes", failing_after(0, refusal, None))
    with pytest.raises(SourceError, match=rf"no valid credentials .*\({code}") as told:
        flights.refuse_or_pass()
    assert "AKIA" not in str(told.value)


def test_what_is_not_allowed_says_what_must_be(aws, monkeypatch):
    from botocore.exceptions import ClientError

    flights = source()
    refusal = ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "GetQueueAttributes")
    monkeypatch.setattr(flights._client, "get_queue_attributes", failing_after(0, refusal, None))
    with pytest.raises(SourceError, match="Allow sqs:GetQueueAttributes"):
        flights.refuse_or_pass()


def test_an_endpoint_that_does_not_answer_is_named(no_settings):
    for name, value in local.ENVIRONMENT.items():
        no_settings.setenv(name, value)
    no_settings.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(SourceError, match=r"endpoint_url \(http://127.0.0.1:1\) does not answer"):
        source(endpoint_url="http://127.0.0.1:1").refuse_or_pass()


def test_a_source_that_was_used_is_copied_without_its_client(aws, queue):
    flights = source(queue_url=queue)
    assert flights.backlog() == Backlog(0)

    copied = pickle.loads(pickle.dumps(flights))

    assert "_client" not in copied.__dict__
    assert copied == flights
    assert copied.lease_s == 900
    assert copied.backlog() == Backlog(0)


# A real server: threads, processes, its own clock


def read_share(source, share):
    return [row for batch in source.read(share, "r1") for row in batch.to_pylist()]


def test_two_processes_share_a_queue_and_delete_it(sqs_server, sqs_queue):
    queue = sqs_queue()
    assert local.fill(queue, (f"message {i}" for i in range(2_345))) == 2_345
    flights = source(queue_url=queue, endpoint_url=sqs_server)
    flights.refuse_or_pass()
    assert flights.backlog() == Backlog(2_345)
    shares = flights.plan(2_001, 2, "r1")

    with PROCESSES.Pool(2) as pool:
        parts = pool.starmap(read_share, [(flights, share) for share in shares])

    assert [len(part) for part in parts] == [1_001, 1_000], "never more than the demand"
    rows = [row for part in parts for row in part]
    assert len({row["message_id"] for row in rows}) == len({row["data"] for row in rows}) == 2_001
    assert flights.backlog() == Backlog(344)

    assert flights.ack(queue, [row["ack_id"] for row in rows]) == []
    assert flights.ack(queue, [row["ack_id"] for row in rows[:10]]) == [], "twice is harmless"
    rest = received(flights, 1_000, 2)
    assert len(rest) == 344
    assert not {row["message_id"] for row in rows} & {row["message_id"] for row in rest}


def test_a_lease_that_is_over_is_lost_to_whoever_received_since(sqs_server, sqs_queue):
    queue = sqs_queue()
    local.fill(queue, ["a", "b"])
    hasty = source(queue_url=queue, endpoint_url=sqs_server, visibility_timeout=1)
    stale = [row["ack_id"] for row in received(hasty, 2)]
    time.sleep(1.3)
    flights = source(queue_url=queue, endpoint_url=sqs_server)
    held = received(flights, 2)
    assert len(held) == 2

    assert all(entry.lost for entry in hasty.release(queue, stale))
    assert len(hasty.release(queue, stale)) == 2
    hasty.ack(queue, stale)

    assert received(flights, 2) == [], "what another receive holds now was not touched"
    assert flights.release(queue, [row["ack_id"] for row in held]) == []
    again = received(flights, 2)
    assert sorted(row["data"] for row in again) == [b"a", b"b"]
    assert {json.loads(row["metadata"])["attributes"]["ApproximateReceiveCount"] for row in again} == {"3"}


def test_a_long_poll_waits_for_what_comes(sqs_server, sqs_queue):
    queue = sqs_queue()
    flights = source(queue_url=queue, endpoint_url=sqs_server, wait_time_seconds=5)
    late = threading.Timer(0.5, local.fill, [queue, ["late"]])
    late.start()
    assert [row["data"] for row in received(flights, 1)] == [b"late"]
    late.join()


def test_a_server_ends_with_its_block(servers_folder):
    with local.serve(servers_folder) as endpoint:
        assert local.fill(local.create_queue(endpoint, "flights"), [b"bytes", "text"]) == 2
    with pytest.raises(SourceError, match="does not answer"):
        source(endpoint_url=endpoint).refuse_or_pass()
