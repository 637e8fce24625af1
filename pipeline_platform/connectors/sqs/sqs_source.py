"""Amazon SQS as a source: messages are received in tens, and deleted once published."""

import hashlib
import logging
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

import pyarrow as pa
from pydantic import Field, field_validator

from pipeline_platform.connectors.aws import Url, aws_client, code_of, explained
from pipeline_platform.connectors.sqs.sqs_api import (
    EXPLANATIONS,
    NO_QUEUE,
    PER_CALL,
    batches,
    entry_of,
    metadata_of_message,
    refused,
    sequence_of,
    words_of,
)
from pipeline_platform.source import calls
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.clients import per_process
from pipeline_platform.source.contract import Refused, Share, SourceError
from pipeline_platform.source.metadata import with_metadata
from pipeline_platform.source.options import host

logger = logging.getLogger(__name__)

_LONGEST_S = 43_200
"""Twelve hours: the longest visibility timeout of SQS, counted from the receive (SQS API, ReceiveMessage)."""
_EMPTY_REPLIES = 3
"""Consecutive empty short polls that end a share. A short poll asks a random subset of the servers (SQS guide, short
and long polling). If it asks half of them, three polls miss a waiting message once in eight; the message stays in the
backlog for the next run. A long poll asks all servers, so a single empty reply is enough."""

AttributeName = Literal[
    "All", "AWSTraceHeader", "ApproximateFirstReceiveTimestamp", "ApproximateReceiveCount", "DeadLetterQueueSourceArn",
    "MessageDeduplicationId", "MessageGroupId", "SenderId", "SentTimestamp", "SequenceNumber",
]  # fmt: skip


class SqsSource(calls.CalledSource):
    """A queue of Amazon SQS, or of a server that speaks its JSON protocol.

    Credentials are found as by other AWS clients: environment, profile, container or instance role. They need
    `sqs:GetQueueAttributes`, `sqs:ReceiveMessage`, `sqs:DeleteMessage` and `sqs:ChangeMessageVisibility`; `send` needs
    `sqs:SendMessage`.

    - The lease is the visibility timeout. Renewing it costs a request per ten messages, so set it longer than most
      runs: a run renews it after a third. SQS hides a message for at most twelve hours.
    - `redelivered` is always true: SQS may deliver a copy of a deleted message, and its receive count is approximate.
    - `published_at` is `SentTimestamp`: ids are looked up in the decisions since then.
    - `metadata` contains `md5_of_body`, `attributes` (with `ApproximateReceiveCount` and `SentTimestamp`) and
      `message_attributes`, with SQS's names; binary values are base64. A message whose body does not match its MD5 is
      skipped until its lease expires.
    - A queue's redrive policy counts every receive, also by runs that crashed: set its limit high enough.
    - On a FIFO queue `partition` is `MessageGroupId`, and `sequence` is derived from `SequenceNumber`. SQS delivers up
      to ten messages of a group at once, and no others of the group until these are deleted or visible again.
    """

    lease_option: ClassVar[str] = "visibility_timeout"

    queue_url: Url = Field(description="URL of the queue; also part of each acknowledgement.")
    visibility_timeout: int = Field(
        900,
        ge=1,
        le=_LONGEST_S,
        description="Visibility timeout in seconds, 1 to 43,200: the lease of a message, which its run renews. lease_s "
        "has the same value and cannot be set separately.",
    )
    max_number_of_messages: int = Field(
        PER_CALL, ge=1, le=PER_CALL, description="Maximum messages of one call, 1 to 10."
    )
    wait_time_seconds: int = Field(
        0, ge=0, le=20, description="Seconds that a call waits at the end of the queue, 0 to 20; 0 is short polling."
    )
    attribute_names: tuple[AttributeName, ...] = Field(
        (), description="Attributes to receive besides ApproximateReceiveCount and SentTimestamp; All for all."
    )
    message_attribute_names: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="Message attributes to receive, by name or by prefix as in 'trace.*'; All for all."
    )
    max_in_flight: int = Field(
        120_000,
        ge=1,
        description="The queue's quota of messages in flight (received and not deleted), over all its consumers. A run "
        "receives no more than the rest of the quota.",
    )
    region_name: str | None = Field(
        None, description="AWS region; by default the region in queue_url, or of the environment or profile."
    )
    endpoint_url: Url | None = Field(None, description="URL of a server other than AWS.")
    profile_name: str | None = Field(None, description="AWS profile; by default the environment's.")

    @field_validator("queue_url")
    @classmethod
    def _has_a_name(cls, url: str) -> str:
        if not urlsplit(url).path.strip("/"):
            raise ValueError(f"must end with the queue's name, got {url!r}. Use the URL from `aws sqs get-queue-url`.")
        return url

    @property
    def places(self) -> frozenset[str]:
        """The queue of an account: at `endpoint_url`, at a region of AWS however it is spelt, or at another host."""
        queue = urlsplit(self.queue_url)
        at = urlsplit(self.endpoint_url) if self.endpoint_url else queue
        region = re.match(r"sqs\.([a-z0-9-]+)\.amazonaws\.|([a-z0-9-]+)\.queue\.amazonaws\.", at.netloc.lower())
        server = region[1] or region[2] if region else f"{host(at.hostname)}:{at.port or ''}"
        return frozenset({f"queue {queue.path.strip('/')!r} at {server}"})

    @classmethod
    def without_partitions(cls, options: Mapping[str, Any]) -> str | None:
        """Return the reason for a standard queue: only FIFO queues have groups. An environment's URL is unknown."""
        is_standard = type(url := options["queue_url"]) is str and not url.endswith(".fifo")
        return "on a standard queue, which has no groups: pull from a FIFO queue" if is_standard else None

    @property
    def leases_partitions(self) -> bool:  # type: ignore[override]
        """Whether this is a FIFO queue: SQS delivers no message of a group while another is in flight."""
        return self._is_fifo

    @property
    def longest_delay_s(self) -> int:
        """The longest visibility timeout, less the lease, which may have passed already."""
        return _LONGEST_S - self.visibility_timeout

    def backlog(self) -> Backlog:
        """Return SQS's approximate number of waiting messages, limited by the quota of messages in flight."""
        # `wait` looks here too. A long poll that hides nothing (VisibilityTimeout=0) would see a message sooner, but it
        # counts as a receive: the queue's redrive policy would move messages that no run has received.
        waiting, free = self._counts()
        return Backlog(min(waiting, free))

    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """Divide the demand into shares of whole calls. Nothing is leased yet.

        The demand is limited by the quota and, without a long poll, by the number of waiting messages.
        """
        if demand < 1:
            return []
        most = self.max_number_of_messages
        waiting, free = self._counts()
        if free < min(demand, waiting):
            quota = f"max_in_flight ({self.max_in_flight:,}) leaves {free:,}"
            logger.warning("Reduced the demand of %d messages from %s: %s", demand, self.name, quota)
        # At least one call: the approximate count may miss a message that has just been sent.
        wanted = min(demand, free, demand if self.wait_time_seconds else max(waiting, most))
        return Share.equal(wanted, concurrency, most)

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Receive until the demand is met, the queue seems empty, a call fails or a third of the lease has passed.

        After a longer time the first messages could expire before the run has recorded them and renews their lease.
        """
        for messages in calls.receive(
            self._receive,
            share.messages,
            per_call=self.max_number_of_messages,
            empty_replies=1 if self.wait_time_seconds else _EMPTY_REPLIES,
            size=lambda message: len(message["Body"]),
            within_s=self.extend_every_s,
        ):
            yield self._batch(messages)

    def ack(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Delete messages by their receipt handles, ten per call; all are lost if the queue `ack_ref` was deleted."""
        return self._in_groups("delete_message_batch", ack_ref, ack_ids)

    def hold(self, ack_ref: str, ack_ids: Sequence[str], seconds: int) -> list[Refused]:
        """Hide messages for `seconds` from now, ten per call, up to twelve hours after their receive."""
        return self._in_groups("change_message_visibility_batch", ack_ref, ack_ids, VisibilityTimeout=seconds)

    def send(self, payloads: Iterable[bytes], metadata: Iterable[Mapping[str, Any] | None] | None = None) -> int:
        """Send messages, up to ten and 1 MiB per call; to a FIFO queue one call at a time, which keeps their order.

        Args:
            payloads: Text in UTF-8.
            metadata: For each message None, or metadata as in a received message: `message_attributes`, and
                `attributes` with `MessageGroupId` and `MessageDeduplicationId`. Other keys are ignored.

        Raises:
            SourceError: SQS refused a message; the text contains its number from 0. Others may have been sent.
            ValueError: The numbers of metadata and payloads differ.
        """
        calls_, sent = batches(self._entry(*each) for each in enumerate(with_metadata(payloads, metadata))), 0
        at_once = 1 if self._is_fifo else calls.THREADS
        with ThreadPoolExecutor(at_once) as pool:
            while some := list(islice(calls_, at_once)):
                failures = [failure for failed in pool.map(self._send, some) for failure in failed]
                sent += sum(map(len, some)) - len(failures)
                if failures:
                    first = min(failures, key=lambda failure: int(failure["Id"]))
                    raise self.error(
                        f"{self.queue_url} refused {len(failures)} of {sent + len(failures)} messages. First error, "
                        f"for message {first['Id']}: {words_of(first)}. Correct the refused messages, and send them "
                        "again."
                    )
        return sent

    def labelled(self, labels: Mapping[str, str]) -> Mapping[str, Any]:
        """Return labels as message attributes; on a FIFO queue with the pipeline as group, deduplicated by content."""
        metadata: dict[str, Any] = {
            "message_attributes": {name: {"DataType": "String", "StringValue": text} for name, text in labels.items()}
        }
        if self._is_fifo:
            digest = hashlib.sha256("\0".join(labels.values()).encode()).hexdigest()
            metadata["attributes"] = {"MessageGroupId": labels["pipeline"], "MessageDeduplicationId": digest}
        return metadata

    @per_process
    def _client(self) -> Any:
        in_url = re.match(r"sqs\.([a-z0-9-]+)\.amazonaws\.", urlsplit(self.queue_url).netloc)
        region = self.region_name or (in_url.group(1) if in_url else None)
        return aws_client("sqs", self, region, calls.THREADS, read_timeout_s=10 + self.wait_time_seconds)

    def _ask(self, operation: str, **parameters: Any) -> Any:
        client = None
        try:
            client = self._client
            return getattr(client, operation)(**parameters)
        except Exception as error:
            what = f"queue_url {self.queue_url!r}"
            raise explained(error, self, client, what, EXPLANATIONS) from None  # AWS may quote the rejected credentials

    @property
    def _is_fifo(self) -> bool:
        return self.queue_url.endswith(".fifo")

    def _counts(self) -> tuple[int, int]:
        """Return the number of waiting messages, and the rest of the quota of messages in flight."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        attributes = self._ask("get_queue_attributes", QueueUrl=self.queue_url, AttributeNames=names)["Attributes"]
        waiting, hidden = (int(attributes[name]) for name in names)
        return waiting, max(0, self.max_in_flight - hidden)

    def _receive(self, most: int) -> list[dict[str, Any]]:
        attributes, attempt = {"ApproximateReceiveCount", "SentTimestamp", *self.attribute_names}, dict[str, str]()
        if self._is_fifo:
            attributes |= {"MessageGroupId", "SequenceNumber"}
            # The client library repeats a call whose reply was lost. With an id, it gets the same messages. Otherwise
            # these and all later messages of their groups would stay hidden until the visibility timeout ends.
            attempt["ReceiveRequestAttemptId"] = uuid.uuid4().hex
        try:
            reply = self._ask(
                "receive_message",
                QueueUrl=self.queue_url,
                MaxNumberOfMessages=most,
                VisibilityTimeout=self.visibility_timeout,
                WaitTimeSeconds=self.wait_time_seconds,
                MessageSystemAttributeNames=["All"] if "All" in attributes else sorted(attributes),
                MessageAttributeNames=list(self.message_attribute_names),
                **attempt,
            )
        except SourceError as error:
            # SQS refuses the id if messages of the lost reply have changed since. The next call has another id.
            if code_of(error.__context__) != "OverLimit" and "ReceiveRequestAttemptId" not in str(error):
                raise
            logger.warning("%s", error)
            return []  # not a failure: other tasks may have received messages
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
                logger.warning(
                    "Skipped message %s of %s until its lease expires: corrupt body", message["MessageId"], self.name
                )
        # Other servers with this protocol may not report when a message was sent.
        of_each = [m.get("Attributes", {}) for m in whole]
        sent = [attributes.get("SentTimestamp") for attributes in of_each]
        return self.deliveries(
            message_id=[m["MessageId"] for m in whole],
            data=data,
            ack_id=[m["ReceiptHandle"] for m in whole],
            ack_ref=self.queue_url,
            metadata=[metadata_of_message(m) for m in whole],
            published_at=pa.array([int(ms) if ms else None for ms in sent], pa.timestamp("ms", "UTC")),
            partition=[attributes.get("MessageGroupId") for attributes in of_each] if self._is_fifo else None,
            sequence=[sequence_of(attributes["SequenceNumber"]) for attributes in of_each] if self._is_fifo else None,
        )

    def _entry(self, number: int, pair: tuple[bytes, Mapping[str, Any]]) -> dict[str, Any]:
        payload, metadata = pair
        try:
            return entry_of(number, payload.decode(), metadata, is_fifo=self._is_fifo)
        except UnicodeDecodeError as error:
            problem = f"message {number} must be UTF-8 text: {error}. Encode it, for example as base64."
            raise self.error(problem) from error
        except ValueError as error:
            problem = f"a BinaryValue of message {number} must be bytes or base64: {error}. Correct it."
            raise self.error(problem) from error

    def _send(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        reply = self._ask("send_message_batch", QueueUrl=self.queue_url, Entries=entries)
        failed: list[dict[str, Any]] = reply.get("Failed", [])
        return failed

    def _in_groups(self, operation: str, queue_url: str, handles: Sequence[str], **options: Any) -> list[Refused]:
        def ask(ten: Sequence[str]) -> list[Refused]:
            # Positions as ids: receipt handles are too long, and message ids may repeat, which SQS refuses.
            entries = [{"Id": str(i), "ReceiptHandle": handle, **options} for i, handle in enumerate(ten)]
            try:
                reply = self._ask(operation, QueueUrl=queue_url, Entries=entries)
            except SourceError as error:
                if queue_url == self.queue_url or not re.fullmatch(NO_QUEUE, code_of(error.__context__)):
                    raise
                return [Refused(handle, f"{queue_url} was deleted", lost=True) for handle in ten]
            return [refused(ten[int(failure["Id"])], failure) for failure in reply.get("Failed", [])]

        return calls.in_groups(ask, handles, PER_CALL)
