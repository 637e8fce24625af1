"""Progress of a callback process in shared memory: its current callback and messages, readable after a crash."""

from __future__ import annotations

import mmap
import os
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count

from pipeline_platform.model.message import Message

_CALLBACKS = (
    "", "only", "transform", "partition_by", "prepare_messages", "handle_message", "handle_messages", "decode",
    "batch_size", "handle_batch", "lake", "retry", "handle_failed", "acknowledge",
)  # fmt: skip
MOST_ROWS = 2**20
"""Maximum number of rows of a call that are recorded. With more rows, the culprit is unknown."""
_CELL = 8
_STATE, _CALLED, _BLOCK, _TRIES, _TRIED, _CALLBACK, _CALL, _COUNT, _THREADS, _WAITING, _ROWS = range(11)
"""Cells: one for each of these names, then the rows of the current call, or one cell per thread.

The cell of a thread combines its call and its row in one number, so that both change atomically. 0: no call.
"""
_SHIFT, _ROW = 32, 2**32 - 1
RUNNING, DELIVERED, RAISED = 0, 1, 2
end_process = os._exit
"""A reference taken at import: a callback could replace `os._exit`."""

_NOTHING: AbstractContextManager[None] = nullcontext()

_callback_process = 0
"""Process id of the callback process: native code of a callback may fork, and its child returns here."""
_is_copy = False
"""Whether this process was forked from a callback process by a callback."""
_progress: Progress | None = None
_waiting = threading.Lock()


def _note_copy() -> None:
    global _is_copy  # noqa: PLW0603 - a property of the process
    _is_copy = True


os.register_at_fork(after_in_child=_note_copy)


def begin_callback_process(progress: Progress | None = None) -> None:
    """Mark this process as a callback process with this progress."""
    global _callback_process, _is_copy, _progress
    _callback_process, _is_copy, _progress = os.getpid(), False, progress


def end_copy() -> None:
    """End this process if it is a fork of the callback process: a callback forked, and its child returned here.

    Forks by native code are detected by the process id.
    """
    if _callback_process and (_is_copy or os.getpid() != _callback_process):
        end_process(1)


@contextmanager
def without_time_limit() -> Iterator[None]:
    """Suspend the time limits of this callback process: the platform waits for a server, not the callback."""
    if _progress is None:
        yield
        return
    with _waiting:
        _progress.waiting(1)
    try:
        yield
    finally:
        with _waiting:
            _progress.waiting(-1)


class Watch:
    """Observer of calls of callbacks. This base class ignores them, at no cost, for use outside callback processes."""

    exact = False
    """Whether serializers and `handle_failed` get one message at a time, so that the culprit is known; set per try."""

    def begin(self, block: int) -> None:
        """Record the start of a try of a block."""

    def trying(self, rows: int) -> None:
        """Record the number of rows of the try."""

    def each(self, callback: str, messages: Iterable[Message]) -> Iterable[Message]:
        """Yield messages, and record the start of the callback of each."""
        return messages

    def busy(self, callback: str, messages: Sequence[Message]) -> AbstractContextManager[None]:
        """Record that a callback processes messages while the context is entered."""
        return _NOTHING

    def name(self, places: Sequence[int]) -> None:
        """Identify the messages of `busy` and `each` by these numbers from now on, instead of their rows."""

    def of_threads(self, callback: str, threads: int) -> Sequence[Watch]:
        """Return a watch for each of several threads that call a callback."""
        return [self] * threads


UNWATCHED = Watch()


class Progress(Watch):
    """Progress of a callback process, in memory shared with its parent. A fork made by a callback ends here."""

    def __init__(self) -> None:
        # Untouched pages use no memory.
        self._cells = memoryview(mmap.mmap(-1, _CELL * (_ROWS + MOST_ROWS))).cast("q")
        self._calls = count(1)
        self._places: Sequence[int] | None = None

    def begin(self, block: int) -> None:
        """Record the start of a try of a block."""
        end_copy()
        cells, self._places = self._cells, None
        cells[_BLOCK], cells[_TRIED], cells[_CALLBACK], cells[_COUNT], cells[_THREADS] = block, 0, 0, 0, 0
        cells[_TRIES] += 1

    def trying(self, rows: int) -> None:
        """Record the number of rows of the try."""
        self._cells[_TRIED] = rows

    def each(self, callback: str, messages: Iterable[Message]) -> Iterator[Message]:
        """Yield messages, and record the start of the callback of each."""
        if self._places is None:
            return self.of_threads(callback, 1)[0].each(callback, messages)  # type: ignore[return-value]
        return self._each_named(callback, messages)

    def _each_named(self, callback: str, messages: Iterable[Message]) -> Iterator[Message]:
        for message in messages:
            with self.busy(callback, [message]):
                yield message

    @contextmanager
    def busy(self, callback: str, messages: Sequence[Message]) -> Iterator[None]:
        """Record that a callback processes messages while the context is entered."""
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
        """Identify the messages of `busy` and `each` by these numbers from now on, instead of their rows."""
        self._places = places

    def of_threads(self, callback: str, threads: int) -> Sequence[Watch]:
        """Return a watch for each of several threads that call a callback."""
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

    def waiting(self, change: int) -> None:
        """Change the number of threads that wait for a server."""
        self._cells[_WAITING] += change

    @property
    def is_waiting(self) -> bool:
        """Whether a thread waits for a server, so that no time limit applies."""
        return self._cells[_WAITING] > 0

    @property
    def has_called(self) -> bool:
        """Whether any callback was called."""
        return bool(self._cells[_CALLED])

    @property
    def place(self) -> tuple[int, int, int]:
        """The block of the last try, the number of tries started, and the rows of the last try; 0 if unknown."""
        return self._cells[_BLOCK], self._cells[_TRIES], self._cells[_TRIED]

    @property
    def calls(self) -> list[int]:
        """Numbers of the calls in progress."""
        cells = self._cells
        if threads := cells[_THREADS]:
            return [call for call in cells[_ROWS : _ROWS + threads].tolist() if call]
        return [cells[_CALL]] if cells[_CALL] else []

    @property
    def callback(self) -> str:
        """The callback that was called last in its block."""
        return _CALLBACKS[self._cells[_CALLBACK]]

    @property
    def rows(self) -> list[int]:
        """Rows in progress in it."""
        if self._cells[_THREADS]:
            return [row for call in self.calls for row in self.rows_of(call)]
        return self._cells[_ROWS : _ROWS + self._cells[_COUNT]].tolist() if self._cells[_CALL] else []

    def rows_of(self, call: int) -> list[int]:
        """Return the rows of a call in progress."""
        return [call & _ROW] if self._cells[_THREADS] else self.rows


class _OfThread(Watch):
    """Progress of one of several threads, in the cell `at`. All its calls share a number."""

    def __init__(self, cells: memoryview, at: int, number: int) -> None:
        self._cells, self._at, self._number = cells, at, number << _SHIFT
        cells[at] = 0

    def each(self, callback: str, messages: Iterable[Message]) -> Iterator[Message]:
        """Yield messages, and record the start of the callback of each. The thread may wait for permits in between."""
        cells, at, number = self._cells, self._at, self._number
        try:
            for message in messages:
                cells[at] = number | message._row
                yield message
                if _is_copy:
                    end_process(1)
                cells[at] = 0
        finally:  # also if the caller stops early
            end_copy()
            cells[at] = 0
