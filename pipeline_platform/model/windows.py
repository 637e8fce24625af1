"""Windows: the partition keys of tables, assets and paths."""

from datetime import UTC, datetime

WINDOW_FORMAT = "%Y-%m-%dT%H%M"
"""Format of a window's key: its start in UTC, valid in paths, and sortable as text."""


EARLIEST = datetime(2026, 1, 1, tzinfo=UTC)
"""First window if `first_window` is unknown; no data is older."""


def window_key(start: datetime) -> str:
    """Return the key of the window that begins at `start`."""
    return start.astimezone(UTC).strftime(WINDOW_FORMAT)


def expect_window(key: str) -> None:
    """Raise a `ValueError` if a key is not the key of a window."""
    try:
        is_valid = window_key(datetime.strptime(key, WINDOW_FORMAT).replace(tzinfo=UTC)) == key
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ValueError(f"{key!r} is not the key of a window. Use its start in UTC, for example 2026-11-21T0300.")
