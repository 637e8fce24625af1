"""Records that the Kinesis Producer Library aggregated from several messages (its aggregation-format.md).

A record is four magic bytes, a protobuf message `AggregatedRecord`, and the MD5 digest of the message. The two types of
protobuf fields that it uses are decoded here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

MAGIC = b"\xf3\x89\x9a\xc2"
_DIGEST_BYTES = 16
_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}
"""Lengths of fields of the other types, which are skipped."""


class Part(NamedTuple):
    """A message of an aggregated record.

    Attributes:
        key: Partition key.
        hash_key: Number that determines its shard.
        data: Payload.
    """

    key: str
    hash_key: int
    data: bytes


def parts_of(record: bytes) -> list[Part] | None:
    """Return the messages of an aggregated record, in order; None for another record, or a damaged one."""
    if not record.startswith(MAGIC):
        return None
    body, digest = record[len(MAGIC) : -_DIGEST_BYTES], record[-_DIGEST_BYTES:]
    if hashlib.md5(body, usedforsecurity=False).digest() != digest:
        return None
    keys, hash_keys, messages = list[str](), list[int](), list[bytes]()
    try:
        for number, value in _fields(body):
            if number == 1 and isinstance(value, bytes):
                keys.append(value.decode())
            elif number == 2 and isinstance(value, bytes):
                hash_keys.append(int(value))
            elif number == 3 and isinstance(value, bytes):
                messages.append(value)
        return [_part(message, keys, hash_keys) for message in messages]
    except (ValueError, LookupError):
        return None


def hash_key_of(key: str) -> int:
    """Return the hash key of a partition key."""
    return int.from_bytes(hashlib.md5(key.encode(), usedforsecurity=False).digest())


def _part(message: bytes, keys: list[str], hash_keys: list[int]) -> Part:
    key, hash_key, data = "", None, b""
    for number, value in _fields(message):
        if number == 1 and isinstance(value, int):
            key = keys[value]
        elif number == 2 and isinstance(value, int):
            hash_key = hash_keys[value]
        elif number == 3 and isinstance(value, bytes):
            data = value
    return Part(key, hash_key_of(key) if hash_key is None else hash_key, data)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a protobuf message; raise `ValueError` if it is damaged."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            length, at = _varint(message, at)
        else:
            length = _FIXED.get(kind, len(message))
        if at + length > len(message):
            raise ValueError("a field is longer than its message")
        yield tag >> 3, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:  # a longer number would take time that grows with the square of its length
        byte = message[at]  # raises LookupError at the end
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("a number has more than ten bytes")
