"""Metadata of messages: as JSON, and beside the payloads to send."""

import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any


def as_json(metadata: Mapping[str, Any]) -> str:
    """Return metadata as JSON. Bytes are text if they are UTF-8, else `{"base64": ...}`."""
    return json.dumps(metadata, default=_plain)


def _plain(value: object) -> object:
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(value).decode()}


def with_metadata(
    payloads: Iterable[bytes], metadata: Iterable[Mapping[str, Any] | None] | None
) -> Iterator[tuple[bytes, Mapping[str, Any]]]:
    """Yield the payloads of `Source.send`, each with its metadata, which are empty for None.

    Raises:
        TypeError: A payload is not `bytes`.
        ValueError: The numbers of metadata and payloads differ.
    """
    missing: Any = object()
    for payload, note in zip_longest(payloads, () if metadata is None else metadata, fillvalue=missing):
        if payload is missing or (note is missing and metadata is not None):
            which = "more" if payload is missing else "fewer"
            raise ValueError(f"metadata has {which} entries than payloads. Pass one or None per payload.")
        if not isinstance(payload, bytes):
            raise TypeError(f"a payload must be bytes, got {type(payload).__name__}. Encode it.")
        yield payload, {} if note is missing or note is None else note
