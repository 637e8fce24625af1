"""Windows: the partition keys that tables, assets and paths share."""

from datetime import UTC, datetime

WINDOW_FORMAT = "%Y-%m-%dT%H%M"
"""A window's key is its beginning in UTC. Nothing in it needs quoting in a path, and keys sort as times do."""


EARLIEST = datetime(2026, 1, 1, tzinfo=UTC)
"""Before any data that there can be: where the first window is not known, none is missing."""


def window_key(start: datetime) -> str:
    """The key of the window that begins at `start`."""
    return start.astimezone(UTC).strftime(WINDOW_FORMAT)


def expect_window(key: str) -> None:
    """Raise a `ValueError` where a key is no window's."""
    try:
        is_one = window_key(datetime.strptime(key, WINDOW_FORMAT).replace(tzinfo=UTC)) == key
    except ValueError:
        is_one = False
    if not is_one:
        raise ValueError(f"{key!r} is not the key of a window: give its begin in UTC, such as 2026-11-21T0300")
