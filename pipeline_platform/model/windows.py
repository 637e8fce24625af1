"""Windows: the partition keys of tables, assets and paths; and cron schedules, by Dagster's rules, without Dagster."""

import re
from collections.abc import Sequence
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


CRON_FIX = (
    "Use five fields (minute, hour, day of month, month, day of week), for example '0 * * * *' for every hour "
    "or '30 2 * * *' for 02:30 every night."
)
"""The fix in errors about a schedule that is not valid."""

_NICKNAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_DAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]
_FIELDS: tuple[tuple[range, dict[str, int]], ...] = (
    (range(60), {}),
    (range(24), {}),
    (range(1, 32), {}),
    (range(1, 13), {name: month for month, name in enumerate(_MONTHS, 1)}),
    (range(8), {name: day for day, name in enumerate(_DAYS)}),  # Sunday is 0 and 7
)
_ITEM = re.compile(r"(?:\*|(?P<first>\w+)(?:-(?P<last>\w+))?)(?:/(?P<step>\d+))?")


def is_cron(text: object) -> bool:
    """Whether this is a cron schedule: five fields of numbers, names, ranges and steps, or a nickname like `@daily`."""
    fields = canonical(text).split() if isinstance(text, str) else []
    if len(fields) != len(_FIELDS) or (fields[2] in ("30", "31") and fields[3] in ("2", "feb")):  # never
        return False
    return all(_numbers(item, *kind) for field, kind in zip(fields, _FIELDS, strict=True) for item in field.split(","))


def most_a_day(schedule: str) -> int:
    """Return how often a cron schedule fires on a day on which it fires."""
    minutes, hours = (
        {number for item in field.split(",") for number in _numbers(item, *kind)}
        for field, kind in zip(canonical(schedule).split(), _FIELDS[:2], strict=False)
    )
    return len(minutes) * len(hours)


def canonical(schedule: str) -> str:
    """Return the normal form of a cron schedule: five fields, lower case, one blank between them."""
    text = " ".join(schedule.lower().split())
    return _NICKNAMES.get(text, text)


def _numbers(item: str, allowed: range, names: dict[str, int]) -> Sequence[int]:
    """Return the numbers of an item; empty if it is not valid. A range like 22-2 continues from the field's start."""
    match = _ITEM.fullmatch(item)
    if match is None or match["step"] == "0":
        return ()
    step = int(match["step"] or 1)
    if match["first"] is None:
        return allowed[::step]
    given = [names.get(bound, int(bound) if bound.isdecimal() else -1) for bound in match.group(1, 2) if bound]
    if not all(bound in allowed for bound in given):
        return ()
    first, last = given[0], given[-1] if match["last"] else allowed[-1] if match["step"] else given[0]
    numbers = (
        range(first, last + 1) if first <= last else [*range(first, allowed.stop), *range(allowed.start, last + 1)]
    )
    return numbers[::step]
