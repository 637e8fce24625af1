"""Decompression of payloads, up to a bound."""

import gzip
from typing import Any

import pyarrow as pa
import pytest

from pipeline_platform import PayloadError, decompressed
from pipeline_platform.model.message import Message
from tests.fixtures.small_lake import batch_of

TEXT = b'{"number": 1}' * 1_000


def packed(codec: str, data: bytes = TEXT) -> bytes:
    """Return a compressed payload; `framed` and `xerial` are snappy in two blocks, with their frames."""
    if codec == "gzip":
        return gzip.compress(data)
    if codec not in ("framed", "xerial"):
        return bytes(pa.compress(data, codec, asbytes=True))
    blocks = [bytes(pa.compress(part, "snappy", asbytes=True)) for part in (data[:9_000], data[9_000:])]
    if codec == "xerial":
        lengths = [len(block).to_bytes(4, "big") for block in blocks]
        return b"\x82SNAPPY\0" + b"\0\0\0\1" * 2 + b"".join(sum(zip(lengths, blocks, strict=True), ()))
    chunks = [(0, blocks[0]), (0xFE, b"padding"), (0, blocks[1]), (1, b"")]
    return b"\xff\x06\x00\x00sNaPpY" + b"".join(
        bytes([kind]) + (4 + len(block)).to_bytes(3, "little") + b"crc!" + block for kind, block in chunks
    )


def named(codec: str) -> Any:
    return "snappy" if codec in ("framed", "xerial") else codec


CODECS = pytest.mark.parametrize("codec", ["gzip", "zstd", "snappy", "framed", "xerial"])


@CODECS
def test_a_payload_is_expanded_up_to_the_bound(codec):
    assert decompressed(packed(codec), named(codec), most_bytes=len(TEXT)) == TEXT
    with pytest.raises(PayloadError):
        decompressed(packed(codec), named(codec), most_bytes=len(TEXT) - 1)


@pytest.mark.parametrize("codec", ["gzip", "zstd", "framed", "xerial"])
def test_the_first_bytes_tell_the_codec(codec):
    assert decompressed(packed(codec)) == TEXT


def test_other_payloads_are_unchanged():
    assert decompressed(TEXT) == TEXT


def test_a_chunk_that_is_not_compressed_is_copied():
    chunk = b"\x01" + (4 + len(TEXT)).to_bytes(3, "little") + b"crc!" + TEXT
    assert decompressed(b"\xff\x06\x00\x00sNaPpY" + chunk * 2) == TEXT * 2


def test_a_chunk_of_an_unknown_type_is_refused():
    with pytest.raises(PayloadError):
        decompressed(b"\xff\x06\x00\x00sNaPpY" + b"\x02\0\0\0")


def test_parts_that_were_compressed_one_by_one_are_joined():
    assert decompressed(packed("gzip", b"[1,") + packed("gzip", b"2]")) == b"[1,2]"


@CODECS
def test_an_incomplete_or_corrupt_payload_is_refused(codec):
    for payload in (packed(codec)[:-1], packed(codec)[:2], b"", b"\xff" * 20):
        with pytest.raises(PayloadError):
            decompressed(payload, named(codec))


def test_a_snappy_payload_that_announces_more_than_the_bound_is_refused_unread():
    with pytest.raises(PayloadError):
        decompressed(b"\xff\xff\xff\xff\x0f" + b"x", "snappy")


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="codec"):
        decompressed(TEXT, "brotli")
    with pytest.raises(TypeError):
        decompressed("text")


def test_a_message_is_decoded_after_one_call():
    (message,) = Message.each(batch_of(packed("zstd", b'{"number": 1}')))

    assert message.update_data(decompressed).json() == {"number": 1}
