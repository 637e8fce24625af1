"""Decompression of payloads, up to a bound."""

import gzip

import pyarrow as pa
import pytest

from pipeline_platform import PayloadError, decompressed
from pipeline_platform.model.message import Message
from tests.fixtures.small_lake import batch_of

TEXT = b'{"number": 1}' * 1_000


def packed(codec: str, data: bytes = TEXT) -> bytes:
    return gzip.compress(data) if codec == "gzip" else bytes(pa.compress(data, codec, asbytes=True))


@pytest.mark.parametrize("codec", ["gzip", "zstd", "snappy"])
def test_a_payload_is_expanded_up_to_the_bound(codec):
    assert decompressed(packed(codec), codec, most_bytes=len(TEXT)) == TEXT
    with pytest.raises(PayloadError):
        decompressed(packed(codec), codec, most_bytes=len(TEXT) - 1)


@pytest.mark.parametrize("payload", [packed("gzip"), packed("zstd"), TEXT], ids=["gzip", "zstd", "plain"])
def test_the_first_bytes_tell_the_codec_and_other_payloads_are_unchanged(payload):
    assert decompressed(payload) == TEXT


def test_parts_that_were_compressed_one_by_one_are_joined():
    assert decompressed(packed("gzip", b"[1,") + packed("gzip", b"2]")) == b"[1,2]"


@pytest.mark.parametrize("codec", ["gzip", "zstd", "snappy"])
def test_an_incomplete_or_corrupt_payload_is_refused(codec):
    for payload in (packed(codec)[:-1], packed(codec)[:2], b"", b"\xff" * 20):
        with pytest.raises(PayloadError):
            decompressed(payload, codec)


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
