"""Which callback has which messages: what a fork that dies or hangs leaves behind."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from pipeline_platform.model.message import Message

_CALLBACKS = (
    "",
    "transform",
    "prepare_messages",
    "handle_message",
    "decode",
    "batch_size",
    "handle_batch",
    "lake",
    "handle_failed",
)
_CELL = 8
_STATE, _CALLBACK, _COUNT, _CALL, _ROWS = range(5)
"""Cells: one for each of these, and then the rows."""
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


UNWATCHED = Watch()


class Progress(Watch):
    """Where a fork is, in memory that it shares with its parent.

    Args:
        rows: Messages that the fork has at the most.
        exact: See `Watch`.
    """

    def __init__(self, rows: int, *, exact: bool) -> None:
        self.exact = exact
        self._cells = memoryview(mmap.mmap(-1, _CELL * (_ROWS + rows))).cast("q")
        self._calls = 0
        self._places: Sequence[int] | None = None

    def each(self, callback: str, messages: Iterable[Message]) -> Iterator[Message]:
        """Yield messages, each as its callback begins."""
        cells, number, call = self._cells, _CALLBACKS.index(callback), self._calls
        for message in messages:
            call += 1
            cells[_CALL] = 0  # else the parent could take this message for the one before, which took too long
            cells[_CALLBACK], cells[_COUNT], cells[_ROWS] = number, 1, message._row
            cells[_CALL] = call
            yield message
        cells[_CALL], self._calls = 0, call

    @contextmanager
    def busy(self, callback: str, messages: Sequence[Message]) -> Iterator[None]:
        """A callback has these messages, as long as this is entered."""
        cells, places = self._cells, self._places
        for cell, message in enumerate(messages, start=_ROWS):
            cells[cell] = message._row if places is None else places[message._row]
        cells[_CALLBACK], cells[_COUNT] = _CALLBACKS.index(callback), len(messages)
        self._calls += 1
        cells[_CALL] = self._calls
        try:
            yield
        finally:
            cells[_CALL] = 0

    def name(self, places: Sequence[int]) -> None:
        """Call the messages of `busy` by these numbers from now on, and no more by their own rows."""
        self._places = places

    @property
    def state(self) -> int:
        """`RUNNING`, `DELIVERED` or `RAISED`."""
        return self._cells[_STATE]

    @state.setter
    def state(self, state: int) -> None:
        self._cells[_STATE] = state

    @property
    def call(self) -> int:
        """The number of the call that is under way, or 0."""
        return self._cells[_CALL]

    @property
    def callback(self) -> str:
        """The callback that began last."""
        return _CALLBACKS[self._cells[_CALLBACK]]

    @property
    def rows(self) -> list[int]:
        """The rows that it has."""
        return self._cells[_ROWS : _ROWS + self._cells[_COUNT]].tolist()
