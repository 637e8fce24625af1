"""Marks that deployments leave at a log, to warn when several read it: each skips what the others commit."""

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final, NamedTuple

LATELY_S: Final = 900.0
"""Lifetime of a mark in seconds, which is also how long the warning lasts after a switch to another deployment."""


class Reader(NamedTuple):
    """A deployment: id of its control store, display name, and the time when it last received messages."""

    id: str
    name: str
    seen_at: float

    @property
    def is_late(self) -> bool:
        """Whether the mark has expired."""
        return self.seen_at < time.time() - LATELY_S


def others(readers: Iterable[Reader], me: Reader) -> str:
    """Return a description of the other deployments that read a source lately; empty if there are none."""
    latest = {reader.id: reader for reader in sorted(readers, key=lambda reader: reader.seen_at)}
    named = [reader for reader in latest.values() if reader.id != me.id and not reader.is_late]
    return "; ".join(
        f"deployment {reader.name}, last seen {datetime.fromtimestamp(reader.seen_at, UTC):%H:%M} UTC, "
        "also reads this source"
        for reader in named
    )


def as_text(readers: Iterable[Reader]) -> str:
    """Return the marks of the five latest readers as a short text."""
    return json.dumps(sorted(readers, key=lambda reader: -reader.seen_at)[:5], separators=(",", ":"))


def of_text(text: str) -> list[Reader]:
    """Return the marks in a text; empty if it contains none."""
    with suppress(ValueError, TypeError):
        return [Reader(str(id_), str(name), float(seen_at)) for id_, name, seen_at in json.loads(text)]
    return []
