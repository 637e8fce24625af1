"""Messages of SQS in the API's words: what a received one says of itself, and how one is put to be sent."""

import base64
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pipeline_platform.model.portions import portions

PER_CALL = 10
"""The most messages that SQS takes or gives in one call."""
BYTES_PER_CALL = 2**20
"""The most that the messages of one call to send come to (SQS quotas, messages)."""


def metadata_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """What a received message says beside its body; binary values as base64."""
    metadata: dict[str, Any] = {"md5_of_body": message["MD5OfBody"], "attributes": message.get("Attributes", {})}
    if attributes := message.get("MessageAttributes"):
        metadata["message_attributes"] = {
            name: {key: base64.b64encode(v).decode() if isinstance(v, bytes) else v for key, v in value.items()}
            for name, value in attributes.items()
        }
    return metadata


def sequence_of(number: str) -> int:
    """Fit a `SequenceNumber`, of 20 digits and beyond 64 bits, into 63 bits; the order of numbers stays.

    Those of AWS lie between two and three times 2**63, and rise by less than a thousandth of that in a year.
    """
    return int(number) % 2**63


def entry_of(number: int, body: str, metadata: Mapping[str, Any] | None, *, is_fifo: bool) -> dict[str, Any]:
    """A message to be sent, with what of the metadata of a received one can be sent again."""
    entry: dict[str, Any] = {"Id": str(number), "MessageBody": body}
    given = metadata or {}
    # A queue that is not FIFO refuses ids for deduplication; by groups it is fair to those who send.
    for name in ("MessageGroupId", "MessageDeduplicationId") if is_fifo else ("MessageGroupId",):
        if value := (given.get("attributes") or {}).get(name):
            entry[name] = value
    if attributes := given.get("message_attributes"):
        entry["MessageAttributes"] = {
            name: {key: base64.b64decode(v) if key == "BinaryValue" else v for key, v in value.items()}
            for name, value in attributes.items()
        }
    return entry


def batches(entries: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Put entries together for calls; one that is too large gets a call of its own, for SQS to refuse."""
    return portions(entries, _bytes, BYTES_PER_CALL, PER_CALL)


def _bytes(entry: Mapping[str, Any]) -> int:
    """What SQS counts of a message: its body, and name, type and value of each attribute."""
    values = [text for name, value in entry.get("MessageAttributes", {}).items() for text in (name, *value.values())]
    return sum(len(text if isinstance(text, bytes) else text.encode()) for text in (entry["MessageBody"], *values))
