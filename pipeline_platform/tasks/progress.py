"""Which callback has which messages: what a fork that dies or hangs leaves behind."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count

from pipeline_platform.model.message import Message

_CALLBACKS = (
    "", "transform", "partition_by", "prepare_messages", "handle_message", "decode", "batch_size", "handle_batch",
    "lake", "handle_failed", "acknowledge",
)  # fmt: skip
_CELL = 8
_STATE, _CALLBACK, _COUNT, _CALL, _THREADS, _ROWS = range(6)
"""Cells: one for each of these, then the rows, then for each thread its call, if several are at work."""
RUNNING, DELIVERED, RAISED = 0, 1, 2
_NOTHING: AbstractContextManager[None] = nullcontext()


class Watch:
    """Learns where callbacks are. This one forgets it, and costs nothing: for a task that has not died before."""

    exact = False
    """Whether serializers and `handle_failed` get one message at a time, so that a killer is known."""

    def each(self, callback: str, messages: Iterable[Message]) -> Iterable[Message]:
        """Yield messages, each as its callback begins."""
        del callback
        return messages

    def busy(self, callback: str, messages: Sequence[Message]) -> AbstractContextManager[None]:
        """A callback has these messages, as long as this is entered."""
        del callback, messages
        return _NOTHING

    def name(self, places: Sequence[int]) -> None:
        """Call the messages of `busy` by these numbers from now on, and no more by their own rows."""

    def of_threads(self, callback: str, threads: int) -> Sequence[Watch]:
        """One for each of several threads that call a callback."""
        del callback
        return [self] * threads


UNWATCHED = Watch()


class Progress(Watch):
    """Where a fork is, in memory that it shares with its parent.

    Args:
        rows: Messages that the fork has at the most.
        exact: See `Watch`.
    """

    def __init__(self, rows: int, *, exact: bool) -> None:
        self.exact = exact
        self._cells = memoryview(mmap.mmap(-1, _CELL * (_ROWS + 2 * rows))).cast("q")
        self._most, self._calls = rows, count(1)
        self._places: Sequence[int] | None = None

    def each(self, callback: str, messages: Iterable[Message]) -> Iterator[Message]:
        """Yield messages, each as its callback begins."""
        cells, number, calls = self._cells, _CALLBACKS.index(callback), self._calls
        cells[_THREADS] = 0
        try:
            for message in messages:
                cells[_CALL] = 0  # else the parent could take this message for the one before, which took too long
                cells[_CALLBACK], cells[_COUNT], cells[_ROWS] = number, 1, message._row
                cells[_CALL] = next(calls)
                yield message
        finally:  # also where no more of them are asked for
            cells[_CALL] = 0

    @contextmanager
    def busy(self, callback: str, messages: Sequence[Message]) -> Iterator[None]:
        """A callback has these messages, as long as this is entered."""
        cells, places = self._cells, self._places
        for cell, message in enumerate(messages, start=_ROWS):
            cells[cell] = message._row if places is None else places[message._row]
        cells[_CALLBACK], cells[_COUNT], cells[_THREADS] = _CALLBACKS.index(callback), len(messages), 0
        cells[_CALL] = next(self._calls)
        try:
            yield
        finally:
            cells[_CALL] = 0

    def name(self, places: Sequence[int]) -> None:
        """Call the messages of `busy` by these numbers from now on, and no more by their own rows."""
        self._places = places

    def of_threads(self, callback: str, threads: int) -> Sequence[Watch]:
        """One for each of several threads that call a callback; no more threads than rows."""
        cells = self._cells
        cells[_CALL], cells[_CALLBACK] = 0, _CALLBACKS.index(callback)
        cells[_THREADS] = threads
        return [_OfThread(cells, _ROWS + place, _ROWS + self._most + place, self._calls) for place in range(threads)]

    @property
    def state(self) -> int:
        """`RUNNING`, `DELIVERED` or `RAISED`."""
        return self._cells[_STATE]

    @state.setter
    def state(self, state: int) -> None:
        self._cells[_STATE] = state

    @property
    def calls(self) -> list[int]:
        """The numbers of the calls that are under way."""
        return [call for call, _ in self._at_work()]

    @property
    def callback(self) -> str:
        """The callback that began last."""
        return _CALLBACKS[self._cells[_CALLBACK]]

    @property
    def rows(self) -> list[int]:
        """The rows that it has."""
        if self._cells[_THREADS]:
            return [row for _, rows in self._at_work() for row in rows]
        return self._cells[_ROWS : _ROWS + self._cells[_COUNT]].tolist()

    def rows_of(self, call: int) -> list[int]:
        """The rows that a call has which is under way."""
        return [row for one, rows in self._at_work() if one == call for row in rows]

    def _at_work(self) -> list[tuple[int, list[int]]]:
        """The calls that are under way, and their rows."""
        cells = self._cells
        if threads := cells[_THREADS]:
            calls = cells[_ROWS + self._most : _ROWS + self._most + threads].tolist()
            rows = cells[_ROWS : _ROWS + threads].tolist()
            return [(call, [row]) for call, row in zip(calls, rows, strict=True) if call]
        call = cells[_CALL]
        return [(call, cells[_ROWS : _ROWS + cells[_COUNT]].tolist())] if call else []


class _OfThread(Watch):
    """Where one of several threads is.

    Args:
        cells: Of the fork.
        row_at: Cell of its row.
        call_at: Cell of its call.
        calls: The next numbers of calls.
    """

    def __init__(self, cells: memoryview, row_at: int, call_at: int, calls: Iterator[int]) -> None:
        self._cells, self._row_at, self._call_at, self._calls = cells, row_at, call_at, calls
        cells[call_at] = 0

    def each(self, callback: str, messages: Iterable[Message]) -> Iterator[Message]:
        """Yield messages, each as its callback begins. Between two of them the thread may wait for permits."""
        del callback  # see `of_threads`
        try:
            for message in messages:
                self._cells[self._row_at] = message._row
                self._cells[self._call_at] = next(self._calls)
                yield message
                self._cells[self._call_at] = 0
        finally:
            self._cells[self._call_at] = 0
