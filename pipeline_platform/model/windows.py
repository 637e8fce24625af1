"""Windows: the partition keys that tables, assets and paths share."""

from __future__ import annotations

from datetime import UTC, datetime

WINDOW_FORMAT = "%Y-%m-%dT%H%M"
"""A window's key is its beginning in UTC. Nothing in it needs quoting in a path, and keys sort as times do."""


def window_key(start: datetime) -> str:
    """The key of the window that begins at `start`."""
    return start.astimezone(UTC).strftime(WINDOW_FORMAT)
