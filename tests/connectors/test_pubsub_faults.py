"""Failures of Pub/Sub: crashes, timeouts, missing resources and refusals."""

import json
import os

import grpc
import pytest
from google.api_core import exceptions
from google.iam.v1.iam_policy_pb2 import TestIamPermissionsResponse as Granted
from google.protobuf.any_pb2 import Any as AnyMessage
from google.pubsub_v1 import AcknowledgeRequest, ModifyAckDeadlineRequest, PullResponse, SubscriberClient, Subscription
from google.rpc.code_pb2 import FAILED_PRECONDITION, PERMISSION_DENIED, UNAVAILABLE
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from pipeline_platform.connectors.pubsub import PubsubSource
from pipeline_platform.connectors.pubsub.google_cloud import connected, explained
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.contract import Share, SourceAwayError, SourceError
from tests.fixtures.received import received

MINE = "projects/local/subscriptions/mine"


def ids(rows):
    return [row["ack_id"] for row in rows]


# Leases


def test_a_message_of_the_maximum_size_arrives_whole(subscribed):
    flights = subscribed()
    largest = os.urandom(10**7 - 200)
    flights.send([b"small", largest, largest])

    rows = received(flights, 3)

    assert sorted(len(row["data"]) for row in rows) == [5, len(largest), len(largest)]
    assert rows[0]["data"] in (b"small", largest)
    assert flights.ack(flights._path, ids(rows)) == []


# The server is unavailable


# The subscription is missing, or cannot be pulled from


def test_a_subscription_that_is_deleted_is_named(subscribed):
    flights = subscribed()
    flights.send([b"1", b"2"])
    rows = received(flights, 1)
    with connected(SubscriberClient, flights.emulator_host) as subscriber:
        subscriber.delete_subscription(subscription=flights._path)

    for call in (
        flights.backlog,
        lambda: received(flights, 1),
        lambda: flights.ack(flights._path, ids(rows)),
        lambda: flights.extend("r1", lambda: [(flights._path, ids(rows))]),
    ):
        with pytest.raises(SourceError, match=r"subscription 'projects/local/.*' does not exist .*Create it") as told:
            call()
        assert not isinstance(told.value, SourceAwayError), "no waiting brings it back"


def test_a_subscription_that_pushes_is_refused_before_anything_is_leased(subscribed):
    flights = subscribed({"push_config": {"push_endpoint": "http://127.0.0.1:1/"}})
    with pytest.raises(SourceError, match="is a push subscription"):
        flights.check_ready()


# Permissions and exactly-once delivery, by a stub, because no local server has them


def failed(code, details=()):
    """Return the end of a failed call, as Google's servers send it."""
    packed = []
    for detail in details:
        packed.append(AnyMessage())
        packed[-1].Pack(detail)

    def end(_, context: grpc.ServicerContext):
        context.abort_with_status(rpc_status.to_status(Status(code=code, message="said", details=packed)))

    return end


def mine(stub, **options):
    return PubsubSource(name="flights", subscription=MINE, emulator_host=stub.address, timeout_s=2, **options)


def test_a_call_with_a_transient_error_is_retried(stub_server):
    answers = iter([failed(UNAVAILABLE), failed(UNAVAILABLE), lambda *_: b""])
    made = []

    def moody(request, context):
        made.append(AcknowledgeRequest.deserialize(request).ack_ids)
        return next(answers)(request, context)

    stub_server.answers["Acknowledge"] = moody

    assert mine(stub_server).ack(MINE, ["a"]) == []
    assert made == [["a"]] * 3


def test_subscriber_permissions_suffice_and_the_deadline_is_then_always_set(stub_server):
    deadlines = []

    def modified(request, _):
        deadlines.append(ModifyAckDeadlineRequest.deserialize(request).ack_deadline_seconds)
        return b""

    pulled = {"ack_id": "a", "message": {"message_id": "1", "data": b"x"}}
    stub_server.answers |= {
        "GetSubscription": failed(PERMISSION_DENIED),
        "TestIamPermissions": lambda *_: Granted(permissions=["pubsub.subscriptions.consume"]).SerializeToString(),
        "Pull": lambda *_: PullResponse.serialize(PullResponse(received_messages=[pulled])),
        "ModifyAckDeadline": modified,
    }
    flights = mine(stub_server, ack_deadline_s=10)

    assert flights.backlog() == Backlog(None)
    assert [row["data"] for row in received(flights, 1)] == [b"x"]
    assert deadlines == [10]


def test_missing_subscriber_permissions_are_refused_before_a_pull(stub_server):
    stub_server.answers |= {
        "GetSubscription": failed(PERMISSION_DENIED),
        "TestIamPermissions": lambda *_: Granted().SerializeToString(),
    }
    with pytest.raises(SourceError, match=f"'{MINE}' does not exist, or .*consume is not granted.*grant roles/"):
        mine(stub_server).check_ready()


WORDS = {
    "gone": "PERMANENT_FAILURE_INVALID_ACK_ID",
    "odd": "PERMANENT_FAILURE_OTHER",
    "soon": "TRANSIENT_FAILURE_UNORDERED_ACK_ID",
}


@pytest.mark.parametrize("action", ["ack", "nack:7"])
def test_ids_refused_by_an_exactly_once_subscription_are_lost_or_can_be_retried(stub_server, action):
    told = failed(FAILED_PRECONDITION, [ErrorInfo(reason="EXACTLY_ONCE_ACKID_FAILURE", metadata=WORDS)])
    stub_server.answers |= {"Acknowledge": told, "ModifyAckDeadline": told}

    refused = mine(stub_server).acknowledge(action, MINE, ["gone", "odd", "soon", "unsaid"])

    assert [(entry.ack_id, entry.lost) for entry in refused] == [
        ("gone", True), ("odd", False), ("soon", False), ("unsaid", False),
    ]  # fmt: skip
    assert [entry.reason for entry in refused[:3]] == list(WORDS.values())
    assert "said" in refused[3].reason


@pytest.mark.parametrize(
    ("words", "is_held"),
    [
        ({"soon": WORDS["soon"]}, True),
        ({"gone": WORDS["gone"]}, True),
        ({"gone": WORDS["gone"], "soon": WORDS["gone"]}, False),
    ],
)
def test_extend_returns_false_once_another_receive_has_leased_all_messages(stub_server, words, is_held):
    stub_server.answers["ModifyAckDeadline"] = failed(FAILED_PRECONDITION, [ErrorInfo(metadata=words)])

    assert mine(stub_server).extend("r1", lambda: [(MINE, ["gone", "soon"])]) is is_held


def test_messages_leased_by_another_receive_during_a_pull_are_left_out(stub_server):
    pulled = [{"ack_id": ack_id, "message": {"message_id": ack_id}} for ack_id in ("gone", "kept")]
    stub_server.answers |= {
        "GetSubscription": lambda *_: Subscription.serialize(Subscription(name=MINE, ack_deadline_seconds=600)),
        "Pull": lambda *_: PullResponse.serialize(PullResponse(received_messages=pulled)),
        "ModifyAckDeadline": failed(FAILED_PRECONDITION, [ErrorInfo(metadata={"gone": WORDS["gone"]})]),
    }
    flights = mine(stub_server, ack_deadline_s=10)

    (batch,) = flights.read(Share(messages=1), "r1")

    assert batch.column("message_id").to_pylist() == ["kept"]


# Credentials


@pytest.mark.filterwarnings("ignore:The load_credentials_from_file:DeprecationWarning")
@pytest.mark.parametrize("content", [None, "no JSON", json.dumps({"type": "service_account", "private_key": "SECRET"})])
def test_invalid_credentials_are_named_by_their_option_and_never_quoted(tmp_path, monkeypatch, content):
    monkeypatch.delenv("PUBSUB_EMULATOR_HOST", raising=False)
    file = tmp_path / "key.json"
    if content:
        file.write_text(content)

    with pytest.raises(
        SourceError, match=rf"no valid credentials .*credentials_file {file}.*Set credentials_file"
    ) as told:
        PubsubSource(name="flights", subscription=MINE, credentials_file=str(file)).check_ready()

    assert "SECRET" not in str(told.value)


def test_credentials_default_to_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("PUBSUB_EMULATOR_HOST", raising=False)
    file = tmp_path / "environment.json"
    user = {"type": "authorized_user", "client_id": "a", "client_secret": "b", "refresh_token": "the environment's"}
    file.write_text(json.dumps(user))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "shop")  # or the library would look for it elsewhere
    flights = PubsubSource(name="flights", subscription=MINE)

    assert flights._client.transport._credentials.refresh_token == "the environment's"
    flights.close()


@pytest.mark.parametrize(
    ("error", "said", "is_away"),
    [
        (exceptions.Unauthenticated("token SECRET"), "no valid credentials", False),
        (exceptions.ServiceUnavailable("Getting metadata from plugin failed: SECRET"), "no valid credentials", True),
        (exceptions.ResourceExhausted("quota"), "quota exceeded", True),
        (exceptions.PermissionDenied("denied"), "Grant roles/pubsub.subscriber", False),
        (exceptions.InvalidArgument("too long"), "failed: InvalidArgument: 400 too long", False),
    ],
)
def test_errors_contain_a_fix_and_are_marked_as_transient(error, said, is_away):
    told = explained(
        error,
        PubsubSource(name="flights", subscription=MINE),
        "subscription 's'",
        "api_endpoint a",
        "credentials_file f",
    )

    assert said in str(told)
    assert str(told).startswith("source 'flights': ")
    assert "SECRET" not in str(told)
    assert isinstance(told, SourceAwayError) is is_away
