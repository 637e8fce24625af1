"""Requests to Kinesis about one stream, and explanations of its errors."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import Any, NamedTuple

from pipeline_platform.connectors.aws import BUSY, aws_client, code_of, explained
from pipeline_platform.connectors.kinesis.kinesis_options import KinesisOptions
from pipeline_platform.source.contract import SourceError

THREADS = 8
"""Concurrent requests of a process, each to another shard."""
_KNOWN_S = 5.0
"""Time for which the description of a stream is used: an account may ask for 20 descriptions per second. A stream is
not deleted and created again in this time."""
_THROTTLED = "ProvisionedThroughputExceeded.*|LimitExceeded.*|KMSThrottling.*"
_EXPLANATIONS = {
    "ResourceNotFound.*": "{what} does not exist, or a shard of it has expired (region_name {region}, endpoint_url "
    "{endpoint}). Create it, or correct the option that is wrong.",
    "ResourceInUse.*": "{what} is being created or deleted: {text}. Wait until it is active.",
    "AccessDenied.*|KMSAccessDenied.*": "permission denied for {what}: {text}. Allow "
    "kinesis:DescribeStreamSummary, kinesis:ListShards, kinesis:GetShardIterator and kinesis:GetRecords, and for "
    "send() kinesis:PutRecords; for an encrypted stream also kms:Decrypt and kms:GenerateDataKey.",
    _THROTTLED: "{what} is used at its limits ({code}): a shard allows five reads and 2 MB per second over "
    "all its consumers, and 1 MB per second of new messages. The call is retried. Add shards, or stop other consumers.",
}
"""Descriptions of errors, by patterns of their codes."""


class ExpiredIteratorError(SourceError):
    """An iterator is older than five minutes."""


class ExpiredSequenceError(SourceError):
    """The server refuses a sequence number, because its record has expired."""


class Shard(NamedTuple):
    """A shard: its id, the ids of the shards that it was split or merged from, and its range of hash keys."""

    id: str
    parents: tuple[str, ...]
    hash_keys: tuple[str, str]
    is_closed: bool


class Stream(NamedTuple):
    """A stream: time of its creation in seconds, and retention in seconds."""

    created: int
    retention_s: float


class Page(NamedTuple):
    """Records of a shard, the iterator after them (None at the end of a closed shard), and whether more may follow."""

    records: Sequence[Mapping[str, Any]]
    next: str | None
    has_more: bool


class KinesisApi:
    """Sends requests about the stream of a source."""

    def __init__(self, source: KinesisOptions) -> None:
        self._source = source
        by_name = {"StreamName": source.stream}
        self._which = {"StreamARN": source.stream} if source.stream.startswith("arn:") else by_name
        self._known: tuple[float, Stream] | None = None

    def stream(self) -> Stream:
        """Return the stream, as it was up to 5 s ago."""
        if self._known is None or time.monotonic() > self._known[0] + _KNOWN_S:
            found = self._ask("describe_stream_summary", **self._which)["StreamDescriptionSummary"]
            created = round(found["StreamCreationTimestamp"].timestamp())
            self._known = time.monotonic(), Stream(created, found["RetentionPeriodHours"] * 3_600.0)
        return self._known[1]

    def shards(self) -> tuple[list[Shard], float]:
        """Return the shards that have not expired, and the time by the server's clock, rounded down to a second."""
        found, which, now = list[Shard](), self._which, time.time()
        while True:
            reply = self._ask("list_shards", **which)
            for shard in reply["Shards"]:
                parents = (shard.get("ParentShardId"), shard.get("AdjacentParentShardId"))
                keys = (shard["HashKeyRange"]["StartingHashKey"], shard["HashKeyRange"]["EndingHashKey"])
                is_closed = bool(shard["SequenceNumberRange"].get("EndingSequenceNumber"))
                found.append(Shard(shard["ShardId"], tuple(filter(None, parents)), keys, is_closed))
            if date := reply["ResponseMetadata"]["HTTPHeaders"].get("date"):
                now = parsedate_to_datetime(date).timestamp()
            if not (token := reply.get("NextToken")):
                return found, now
            which = {"NextToken": token}

    def iterator(self, shard: str, how: Mapping[str, Any]) -> str:
        """Return an iterator; raise `ExpiredSequenceError` if the server refuses its sequence number."""
        try:
            return str(self._ask("get_shard_iterator", **self._which, ShardId=shard, **how)["ShardIterator"])
        except SourceError as error:
            code = code_of(error.__context__)
            if "StartingSequenceNumber" in how and re.match("InvalidArgument|ResourceNotFound", code):
                raise ExpiredSequenceError(str(error)) from None
            raise

    def records(self, iterator: str, limit: int) -> Page:
        """Return records from an iterator on; raise `ExpiredIteratorError` if it is too old."""
        by_arn = self._which if "StreamARN" in self._which else {}
        try:
            reply = self._ask("get_records", ShardIterator=iterator, Limit=limit, **by_arn)
        except SourceError as error:
            if code_of(error.__context__) == "ExpiredIteratorException":
                raise ExpiredIteratorError(str(error)) from None
            raise
        records, further = reply["Records"], reply.get("NextShardIterator")
        is_full = len(records) >= limit
        return Page(records, further, bool(further) and (is_full or bool(reply.get("MillisBehindLatest"))))

    def put(self, entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Send records; return an answer for each, with an `ErrorCode` if it was refused."""
        answers: list[Mapping[str, Any]] = self._ask("put_records", Records=entries, **self._which)["Records"]
        return answers

    def close(self) -> None:
        """Close the client."""
        if client := self.__dict__.pop("client", None):
            client.close()

    @cached_property
    def client(self) -> Any:
        """Client of this process."""
        return aws_client("kinesis", self._source, self._source.region, THREADS, read_timeout_s=15)

    def _ask(self, operation: str, **parameters: Any) -> Any:
        try:
            return getattr(self.client, operation)(**parameters)
        except Exception as error:
            self._known = None
            client = self.__dict__.get("client")  # missing if it could not be created
            what, away = f"stream {self._source.stream!r}", f"{BUSY}|{_THROTTLED}|ResourceInUse.*"
            raise explained(error, self._source, client, what, _EXPLANATIONS, away) from None  # AWS may quote secrets
