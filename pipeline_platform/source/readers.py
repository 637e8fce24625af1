"""Which deployments read a source, by marks that they leave at it: a warning, on which nothing else rests."""

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final, NamedTuple

LATELY_S: Final = 900.0
"""For so long a mark counts: one that was left before a switch to another deployment warns no longer than this."""


class Reader(NamedTuple):
    """A deployment: the id of its control store, a name for people, and when it last took messages on."""

    id: str
    name: str
    seen_at: float

    @property
    def is_late(self) -> bool:
        """Whether it has not been seen lately."""
        return self.seen_at < time.time() - LATELY_S


def others(readers: Iterable[Reader], me: Reader) -> str:
    """Say which deployments but this one have read a source lately; empty if none has."""
    latest = {reader.id: reader for reader in sorted(readers, key=lambda reader: reader.seen_at)}
    named = [reader for reader in latest.values() if reader.id != me.id and not reader.is_late]
    return "; ".join(
        f"deployment {reader.name}, last seen {datetime.fromtimestamp(reader.seen_at, UTC):%H:%M} UTC, also reads this source"
        for reader in named
    )


def as_text(readers: Iterable[Reader]) -> str:
    """Marks of the few latest readers in a short text."""
    return json.dumps(sorted(readers, key=lambda reader: -reader.seen_at)[:5], separators=(",", ":"))


def of_text(text: str) -> list[Reader]:
    """Read marks; a text that holds none is no error."""
    with suppress(ValueError, TypeError):
        return [Reader(str(id_), str(name), float(seen_at)) for id_, name, seen_at in json.loads(text)]
    return []
