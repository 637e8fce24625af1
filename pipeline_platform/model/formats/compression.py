"""Decompression of payloads, with a bound on the expanded size, and the names of formats that are not JSON."""

from typing import Literal

import pyarrow as pa

from pipeline_platform.model.failure import PayloadError

Codec = Literal["gzip", "zstd", "snappy"]

_MOST_BYTES = 64 * 2**20
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_EXPAND = "Use message.update_data(decompressed) first"
_UTF_16 = "it is UTF-16. Decode it with 'utf-16{}' first"
_FORMATS = {
    _GZIP: f"it is compressed with gzip. {_EXPAND}",
    _ZSTD: f"it is compressed with zstd. {_EXPAND}",
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
        codec: Its compression. None: gzip or zstd, by the first bytes, and any other payload is returned unchanged.
            Snappy (the raw format, without frames) has no such bytes and must be named.
        most_bytes: Most bytes of the result: a few bytes may expand to gigabytes. 64 MiB by default.

    Returns:
        The expanded payload.

    Raises:
        PayloadError: The payload is corrupt or incomplete, or expands to more than `most_bytes`.
        ValueError: The codec is unknown.
        TypeError: `data` is not bytes: a callback has replaced it.
    """
    if not isinstance(data, bytes):
        raise TypeError(f"decompressed requires data of type bytes, got {type(data).__name__}")
    if codec not in (None, "gzip", "zstd", "snappy"):
        raise ValueError(f"codec: must be 'gzip', 'zstd', 'snappy' or None, got {codec!r}.")
    if codec is None:
        codec = "gzip" if data.startswith(_GZIP) else "zstd" if data.startswith(_ZSTD) else None
        if codec is None:
            return data
    try:
        if not data:
            raise ValueError("it is empty")
        if codec == "snappy":
            size = _size_of_snappy(data)
            expanded = data if size > most_bytes else bytes(pa.decompress(data, size, codec, asbytes=True))
        else:
            expanded = pa.CompressedInputStream(pa.BufferReader(data), codec).read(most_bytes + 1)
            size = len(expanded)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise PayloadError(f"the payload cannot be decompressed with {codec}: {error}") from None
    if size > most_bytes:
        raise PayloadError(f"the payload expands to more than {most_bytes:,} bytes with {codec}. Raise most_bytes")
    return expanded


def _size_of_snappy(data: bytes) -> int:
    """Return the expanded size, which precedes the data: 7 bits in a byte, the lowest first."""
    size = 0
    for place, byte in enumerate(data[:5]):
        size |= (byte & 127) << (7 * place)
        if byte < 128:
            return size
    raise ValueError("it has no size")
