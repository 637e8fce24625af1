"""Amazon SQS as a source: received in tens, deleted once what came of it is safe."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import urlsplit

import pyarrow as pa
from pydantic import Field, field_validator, model_validator

from pipeline_platform.source.contract import Backlog, Refused, Share, Source, SourceError

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient
    from mypy_boto3_sqs.type_defs import BatchResultErrorEntryTypeDef, MessageTypeDef

logger = logging.getLogger(__name__)

LONGEST_S = 43_200
"""Twelve hours: the longest that SQS hides a message, counted from its receive (SQS API, ReceiveMessage)."""

TEN = 10
"""The most messages that SQS receives, deletes or gives back in one call."""

THREADS = 8
"""Calls under way at once in one task. A call to AWS is mostly waiting: measured with 10 ms a call, one thread
deletes 730 messages a second, four 2,100 and eight 4,100. Without latency the interpreter is the limit, and eight
do as well as two."""

BATCH_ROWS = 1_000
BATCH_BYTES = 16 * 2**20
"""One message may be 1 MiB, so a batch is bounded by its bytes too."""

EMPTY_REPLIES = 3
"""Empty short polls in a row that end a share. A short poll asks a random part of the servers (SQS guide, short
and long polling), so one empty reply proves nothing. If it asks half of them, three miss a waiting message once
in eight; that message stays in the backlog, for the next run. A long poll asks all servers: one is enough."""

ENTRY_RETRIES = 3
"""Times that entries refused through no fault of ours are tried again, after 0.2, 0.4 and 0.8 s."""

FAILED_CALLS = 3
"""Whole calls failed in a row, each after the client's own retries, after which the rest are not tried."""

AttributeName = Literal[
    "All",
    "AWSTraceHeader",
    "ApproximateFirstReceiveTimestamp",
    "ApproximateReceiveCount",
    "DeadLetterQueueSourceArn",
    "MessageDeduplicationId",
    "MessageGroupId",
    "SenderId",
    "SentTimestamp",
    "SequenceNumber",
]


class SqsSource(Source):
    """A queue of Amazon SQS, or of a server that speaks its JSON protocol.

    Credentials come from where AWS clients look for them: environment, profile, container or instance role. They
    need `sqs:GetQueueAttributes`, `sqs:ReceiveMessage`, `sqs:DeleteMessage` and `sqs:ChangeMessageVisibility`.

    - The lease is the visibility timeout. Renewing it costs a request per ten messages, so it is set once, for
      longer than a run takes.
    - `redelivered` is always true: SQS may hand out a copy whose delete was missed, and its receive count is
      approximate. Ids are therefore always looked up.
    - `published_at` is `SentTimestamp`: ids are looked up in what was decided since.
    - `metadata` holds `md5_of_body`, `attributes` (with `ApproximateReceiveCount` and `SentTimestamp`) and
      `message_attributes`, in SQS's words; binary values are base64. A body that does not match its MD5 is not read
      but left to its lease.
    - SQS has at most 120,000 messages of a queue in flight. A share that meets the limit ends there.
    - A queue's own dead-letter policy counts every receive, also those of runs that died: leave it room.
    - FIFO queues work and `MessageGroupId` and `SequenceNumber` are in `attributes`. What SQS promises holds: while
      messages of a group are leased, no later ones of it are. The order *within* what one run receives is not
      kept: its tasks share a group's messages among them and handle them at the same time.
    """

    queue_url: str = Field(description="URL of the queue; also what its messages are acknowledged by.")
    visibility_timeout: int = Field(
        900,
        ge=1,
        le=LONGEST_S,
        description="Seconds that a received message is hidden from others, 1 to 43,200: must outlast a run. "
        "It is the lease: lease_s follows it, and is not set by itself.",
    )
    max_number_of_messages: int = Field(TEN, ge=1, le=TEN, description="Messages asked for in one call, 1 to 10.")
    wait_time_seconds: int = Field(
        0,
        ge=0,
        le=20,
        description="Seconds that a task waits for messages at the end of the queue, 0 to 20; 0 polls short.",
    )
    attribute_names: tuple[AttributeName, ...] = Field(
        (), description="Attributes wanted beside ApproximateReceiveCount and SentTimestamp; All for all."
    )
    message_attribute_names: tuple[str, ...] = Field(
        (), description="Message attributes wanted, by name or by prefix as in 'trace.*'; All for all."
    )
    region_name: str | None = Field(
        None, description="AWS region. If unset the one in queue_url, else that of the environment or profile."
    )
    endpoint_url: str | None = Field(None, description="Address of another server than AWS's.")
    profile_name: str | None = Field(None, description="AWS profile; if unset as the environment says.")

    @field_validator("queue_url", "endpoint_url")
    @classmethod
    def _is_a_url(cls, url: str | None) -> str | None:
        address = urlsplit(url) if url is not None else None
        if address and (address.scheme not in {"http", "https"} or not address.netloc):
            raise ValueError(f"must be a URL that begins with http:// or https://, not {url!r}")
        return url

    @field_validator("queue_url")
    @classmethod
    def _names_a_queue(cls, url: str) -> str:
        if not urlsplit(url).path.strip("/"):
            raise ValueError(f"must end with the queue's name, as `aws sqs get-queue-url` prints it; got {url!r}")
        return url

    @field_validator("message_attribute_names")
    @classmethod
    def _has_no_empty_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not all(names):
            raise ValueError(f"must be names that are not empty, or 'All'; got {names!r}")
        return names

    @model_validator(mode="after")
    def _lease_is_the_visibility_timeout(self) -> Self:
        if "lease_s" in self.model_fields_set and self.lease_s != self.visibility_timeout:
            raise ValueError(
                f"lease_s is {self.lease_s}, but the lease of an SQS message is visibility_timeout "
                f"({self.visibility_timeout} s): set that one, and leave lease_s out"
            )
        self.__dict__["lease_s"] = float(self.visibility_timeout)  # the model is frozen from here on
        return self

    @model_validator(mode="after")
    def _delays_are_within_twelve_hours(self) -> Self:
        for option in ("on_success", "on_failure"):
            delay = getattr(self, option).partition(":")[2]
            if delay and int(delay) > self._longest_delay_s:
                raise ValueError(
                    f"{option} delays by {delay} s, but SQS hides a message for {LONGEST_S} s from its receive and "
                    f"visibility_timeout may take {self.visibility_timeout} of them: "
                    f"use 'nack:{self._longest_delay_s}' or less"
                )
        return self

    @property
    def _longest_delay_s(self) -> int:
        return LONGEST_S - self.visibility_timeout

    def backlog(self) -> Backlog:
        """Say how many messages wait, as SQS counts them: approximately, and without those in flight.

        Raises:
            SourceError: The queue cannot be reached, is not there, or is not ours to see.
        """
        try:
            told = self._client.get_queue_attributes(
                QueueUrl=self.queue_url, AttributeNames=["ApproximateNumberOfMessages"]
            )
        except Exception as error:
            raise self._explain(error) from error
        return Backlog(int(told["Attributes"]["ApproximateNumberOfMessages"]))

    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """Divide the demand into equal shares, none for less than one call is good for. Nothing is leased yet."""
        del receive_id
        shares = min(concurrency, -(-demand // TEN))
        return [Share(messages=demand // shares + (i < demand % shares)) for i in range(shares)]

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Receive until the share's demand is met or the queue seems empty; see `EMPTY_REPLIES`.

        A failure after something was received ends the share instead: what is leased is worth handling, and a
        queue that stays out of reach fails the next run before it leases anything.

        Raises:
            SourceError: Nothing could be received.
        """
        del receive_id
        left, receive = share.messages, _Receive(self._receive, 1 if self.wait_time_seconds else EMPTY_REPLIES)
        received = 0
        with ThreadPoolExecutor(THREADS) as pool:
            while left and not receive.over:
                messages = receive.up_to(min(BATCH_ROWS, left), self.max_number_of_messages, pool)
                left -= len(messages)
                received += len(messages)
                if messages:
                    yield self._batch(messages)
        if receive.error is None:
            return
        if not received and _code(receive.error) != "OverLimit":  # the other tasks may have received plenty
            raise self._explain(receive.error) from receive.error
        logger.warning("%s: ended after %d messages: %s", self.name, received, self._explain(receive.error))

    def ack(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Delete messages, ten a call.

        Args:
            ack_ref: URL of their queue.
            ack_ids: Their receipt handles.

        Returns:
            Those that SQS refused, entries of failed calls among them: one failed call holds back no other.
            Entries that failed through no fault of ours were tried again before. All are lost where the queue of
            `ack_ref` is gone and `queue_url` names another by now: what it held went with it.

        Raises:
            SourceError: No call succeeded.
        """

        def delete(entries: list[dict[str, Any]]) -> Mapping[str, Any]:
            return self._client.delete_message_batch(QueueUrl=ack_ref, Entries=entries)  # type: ignore[arg-type]

        return self._in_tens(ack_ref, delete, [{"ReceiptHandle": handle} for handle in ack_ids])

    def release(self, ack_ref: str, ack_ids: Sequence[str], delay_s: int = 0) -> list[Refused]:
        """Make messages visible again after `delay_s` seconds, ten a call; failures as in `ack`.

        A delay that could take a message beyond twelve hours from its receive, which SQS refuses, is cut: to
        twelve hours less `visibility_timeout`.

        Raises:
            SourceError: No call succeeded.
        """
        timeout = min(delay_s, self._longest_delay_s)

        def change(entries: list[dict[str, Any]]) -> Mapping[str, Any]:
            return self._client.change_message_visibility_batch(QueueUrl=ack_ref, Entries=entries)  # type: ignore[arg-type]

        return self._in_tens(
            ack_ref, change, [{"ReceiptHandle": handle, "VisibilityTimeout": timeout} for handle in ack_ids]
        )

    @cached_property
    def _client(self) -> SQSClient:
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

    def _receive(self, most: int) -> list[MessageTypeDef]:
        attributes = {"ApproximateReceiveCount", "SentTimestamp", *self.attribute_names}
        if self.queue_url.endswith(".fifo"):
            attributes |= {"MessageGroupId", "SequenceNumber"}
        return self._client.receive_message(
            QueueUrl=self.queue_url,
            MaxNumberOfMessages=most,
            VisibilityTimeout=self.visibility_timeout,
            WaitTimeSeconds=self.wait_time_seconds,
            MessageSystemAttributeNames=["All"] if "All" in attributes else sorted(attributes),
            MessageAttributeNames=list(self.message_attribute_names),
        ).get("Messages", [])

    def _batch(self, messages: list[MessageTypeDef]) -> pa.RecordBatch:
        rows = [(m, m["Body"].encode()) for m in messages]
        whole = [(m, data) for m, data in rows if _md5(data) == m["MD5OfBody"]]
        if len(whole) < len(rows):
            damaged = [m["MessageId"] for m, data in rows if _md5(data) != m["MD5OfBody"]]
            logger.warning("%s: left to their leases, damaged on their way: %s", self.name, ", ".join(damaged))
        return self.deliveries(
            message_id=[m["MessageId"] for m, _ in whole],
            data=[data for _, data in whole],
            ack_id=[m["ReceiptHandle"] for m, _ in whole],
            ack_ref=self.queue_url,
            metadata=[_metadata(m) for m, _ in whole],
            published_at=pa.array([_sent(m) for m, _ in whole], pa.timestamp("ms", "UTC")),
        )

    def _in_tens(
        self, queue_url: str, call: Callable[[list[dict[str, Any]]], Mapping[str, Any]], entries: list[dict[str, Any]]
    ) -> list[Refused]:
        tens = [entries[i : i + TEN] for i in range(0, len(entries), TEN)]
        calls = _Calls(call, lambda error: str(self._explain(error)))
        _ = self._client  # made once, before the threads ask for it
        with ThreadPoolExecutor(THREADS) as pool:
            refused = [entry for ten in pool.map(calls.settle, tens) for entry in ten]
        if entries and calls.error is not None and not calls.succeeded:
            if queue_url != self.queue_url and re.fullmatch(_NO_QUEUE, _code(calls.error)):
                return [Refused(entry["ReceiptHandle"], f"{queue_url} is no queue any more", True) for entry in entries]
            raise self._explain(calls.error) from calls.error
        return refused

    def _explain(self, error: Exception) -> SourceError:
        """Say which option is to blame and what to do; never what the credentials are."""
        said = f"{type(error).__name__}: {error}"
        kind = _code(error)
        for kinds, explanation in _EXPLANATIONS:
            if re.fullmatch(kinds, kind):
                told = {"queue": self.queue_url, "endpoint": self.endpoint_url or "unset, so AWS's own"}
                told |= {"region": self.region_name or "unset", "profile": self.profile_name or "unset"}
                return SourceError(f"source {self.name!r}: " + explanation.format(**told, kind=kind, said=said))
        return SourceError(f"source {self.name!r}: queue_url {self.queue_url!r} failed with {said}")


_NO_QUEUE = "NonExistentQueue|QueueDoesNotExist|InvalidAddress"

_EXPLANATIONS = (
    (
        _NO_QUEUE,
        (
            "queue_url {queue!r} is no queue there (region_name {region}, endpoint_url {endpoint}). "
            "Create it, or correct the one that is wrong"
        ),
    ),
    (
        "NoRegionError|InvalidRegionError",
        "region_name is {region} and queue_url {queue!r} names none. Set region_name or AWS_DEFAULT_REGION",
    ),
    (
        "AccessDenied.*|AuthorizationError|KmsAccessDenied",
        (
            "not allowed on queue_url {queue!r}: {said}. Allow sqs:GetQueueAttributes, sqs:ReceiveMessage, "
            "sqs:DeleteMessage and sqs:ChangeMessageVisibility"
        ),
    ),
    (
        # What AWS says of refused credentials is left out: it may quote them.
        (
            ".*Credential.*|ProfileNotFound|.*(SSO|Token).*|InvalidAccessKeyId|InvalidClientTokenId|SignatureDoesNotMatch"
            "|InvalidSecurity|UnrecognizedClientException|AuthFailure|RequestExpired|LoginRefreshRequired"
        ),
        (
            "no valid credentials for queue_url {queue!r} ({kind}; profile_name {profile}). Give some in the "
            "environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), a profile or a role, or renew what is there"
        ),
    ),
    (
        ".*Connect.*|.*Timeout.*|SSLError|ProxyConnectionError|HTTPClientError|ConnectionClosedError",
        (
            "endpoint_url ({endpoint}) does not answer for queue_url {queue!r}: {said}. Correct it, or see to the "
            "network or server"
        ),
    ),
)


class _Receive:
    """Receives by several threads until enough, too much at once, an empty queue or an error."""

    def __init__(self, receive: Callable[[int], list[MessageTypeDef]], empty_replies: int) -> None:
        self._receive = receive
        self._empty_left = self._empty_replies = empty_replies
        self._lock = threading.Lock()
        self._left = 0
        self._bytes = 0
        self.error: Exception | None = None
        self.over = False

    def up_to(self, most: int, per_call: int, pool: ThreadPoolExecutor) -> list[MessageTypeDef]:
        """Receive at most `most` messages, fewer where they are large or no more come."""
        self._left, self._bytes = most, 0
        threads = min(THREADS, -(-most // per_call))
        return [m for got in pool.map(lambda _: self._draw(per_call), range(threads)) for m in got]

    def _draw(self, per_call: int) -> list[MessageTypeDef]:
        drawn: list[MessageTypeDef] = []
        while asked := self._reserve(per_call):
            try:
                got = self._receive(asked)
            except Exception as error:  # kept, so that what the others have received is not lost with it
                self.error = error
                self.over = True
                return drawn
            drawn += got
            self._settle(asked, got)
        return drawn

    def _reserve(self, per_call: int) -> int:
        with self._lock:
            if self.over or self._bytes >= BATCH_BYTES:
                return 0
            asked = min(per_call, self._left)
            self._left -= asked
            return asked

    def _settle(self, asked: int, got: list[MessageTypeDef]) -> None:
        with self._lock:
            self._left += asked - len(got)
            self._bytes += sum(len(message["Body"]) for message in got)
            self._empty_left = self._empty_replies if got else self._empty_left - 1
            self.over = self.over or self._empty_left <= 0


class _Calls:
    """Makes calls of ten entries, from several threads, and keeps count of what failed as a whole."""

    def __init__(
        self, call: Callable[[list[dict[str, Any]]], Mapping[str, Any]], explain: Callable[[Exception], str]
    ) -> None:
        self._call = call
        self._explain = explain
        self._failed_in_a_row = 0
        self.succeeded = False
        self.error: Exception | None = None

    def settle(self, entries: list[dict[str, Any]]) -> list[Refused]:
        """Call for up to ten entries, trying again those whose failure may pass; return the refused."""
        refused: list[Refused] = []
        for attempt in range(ENTRY_RETRIES + 1):
            if attempt:
                time.sleep(0.1 * 2**attempt)
            failed = self._failures(entries)
            if isinstance(failed, str):
                return refused + [Refused(entry["ReceiptHandle"], failed) for entry in entries]
            last = attempt == ENTRY_RETRIES
            refused += [_refused(entries, e) for e in failed if e["SenderFault"] or last]
            entries = [entries[int(e["Id"])] for e in failed if not e["SenderFault"]]
            if last or not entries:
                break
        return refused

    def _failures(self, entries: list[dict[str, Any]]) -> Sequence[BatchResultErrorEntryTypeDef] | str:
        """Call once, and return the entries that failed, or why all did."""
        if self.error is not None and self._failed_in_a_row >= FAILED_CALLS:
            return f"not tried after {FAILED_CALLS} failed calls: {self._explain(self.error)}"
        # Ids by position: receipt handles are too long, and message ids may repeat, which SQS refuses.
        numbered = [{"Id": str(i), **entry} for i, entry in enumerate(entries)]
        try:
            reply = self._call(numbered)
        except Exception as error:  # this ten's alone, until it proves to be everybody's
            self.error = error
            self._failed_in_a_row += 1
            return self._explain(error)
        self._failed_in_a_row = 0
        self.succeeded = True
        failed: Sequence[BatchResultErrorEntryTypeDef] = reply.get("Failed", [])
        return failed


def _code(error: Exception) -> str:
    """Return AWS's code of an error without its prefix, or the class of one that is not AWS's."""
    code = str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))
    return code.rsplit(".", 1)[-1] or type(error).__name__


def _refused(entries: list[dict[str, Any]], failure: BatchResultErrorEntryTypeDef) -> Refused:
    code, said = failure["Code"].rsplit(".", 1)[-1], failure.get("Message", "")
    # FIFO queues say of a handle whose lease is over that the parameter is invalid, having expired; and to put a
    # message back that is deleted meanwhile, that it does not exist.
    stale = code in {"ReceiptHandleIsInvalid", "MessageNotInflight"} or "expired" in said or "does not exist" in said
    return Refused(entries[int(failure["Id"])]["ReceiptHandle"], f"{code}: {said}", lost=stale)


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _sent(message: MessageTypeDef) -> int | None:
    """When it came to the queue, in milliseconds since 1970; not every server that speaks the protocol tells."""
    sent = message.get("Attributes", {}).get("SentTimestamp")
    return int(sent) if sent else None


def _metadata(message: MessageTypeDef) -> dict[str, Any]:
    metadata: dict[str, Any] = {"md5_of_body": message["MD5OfBody"], "attributes": message.get("Attributes", {})}
    if attributes := message.get("MessageAttributes"):
        metadata["message_attributes"] = {
            name: {key: base64.b64encode(v).decode() if isinstance(v, bytes) else v for key, v in value.items()}
            for name, value in attributes.items()
        }
    return metadata
