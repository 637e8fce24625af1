"""Records that the Kinesis Producer Library aggregated."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_platform.connectors.kinesis.aggregated_records import MAGIC, Part, hash_key_of, parts_of
from tests.fixtures.kinesis import aggregated

MESSAGES = st.lists(st.tuples(st.text(min_size=1, max_size=200), st.binary(max_size=300)), max_size=8)


@given(MESSAGES)
def test_messages_keep_their_order_keys_and_payloads(messages):
    assert parts_of(aggregated(messages)) == [Part(key, hash_key_of(key), data) for key, data in messages]


def test_a_key_that_several_messages_share_and_unknown_fields():
    shared = b"\x0a\x01k\x12\x0212\x1a\x06\x08\x00\x10\x00\x1a\x00\x1a\x0a\x08\x00\x22\x03\x0a\x01t\x1a\x01d"
    body = shared + b"\x21" + bytes(8) + b"\x2d" + bytes(4) + b"\x30\x96\x01"
    assert parts_of(_signed(body)) == [Part("k", 12, b""), Part("k", hash_key_of("k"), b"d")]


def _signed(body: bytes) -> bytes:
    return MAGIC + body + hashlib.md5(body, usedforsecurity=False).digest()


@pytest.mark.parametrize(
    "record",
    [
        b"",
        MAGIC,
        b"plain",
        aggregated([("k", b"data")])[:-1] + b"x",
        b"\x00" + aggregated([("k", b"data")])[1:],
        _signed(b"\x0a\x7f"),  # a field that is longer than the record
        _signed(b"\x0a\x01\xff"),  # a key that is not UTF-8
        _signed(b"\x1a\x02\x08\x05"),  # the number of a key that is missing
        _signed(b"\x1a\x02\x08\x80"),  # a number without an end
        _signed(b"\x0b"),  # an unknown type
        _signed(b"\xff" * 2**20),  # a number of a megabyte
    ],
)
def test_any_other_record_is_a_plain_message(record):
    assert parts_of(record) is None


@given(st.binary(max_size=60))
def test_no_content_raises(body):
    parts_of(_signed(body))
