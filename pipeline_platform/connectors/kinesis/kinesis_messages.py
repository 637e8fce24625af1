"""Conversion of Kinesis messages to columns of deliveries, and sending."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any

import pyarrow as pa

from pipeline_platform.connectors.kinesis.kinesis_api import KinesisApi
from pipeline_platform.connectors.kinesis.kinesis_options import KinesisOptions
from pipeline_platform.connectors.kinesis.marks import Mark
from pipeline_platform.connectors.kinesis.shard_cursor import ShardMessage
from pipeline_platform.model.portions import portions
from pipeline_platform.source.pauses import pause_s

logger = logging.getLogger(__name__)

_PER_CALL, _BYTES_PER_CALL = 500, 5 * 2**20
"""Maximum records and bytes of a call (Kinesis API, PutRecords; twice as many bytes are allowed since 2025)."""
_RETRIED = {"ProvisionedThroughputExceededException", "InternalFailure"}
"""Codes of refusals that a retry may avoid."""


def shard_name(stream: str, created: int, shard: str) -> str:
    """Return the permanent name of a shard: a stream that is deleted and created again has the same shard ids."""
    return f"{stream}:{created}:{shard}"


def delivery_columns(shard: str, first: int, messages: Sequence[ShardMessage], again_to: float) -> dict[str, Any]:
    """Return the columns for `Source.deliveries`. JSON is built as text: `json.dumps` takes longer than the receive.

    Args:
        shard: Permanent name of the shard.
        first: Number of the first message.
        messages: Messages of the shard, in order.
        again_to: Messages that arrived earlier may have been delivered before.
    """
    stream, _, shard_id = shard.split(":")
    identity = shard.partition(":")[2]
    subs = ["" if message.sub is None else f":{message.sub}" for message in messages]
    times = [message.arrived.timestamp() for message in messages]
    head = f'{{"stream": "{stream}", "shard": "{shard_id}", "sequence_number": "'
    return {
        "message_id": [f"{identity}:{m.sequence}{sub}" for m, sub in zip(messages, subs, strict=True)],
        "data": [message.data for message in messages],
        "ack_id": [
            f"{number}:{m.sequence}:{time_:.3f}{sub}"
            for number, (m, sub, time_) in enumerate(zip(messages, subs, times, strict=True), first)
        ],
        "ack_ref": shard,
        "metadata": pa.array(
            [
                f'{head}{m.sequence}", "sub_sequence_number": {"null" if m.sub is None else m.sub}, '
                f'"partition_key": {encode_basestring(m.key)}, "timestamp": {round(time_ * 1_000)}}}'
                for m, time_ in zip(messages, times, strict=True)
            ],
            pa.string(),
        ),
        "redelivered": [time_ <= again_to for time_ in times],
        "published_at": pa.array([round(time_ * 1_000) for time_ in times], pa.timestamp("ms", "UTC")),
        "partition": [message.key for message in messages],
        "sequence": range(first, first + len(messages)),
    }


def mark_after(ack_id: str, before: Mark) -> Mark:
    """Return the position after a message."""
    _, sequence, arrived, *sub = ack_id.split(":")
    at = float(arrived)
    return Mark(sequence=sequence, sub=int(sub[0]) if sub else None, arrived=at, since=at, again_to=before.again_to)


def entries_of(messages: Iterable[tuple[bytes, Mapping[str, Any]]]) -> Iterable[dict[str, Any]]:
    """Yield the entries of calls that send payloads; without a partition key, each has another shard."""
    for payload, given in messages:
        entry = {"Data": payload, "PartitionKey": str(given.get("partition_key") or uuid.uuid4().hex)}
        if (hash_key := given.get("explicit_hash_key")) is not None:
            entry["ExplicitHashKey"] = str(hash_key)
        yield entry


def put(api: KinesisApi, entries: Iterable[dict[str, Any]], source: KinesisOptions) -> int:
    """Send entries, and send refused ones again; return their number.

    Raises:
        SourceError: Messages were refused until the patience ended, or for another reason than the limits of a shard.
    """
    sent, patience = 0, source.patience
    for group in portions(entries, _bytes, _BYTES_PER_CALL, _PER_CALL):
        left, attempt, end = group, 1, time.monotonic() + patience.within_s
        while left:
            answers = api.put(left)
            refusals = [(entry, answer) for entry, answer in zip(left, answers, strict=True) if answer.get("ErrorCode")]
            sent += len(left) - len(refusals)
            left = [entry for entry, _ in refusals]
            if not refusals:
                break
            attempt += 1
            pause, (_, first) = pause_s(patience, attempt), refusals[0]
            is_over = patience.backoff == "stop" or time.monotonic() + pause > end
            if is_over or not {answer["ErrorCode"] for _, answer in refusals} <= _RETRIED:
                raise source.error(
                    f"Kinesis refused {len(left)} messages, after {sent} were sent. First error: {first['ErrorCode']}: "
                    f"{first.get('ErrorMessage', '')}. Send them again, or add shards."
                )
            logger.warning("%s: sending %d messages again: %s", source.name, len(left), first["ErrorCode"])
            time.sleep(pause)
    return sent


def _bytes(entry: Mapping[str, Any]) -> int:
    return len(entry["Data"]) + len(entry["PartitionKey"].encode())
