"""Decompression of payloads, with a bound on the expanded size, and the names of formats that are not JSON."""

from collections.abc import Iterator
from typing import Literal

import pyarrow as pa

from pipeline_platform.model.failure import PayloadError

Codec = Literal["gzip", "zstd", "snappy"]

_MOST_BYTES = 64 * 2**20
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_FRAMED = b"\xff\x06\x00\x00sNaPpY"
_XERIAL = b"\x82SNAPPY\x00"
_STARTS: dict[bytes, Codec] = {_GZIP: "gzip", _ZSTD: "zstd", _FRAMED: "snappy", _XERIAL: "snappy"}
"""First bytes of compressed payloads. Raw snappy has none."""
_EXPAND = "Use message.update_data(decompressed) first"
_UTF_16 = "it is UTF-16. Decode it with 'utf-16{}' first"
_FORMATS = {
    **{start: f"it is compressed with {codec}. {_EXPAND}" for start, codec in _STARTS.items()},
    b"\xef\xbb\xbf": "it starts with a byte order mark. Decode it with 'utf-8-sig' first",
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff"), _UTF_16.format("")),
    **dict.fromkeys((b"{\0", b"[\0"), _UTF_16.format("-le")),
    **dict.fromkeys((b"\0{", b"\0["), _UTF_16.format("-be")),
}
"""First bytes of payloads that are not JSON, and the reason."""


def format_of(data: object) -> str | None:
    """Return why a payload is not JSON, if its first bytes show it."""
    if not isinstance(data, bytes):
        return None
    return next((why for start, why in _FORMATS.items() if data.startswith(start)), None)


def decompressed(data: bytes, codec: Codec | None = None, *, most_bytes: int = _MOST_BYTES) -> bytes:
    """Decompress a payload. For `message.update_data(decompressed)`, before `message.json()`.

    Args:
        data: The payload.
        codec: Its compression. None: gzip, zstd, or snappy with frames (its framing format, or the one of Kafka's Java
            clients), by the first bytes; any other payload is returned unchanged. Raw snappy has no such bytes and must
            be named. The checksums of the framing format are not verified.
        most_bytes: Maximum size of the result in bytes: a few bytes may expand to gigabytes. 64 MiB by default.

    Returns:
        The expanded payload.

    Raises:
        PayloadError: The payload is corrupt or incomplete, or expands to more than `most_bytes`.
        ValueError: The codec is unknown.
        TypeError: `data` is not bytes: a callback has replaced it.
    """
    if not isinstance(data, bytes):
        raise TypeError(
            f"decompressed: data must be bytes, got {type(data).__name__}. Call it before data is replaced."
        )
    if codec not in (None, "gzip", "zstd", "snappy"):
        raise ValueError(f"codec: must be 'gzip', 'zstd', 'snappy' or None, got {codec!r}.")
    if codec is None:
        codec = next((codec for start, codec in _STARTS.items() if data.startswith(start)), None)
        if codec is None:
            return data
    try:
        if not data:
            raise ValueError("it is empty")
        if codec == "snappy":
            expanded = _of_snappy(data, most_bytes)
        else:
            expanded = pa.CompressedInputStream(pa.BufferReader(data), codec).read(most_bytes + 1)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise PayloadError(f"the payload cannot be decompressed with {codec}: {error}") from None
    if len(expanded) > most_bytes:
        raise PayloadError(
            f"the payload expands to more than most_bytes ({most_bytes:,}) with {codec}. Raise most_bytes"
        )
    return expanded


def _of_snappy(data: bytes, most_bytes: int) -> bytes:
    """Expand the blocks of a payload. The result is longer than `most_bytes` if it would exceed them."""
    expanded = bytearray()
    for block, is_compressed in _blocks(data):
        size = _size_of(block) if is_compressed else len(block)
        if len(expanded) + size > most_bytes:
            return bytes(most_bytes + 1)
        expanded += pa.decompress(block, size, "snappy", asbytes=True) if is_compressed and size else block[:size]
    return bytes(expanded)


def _blocks(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield the blocks of raw snappy, of the framing format, or of Kafka's, and whether they are compressed."""
    if data.startswith(_FRAMED):
        for kind, chunk in _parts(data, len(_FRAMED), "little"):
            if kind in (0, 1):  # after a checksum of four bytes
                yield chunk[4:], kind == 0
            elif 2 <= kind < 0x80:
                raise ValueError(f"it has a chunk of the unknown type {kind}")
    elif data.startswith(_XERIAL):
        for _, chunk in _parts(data, len(_XERIAL) + 8, "big"):  # after two version numbers
            yield chunk, True
    else:
        yield data, True


def _parts(data: bytes, at: int, order: Literal["little", "big"]) -> Iterator[tuple[int, bytes]]:
    """Yield the first byte of each header of four bytes, and the chunk after it.

    In the framing format, this byte is the type of the chunk, and three bytes are its length. Kafka's headers are a
    length only.
    """
    while at < len(data):
        header = data[at : at + 4]
        size = int.from_bytes(header[1:] if order == "little" else header, order)
        chunk = data[at + 4 : at + 4 + size]
        if len(header) < 4 or len(chunk) < size:
            raise ValueError("it is incomplete")
        yield header[0], chunk
        at += 4 + size


def _size_of(block: bytes) -> int:
    """Return the expanded size, which precedes the data: 7 bits in a byte, the lowest first."""
    size = 0
    for place, byte in enumerate(block[:5]):
        size |= (byte & 127) << (7 * place)
        if byte < 128:
            return size
    raise ValueError("it has no size")
