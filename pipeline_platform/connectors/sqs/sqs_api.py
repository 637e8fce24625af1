"""Conversion of SQS messages, and descriptions of errors of a call or of an entry of a call."""

import base64
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pipeline_platform.model.portions import portions
from pipeline_platform.source.contract import Refused

PER_CALL = 10
"""Maximum messages of one call to SQS."""
BYTES_PER_CALL = 2**20
"""Maximum bytes of the messages of one call to send (SQS quotas, messages)."""


def metadata_of_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a received message, with binary values as base64."""
    metadata: dict[str, Any] = {"md5_of_body": message["MD5OfBody"], "attributes": message.get("Attributes", {})}
    if attributes := message.get("MessageAttributes"):
        metadata["message_attributes"] = {
            name: {key: base64.b64encode(v).decode() if isinstance(v, bytes) else v for key, v in value.items()}
            for name, value in attributes.items()
        }
    return metadata


def sequence_of(number: str) -> int:
    """Map a `SequenceNumber` of 20 digits, which exceeds 64 bits, to 63 bits, in the same order.

    AWS's numbers are between two and three times 2**63, and increase by less than a thousandth of that per year.
    """
    return int(number) % 2**63


def entry_of(number: int, body: str, metadata: Mapping[str, Any], *, is_fifo: bool) -> dict[str, Any]:
    """Return an entry for a message to send, with the parts of a received message's metadata that can be sent again.

    A binary value must be bytes or base64, as in a received message; other text raises `ValueError`.
    """
    entry: dict[str, Any] = {"Id": str(number), "MessageBody": body}
    # A standard queue refuses deduplication ids. It uses groups for fair queues.
    for name in ("MessageGroupId", "MessageDeduplicationId") if is_fifo else ("MessageGroupId",):
        if value := (metadata.get("attributes") or {}).get(name):
            entry[name] = value
    if attributes := metadata.get("message_attributes"):
        entry["MessageAttributes"] = {
            name: {
                key: base64.b64decode(v, validate=True) if key == "BinaryValue" and isinstance(v, str) else v
                for key, v in value.items()
            }
            for name, value in attributes.items()
        }
    return entry


def batches(entries: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Group entries into calls. An entry that is too large gets its own call, which SQS refuses."""
    return portions(entries, _bytes, BYTES_PER_CALL, PER_CALL)


def _bytes(entry: Mapping[str, Any]) -> int:
    """Return the bytes of a message that SQS counts: its body, and name, type and value of each attribute."""
    values = [text for name, value in entry.get("MessageAttributes", {}).items() for text in (name, *value.values())]
    return sum(len(text if isinstance(text, bytes) else text.encode()) for text in (entry["MessageBody"], *values))


NO_QUEUE = "NonExistentQueue|QueueDoesNotExist|InvalidAddress"
EXPLANATIONS = {
    NO_QUEUE: "{what} does not exist (region_name {region}, endpoint_url {endpoint}). Create it, or correct the option "
    "that is wrong.",
    "OverLimit": "{what} has reached its quota of messages in flight ({code}). Set max_in_flight to that quota, or "
    "request a higher quota: no message is received until some are deleted.",
    "AccessDenied.*|AuthorizationError|KmsAccessDenied": "permission denied for {what}: {text}. Allow "
    "sqs:GetQueueAttributes, sqs:ReceiveMessage, sqs:DeleteMessage and sqs:ChangeMessageVisibility, and for send() "
    "sqs:SendMessage.",
}
"""Descriptions of errors, by patterns of their codes."""


def words_of(failure: Mapping[str, Any]) -> str:
    """Return AWS's description of a refused entry."""
    return f"{failure['Code'].rsplit('.', 1)[-1]}: {failure.get('Message', '')}"


def refused(handle: str, failure: Mapping[str, Any]) -> Refused:
    """Return the `Refused` of an entry."""
    code, _, text = words_of(failure).partition(": ")
    # FIFO queues report an expired handle as an invalid parameter, and a message that was deleted meanwhile and is to
    # be released as missing.
    stale = code in {"ReceiptHandleIsInvalid", "MessageNotInflight"} or "expired" in text or "does not exist" in text
    return Refused(handle, f"{code}: {text}", lost=stale)
