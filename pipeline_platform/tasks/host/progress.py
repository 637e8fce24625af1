"""Which callback has which messages: what a host that dies or hangs leaves behind in shared memory."""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count

from pipeline_platform.model.message import Message

_CALLBACKS = (
    "", "transform", "partition_by", "prepare_messages", "handle_message", "handle_messages", "decode", "batch_size",
    "handle_batch", "lake", "handle_failed", "acknowledge",
)  # fmt: skip
MOST_ROWS = 2**20
"""Rows of one call that can be named. Where it has more, nobody knows which it was."""
_CELL = 8
_STATE, _CALLED, _BLOCK, _TRIES, _TRIED, _CALLBACK, _CALL, _COUNT, _THREADS, _ROWS = range(10)
"""Cells: one for each of these, then the rows of a call that has several, or for each thread what it is at.

A thread's cell holds its call and its row in one number, so that nobody reads one of them too early; 0 is no call.
"""
_SHIFT, _ROW = 32, 2**32 - 1
RUNNING, DELIVERED, RAISED = 0, 1, 2
end_process = os._exit
"""Kept here: a callback could put something else into its place."""

_NOTHING: AbstractContextManager[None] = nullcontext()

_host = 0
_is_copy = False
"""Whether this process was forked from a host by a callback, and goes on where that was."""


def _note_copy() -> None:
    global _is_copy  # noqa: PLW0603 - it is the process that is a copy or not
    _is_copy = True


os.register_at_fork(after_in_child=_note_copy)


def begin_host() -> None:
    """Be a host from here on."""
    global _host, _is_copy
    _host, _is_copy = os.getpid(), False


def end_copy() -> None:
    """End this process if it is not the host that began: a callback forked, and its child came back here.

    A fork that Python knows nothing of is noticed, too, by the process's number.
    """
    if _host and (_is_copy or os.getpid() != _host):
        end_process(1)


class Watch:
    """Learns where callbacks are. This one forgets it, and costs nothing: for callbacks that no host calls."""

    exact = False
    """Whether serializers and `handle_failed` get one message at a time, so that a killer is known; set for a try."""

    def begin(self, block: int) -> None:
        """A try begins, which is about a block of the part."""

    def trying(self, rows: int) -> None:
        """The try has so many rows."""

    def each(self, callback: str, messages: Iterable[Message]) -> Iterable[Message]:
        """Yield messages, each as its callback begins."""
        return messages

    def busy(self, callback: str, messages: Sequence[Message]) -> AbstractContextManager[None]:
        """A callback has these messages, as long as this is entered."""
        return _NOTHING

    def name(self, places: Sequence[int]) -> None:
        """Call the messages of `busy` by these numbers from now on, and no more by their own rows."""

    def of_threads(self, callback: str, threads: int) -> Sequence[Watch]:
        """One for each of several threads that call a callback."""
        return [self] * threads


UNWATCHED = Watch()


class Progress(Watch):
    """Where a host is, in memory that it shares with its parent. What a callback's own fork leads here ends there."""

    def __init__(self) -> None:
        # Pages that nobody touches cost nothing.
        self._cells = memoryview(mmap.mmap(-1, _CELL * (_ROWS + MOST_ROWS))).cast("q")
        self._calls = count(1)
        self._places: Sequence[int] | None = None

    def begin(self, block: int) -> None:
        """A try begins, which is about a block of the part."""
        end_copy()
        cells, self._places = self._cells, None
        cells[_BLOCK], cells[_TRIED], cells[_CALLBACK], cells[_COUNT], cells[_THREADS] = block, 0, 0, 0, 0
        cells[_TRIES] += 1

    def trying(self, rows: int) -> None:
        """The try has so many rows."""
        self._cells[_TRIED] = rows

    def each(self, callback: str, messages: Iterable[Message]) -> Iterator[Message]:
        """Yield messages, each as its callback begins."""
        return self.of_threads(callback, 1)[0].each(callback, messages)  # type: ignore[return-value]

    @contextmanager
    def busy(self, callback: str, messages: Sequence[Message]) -> Iterator[None]:
        """A callback has these messages, as long as this is entered."""
        cells, places = self._cells, self._places
        rows = [message._row if places is None else places[message._row] for message in messages[:MOST_ROWS]]
        if len(rows) == len(messages):
            cells[_ROWS : _ROWS + len(rows)] = memoryview(array("q", rows))
        cells[_CALLBACK], cells[_THREADS] = _CALLBACKS.index(callback), 0
        cells[_COUNT] = len(rows) if len(rows) == len(messages) else 0
        cells[_CALLED], cells[_CALL] = 1, next(self._calls)
        try:
            yield
        finally:
            end_copy()
            cells[_CALL] = 0

    def name(self, places: Sequence[int]) -> None:
        """Call the messages of `busy` by these numbers from now on, and no more by their own rows."""
        self._places = places

    def of_threads(self, callback: str, threads: int) -> Sequence[Watch]:
        """One for each of several threads that call a callback."""
        cells = self._cells
        cells[_CALL], cells[_CALLBACK], cells[_COUNT], cells[_THREADS] = 0, _CALLBACKS.index(callback), 0, threads
        cells[_CALLED] = 1
        return [_OfThread(cells, _ROWS + place, next(self._calls)) for place in range(threads)]

    @property
    def state(self) -> int:
        """`RUNNING`, `DELIVERED` or `RAISED`."""
        return self._cells[_STATE]

    @state.setter
    def state(self, state: int) -> None:
        self._cells[_STATE] = state

    @property
    def has_called(self) -> bool:
        """Whether any callback has begun."""
        return bool(self._cells[_CALLED])

    @property
    def place(self) -> tuple[int, int, int]:
        """The block of the try that began last, how many tries had begun by then, and its rows, 0 if unknown."""
        return self._cells[_BLOCK], self._cells[_TRIES], self._cells[_TRIED]

    @property
    def calls(self) -> list[int]:
        """The numbers of the calls that are under way."""
        cells = self._cells
        if threads := cells[_THREADS]:
            return [call for call in cells[_ROWS : _ROWS + threads].tolist() if call]
        return [cells[_CALL]] if cells[_CALL] else []

    @property
    def callback(self) -> str:
        """The callback that began last in its block."""
        return _CALLBACKS[self._cells[_CALLBACK]]

    @property
    def rows(self) -> list[int]:
        """The rows that are at work in it."""
        if self._cells[_THREADS]:
            return [row for call in self.calls for row in self.rows_of(call)]
        return self._cells[_ROWS : _ROWS + self._cells[_COUNT]].tolist() if self._cells[_CALL] else []

    def rows_of(self, call: int) -> list[int]:
        """The rows that a call has which is under way."""
        return [call & _ROW] if self._cells[_THREADS] else self.rows


class _OfThread(Watch):
    """Where one of several threads is.

    Args:
        cells: Of the host.
        at: Cell of what it is at.
        number: Of its calls, together.
    """

    def __init__(self, cells: memoryview, at: int, number: int) -> None:
        self._cells, self._at, self._number = cells, at, number << _SHIFT
        cells[at] = 0

    def each(self, callback: str, messages: Iterable[Message]) -> Iterator[Message]:
        """Yield messages, each as its callback begins. Between two of them the thread may wait for permits."""
        cells, at, number = self._cells, self._at, self._number
        try:
            for message in messages:
                cells[at] = number | message._row
                yield message
                if _is_copy:
                    end_process(1)
                cells[at] = 0
        finally:  # also where no more of them are asked for
            end_copy()
            cells[at] = 0
