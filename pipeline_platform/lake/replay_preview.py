"""Preview of a replay: the messages of each window, and the rows that the replay replaces."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pipeline_platform.lake.failed import NONE, FailedMessages
from pipeline_platform.lake.removed_batchers import removed_batchers
from pipeline_platform.lake.replay import ReplayedMessages
from pipeline_platform.lake.tables import Table, Tables


class ReplayedWindow(NamedTuple):
    """A window of a replay.

    Attributes:
        window: Its key.
        messages: Messages that the replay handles again.
        rows: Rows that the replay replaces, by table; tables without rows are left out.
        open_failures: Open failures that the replay replaces.
        missing: Messages that the raw log lacks at least; if any, the replay fails.
    """

    window: str
    messages: int
    rows: dict[str, int]
    open_failures: int
    missing: int


def decided_messages(tables: Tables, windows: Iterable[str]) -> dict[str, int]:
    """Return the number of messages that a replay of each window handles again; windows without messages are left out.

    The ids of all outcomes of the windows are read.
    """
    name = tables.pipeline.name
    source = ReplayedMessages(
        name=name, lake=tables.lake, pipeline=name, windows=tuple(windows), version=tables["outcomes"].version()
    )
    return source.by_window()


def preview(tables: Tables, messages: dict[str, int]) -> Iterator[ReplayedWindow]:
    """Yield what a replay of each window replaces, oldest window first.

    Args:
        tables: Tables of the pipeline.
        messages: Messages of each window, as `decided_messages` returns them.
    """
    name = tables.pipeline.name
    names = [*tables.pipeline.batchers, *removed_batchers(tables)]
    rows = {table: _rows(tables[table], messages) for table in names}
    stored = _rows(tables["messages"], messages)
    failed = FailedMessages(name=name, lake=tables.lake, pipeline=name, windows=tuple(messages)).by_window()
    for window, count in sorted(messages.items()):
        replaced = {table: rows[table][window] for table in names if rows[table][window]}
        missing = max(0, count - stored[window])
        yield ReplayedWindow(window, count, replaced, failed.get(window, NONE).open, missing)


def _rows(table: Table, windows: Iterable[str]) -> Counter[str]:
    """Return the number of stored rows by window."""
    rows: Counter[str] = Counter()
    if table.exists():
        with table.look() as handle:
            for file in table.files(handle, list(windows)):
                rows[file.window] += file.rows
    return rows
