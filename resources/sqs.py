"""Amazon SQS as a source: received in tens, deleted once what came of it is safe."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import pyarrow as pa
from pydantic import Field, ValidationInfo, field_validator, model_validator

from pipeline_platform.model.settling import LEASED, Word, Words
from pipeline_platform.source import calls
from pipeline_platform.source.contract import Backlog, Held, Refused, Share, SourceAwayError, SourceError
from pipeline_platform.source.leased import LeasedSource

logger = logging.getLogger(__name__)

LONGEST_S = 43_200
"""Twelve hours: the longest that SQS hides a message, counted from its receive (SQS API, ReceiveMessage)."""
TEN = 10
"""The most messages that SQS receives, deletes or gives back in one call."""
THREADS = 8
"""Calls under way at once in one task. A call to AWS is mostly waiting: measured with 10 ms a call, one thread
deletes 730 messages a second, four 2,100 and eight 4,100."""
BATCH_ROWS = 1_000
BATCH_BYTES = 16 * 2**20
"""One message may be 1 MiB, so a batch is bounded by its bytes too."""
EMPTY_REPLIES = 3
"""Empty short polls in a row that end a share. A short poll asks a random part of the servers (SQS guide, short
and long polling). If it asks half of them, three polls miss a waiting message once in eight; that message stays in the
backlog, for the next run. A long poll asks all servers: one empty reply is enough."""

AttributeName = Literal[
    "All", "AWSTraceHeader", "ApproximateFirstReceiveTimestamp", "ApproximateReceiveCount", "DeadLetterQueueSourceArn",
    "MessageDeduplicationId", "MessageGroupId", "SenderId", "SentTimestamp", "SequenceNumber",
]  # fmt: skip


class SqsSource(LeasedSource):
    """A queue of Amazon SQS, or of a server that speaks its JSON protocol.

    Credentials come from where AWS clients look for them: environment, profile, container or instance role. They
    need `sqs:GetQueueAttributes`, `sqs:ReceiveMessage`, `sqs:DeleteMessage` and `sqs:ChangeMessageVisibility`.

    - The lease is the visibility timeout. To renew it costs a request per ten messages, so let it be longer than most
      runs take: a run renews it after a third.
    - `redelivered` is always true: SQS may hand out a copy of a deleted message, and its receive count is approximate.
    - `published_at` is `SentTimestamp`: ids are looked up in what was decided since.
    - `metadata` holds `md5_of_body`, `attributes` (with `ApproximateReceiveCount` and `SentTimestamp`) and
      `message_attributes`, in SQS's words; binary values are base64. A body that does not match its MD5 is left to
      its lease.
    - SQS has at most 120,000 messages of a queue in flight. A share that meets the limit ends there.
    - A queue's own dead-letter policy counts every receive, also those of runs that died: leave it room.
    - FIFO queues work; `MessageGroupId` and `SequenceNumber` are in `attributes`. While messages of a group are leased,
      no later ones of it are. One run's tasks share a group's messages: they keep no order.
    """

    queue_url: str = Field(description="URL of the queue; also what its messages are acknowledged by.")
    visibility_timeout: int = Field(
        900,
        ge=1,
        le=LONGEST_S,
        description="Seconds that a received message is hidden from others, 1 to 43,200, while its run does not "
        "extend that. "
        "It is the lease: lease_s follows it, and is not set by itself.",
    )
    max_number_of_messages: int = Field(TEN, ge=1, le=TEN, description="Messages asked for in one call, 1 to 10.")
    wait_time_seconds: int = Field(
        0, ge=0, le=20, description="Seconds that a task waits at the end of the queue, 0 to 20; 0 polls short."
    )
    attribute_names: tuple[AttributeName, ...] = Field(
        (), description="Attributes wanted beside ApproximateReceiveCount and SentTimestamp; All for all."
    )
    message_attribute_names: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="Message attributes wanted, by name or by prefix as in 'trace.*'; All for all."
    )
    region_name: str | None = Field(
        None, description="AWS region. If unset the one in queue_url, else that of the environment or profile."
    )
    endpoint_url: str | None = Field(None, description="Address of another server than AWS's.")
    profile_name: str | None = Field(None, description="AWS profile; if unset as the environment says.")

    @field_validator("queue_url", "endpoint_url")
    @classmethod
    def _is_a_url(cls, url: str | None, field: ValidationInfo) -> str | None:
        address = urlsplit(url or "")
        if url is not None and (address.scheme not in {"http", "https"} or not address.netloc):
            raise ValueError(f"must be a URL that begins with http:// or https://, not {url!r}")
        if field.field_name == "queue_url" and not address.path.strip("/"):
            raise ValueError(f"must end with the queue's name, as `aws sqs get-queue-url` prints it; got {url!r}")
        return url

    @model_validator(mode="after")
    def _is_within_twelve_hours(self) -> Self:
        if "lease_s" in self.model_fields_set and self.lease_s != self.visibility_timeout:
            raise ValueError(
                f"lease_s is {self.lease_s}, but the lease of an SQS message is visibility_timeout "
                f"({self.visibility_timeout} s): set that one, and leave lease_s out"
            )
        self.__dict__["lease_s"] = float(self.visibility_timeout)  # the model is frozen from here on
        return self

    @property
    def words(self) -> Words:
        """The delay is what SQS hides a message for, less what its lease may have taken."""
        return {**LEASED, "nack": Word(ends=False, longest_s=self._longest_delay_s)}

    @property
    def _longest_delay_s(self) -> int:
        return LONGEST_S - self.visibility_timeout

    def backlog(self) -> Backlog:
        """Say how many messages wait, as SQS counts them: approximately, and without those in flight."""
        count = "ApproximateNumberOfMessages"
        reply = self._ask("get_queue_attributes", QueueUrl=self.queue_url, AttributeNames=[count])
        return Backlog(int(reply["Attributes"][count]))

    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """Divide the demand into equal shares, each worth a call at least. Nothing is leased yet."""
        del receive_id
        shares = min(concurrency, -(-demand // TEN))
        return [Share(messages=demand // shares + (i < demand % shares)) for i in range(shares)]

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Receive until the share's demand is met, the queue seems empty or a call fails."""
        del receive_id
        _ = self._client  # made once, before the threads ask for it
        for messages in calls.receive(
            self._receive,
            share.messages,
            per_call=self.max_number_of_messages,
            threads=THREADS,
            empty_replies=1 if self.wait_time_seconds else EMPTY_REPLIES,
            batch_rows=BATCH_ROWS,
            batch_bytes=BATCH_BYTES,
            size=lambda message: len(message["Body"]),
        ):
            yield self._batch(messages)

    def ack(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Delete messages by their receipt handles, ten a call.

        All are lost where the queue `ack_ref` is gone and `queue_url` names another by now: its messages went with it.
        """
        return self._settle("delete_message_batch", ack_ref, ack_ids)

    def release(self, ack_ref: str, ack_ids: Sequence[str], delay_s: int = 0) -> list[Refused]:
        """Make messages visible again after `delay_s` seconds, ten a call.

        SQS refuses a delay that could take a message beyond twelve hours from its receive: it is cut to twelve hours
        less `visibility_timeout`.
        """
        delay_s = min(delay_s, self._longest_delay_s)
        return self._settle(_HIDE, ack_ref, ack_ids, VisibilityTimeout=delay_s)

    def extend(self, receive_id: str, held: Held) -> bool:
        """Hide the messages for `visibility_timeout` from now: a request for each ten."""
        del receive_id
        refused = [
            one
            for queue_url, handles in held()
            for one in self._settle(_HIDE, queue_url, handles, VisibilityTimeout=self.visibility_timeout)
        ]
        return not refused

    def abandon(self, receive_id: str, held: Held) -> None:
        """Make what a dead receive wrote down visible at once; what it did not waits for its lease to end."""
        del receive_id
        for queue_url, handles in held():
            self.release(queue_url, handles)

    @cached_property
    def _client(self) -> Any:
        import boto3  # here: the code server loads this file and needs no client
        from botocore.config import Config

        in_url = re.match(r"sqs\.([a-z0-9-]+)\.amazonaws\.", urlsplit(self.queue_url).netloc)
        session = boto3.session.Session(
            profile_name=self.profile_name, region_name=self.region_name or (in_url.group(1) if in_url else None)
        )
        config = Config(
            retries={"mode": "standard", "total_max_attempts": 4},
            max_pool_connections=THREADS,
            # A sensor's tick has 60 s for everything; four attempts of the defaults' 60 s would take it.
            connect_timeout=4,
            read_timeout=10 + self.wait_time_seconds,
        )
        return session.client("sqs", endpoint_url=self.endpoint_url, config=config)

    def __getstate__(self) -> dict[Any, Any]:
        """Leave the client behind: sources are pickled to tasks, connections are not."""
        state = super().__getstate__()
        return {**state, "__dict__": {k: v for k, v in state["__dict__"].items() if k != "_client"}}

    def _ask(self, operation: str, **parameters: Any) -> Any:
        try:
            return getattr(self._client, operation)(**parameters)
        except Exception as error:
            raise self._explained(error) from error

    def _receive(self, most: int) -> list[dict[str, Any]]:
        attributes = {"ApproximateReceiveCount", "SentTimestamp", *self.attribute_names}
        if self.queue_url.endswith(".fifo"):
            attributes |= {"MessageGroupId", "SequenceNumber"}
        try:
            reply = self._ask(
                "receive_message",
                QueueUrl=self.queue_url,
                MaxNumberOfMessages=most,
                VisibilityTimeout=self.visibility_timeout,
                WaitTimeSeconds=self.wait_time_seconds,
                MessageSystemAttributeNames=["All"] if "All" in attributes else sorted(attributes),
                MessageAttributeNames=list(self.message_attribute_names),
            )
        except SourceError as error:
            if _code(error.__cause__) != "OverLimit":
                raise
            logger.warning("%s", error)
            return []  # no failure: the other tasks may have received plenty
        messages: list[dict[str, Any]] = reply.get("Messages", [])
        return messages

    def _batch(self, messages: list[dict[str, Any]]) -> pa.RecordBatch:
        data, whole = [], []
        for message in messages:
            body = message["Body"].encode()
            if hashlib.md5(body, usedforsecurity=False).hexdigest() == message["MD5OfBody"]:
                data.append(body)
                whole.append(message)
            else:
                logger.warning("%s: left to its lease, damaged on its way: %s", self.name, message["MessageId"])
        # Not every server that speaks the protocol says when a message was sent.
        sent = [m.get("Attributes", {}).get("SentTimestamp") for m in whole]
        return self.deliveries(
            message_id=[m["MessageId"] for m in whole],
            data=data,
            ack_id=[m["ReceiptHandle"] for m in whole],
            ack_ref=self.queue_url,
            metadata=[_metadata(m) for m in whole],
            published_at=pa.array([int(ms) if ms else None for ms in sent], pa.timestamp("ms", "UTC")),
        )

    def _settle(self, operation: str, queue_url: str, handles: Sequence[str], **options: Any) -> list[Refused]:
        def settle(ten: Sequence[str]) -> list[Refused]:
            # Ids by position: receipt handles are too long, and message ids may repeat, which SQS refuses.
            entries = [{"Id": str(i), "ReceiptHandle": handle, **options} for i, handle in enumerate(ten)]
            try:
                reply = self._ask(operation, QueueUrl=queue_url, Entries=entries)
            except SourceError as error:
                if queue_url == self.queue_url or not re.fullmatch(_NO_QUEUE, _code(error.__cause__)):
                    raise
                return [Refused(handle, f"{queue_url} is no queue any more", lost=True) for handle in ten]
            return [_refused(ten[int(failure["Id"])], failure) for failure in reply.get("Failed", [])]

        _ = self._client if handles else None
        return calls.settle(settle, handles, per_call=TEN, threads=THREADS)

    def _explained(self, error: Exception) -> SourceError:
        """Say which option is to blame and what to do; never what the credentials are."""
        code = _code(error)
        found = (text for codes, text in _EXPLANATIONS.items() if re.fullmatch(codes, code))
        explanation = next(found, "queue_url {queue!r} failed with {said}").format(
            queue=self.queue_url,
            endpoint=self.endpoint_url or "unset, so AWS's own",
            region=self.region_name or "unset",
            profile=self.profile_name or "unset",
            code=code,
            said=f"{type(error).__name__}: {error}",
        )
        kind = SourceAwayError if re.fullmatch(_AWAY, code) else SourceError
        return kind(f"source {self.name!r}: {explanation}")


_HIDE = "change_message_visibility_batch"
_NO_QUEUE = "NonExistentQueue|QueueDoesNotExist|InvalidAddress"
_NO_CREDENTIALS = (
    ".*Credential.*|ProfileNotFound|.*(SSO|Token).*|InvalidAccessKeyId|InvalidClientTokenId|SignatureDoesNotMatch"
    "|InvalidSecurity|UnrecognizedClientException|AuthFailure|RequestExpired|LoginRefreshRequired"
)
_AWAY = ".*Connect.*|.*Timeout.*|SSLError|ProxyConnectionError|HTTPClientError|ConnectionClosedError"
_EXPLANATIONS = {
    _NO_QUEUE: "queue_url {queue!r} is no queue there (region_name {region}, endpoint_url {endpoint}). Create it, or "
    "correct the one that is wrong",
    "NoRegionError|InvalidRegionError": "region_name is {region} and queue_url {queue!r} names none. Set region_name "
    "or AWS_DEFAULT_REGION",
    "AccessDenied.*|AuthorizationError|KmsAccessDenied": "not allowed on queue_url {queue!r}: {said}. Allow "
    "sqs:GetQueueAttributes, sqs:ReceiveMessage, sqs:DeleteMessage and sqs:ChangeMessageVisibility",
    # What AWS says of refused credentials is left out: it may quote them.
    _NO_CREDENTIALS: "no valid credentials for queue_url {queue!r} ({code}; profile_name {profile}). Give some in the "
    "environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), a profile or a role, or renew what is there",
    _AWAY: "endpoint_url "
    "({endpoint}) does not answer for queue_url {queue!r}: {said}. Correct it, or see to the network or server",
}
"""What to do about an error, by its code."""


def _code(error: BaseException | None) -> str:
    """AWS's code of an error without its prefix, or the class of an error that is not AWS's."""
    code = str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))
    return code.rsplit(".", 1)[-1] or type(error).__name__


def _refused(handle: str, failure: dict[str, str]) -> Refused:
    code, said = failure["Code"].rsplit(".", 1)[-1], failure.get("Message", "")
    # Of a handle whose lease is over, FIFO queues say that the parameter is invalid, having expired. Of a message that
    # was deleted meanwhile and is to be put back, they say that it does not exist.
    stale = code in {"ReceiptHandleIsInvalid", "MessageNotInflight"} or "expired" in said or "does not exist" in said
    return Refused(handle, f"{code}: {said}", lost=stale)


def _metadata(message: dict[str, Any]) -> dict[str, Any]:
    metadata: dict[str, Any] = {"md5_of_body": message["MD5OfBody"], "attributes": message.get("Attributes", {})}
    if attributes := message.get("MessageAttributes"):
        metadata["message_attributes"] = {
            name: {key: base64.b64encode(v).decode() if isinstance(v, bytes) else v for key, v in value.items()}
            for name, value in attributes.items()
        }
    return metadata
