"""Which callback has which messages: what a fork that dies leaves behind."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence

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
RUNNING, DELIVERED, RAISED = 0, 1, 2


class Watch:
    """Learns where callbacks are. This one forgets it, and costs nothing: for a task that has not died before."""

    exact = False
    """Whether serializers and `handle_failed` get one message at a time, so that a killer is known."""

    def each(self, callback: str, messages: Iterable[Message]) -> Iterable[Message]:
        """Yield messages, each as its callback begins."""
        del callback
        return messages

    def busy(self, callback: str, messages: Sequence[Message]) -> None:
        """A callback begins with these messages."""


UNWATCHED = Watch()


class Progress(Watch):
    """Where a fork is, in memory that it shares with its parent.

    Args:
        rows: Messages that the fork has at the most.
        exact: See `Watch`.
    """

    def __init__(self, rows: int, *, exact: bool) -> None:
        self.exact = exact
        self._cells = memoryview(mmap.mmap(-1, _CELL * (3 + rows))).cast("q")

    def each(self, callback: str, messages: Iterable[Message]) -> Iterator[Message]:
        """Yield messages, each as its callback begins."""
        number = _CALLBACKS.index(callback)
        for message in messages:
            self._cells[1], self._cells[2], self._cells[3] = number, 1, message._row
            yield message

    def busy(self, callback: str, messages: Sequence[Message]) -> None:
        """A callback begins with these messages."""
        for cell, message in enumerate(messages, start=3):
            self._cells[cell] = message._row
        self._cells[1], self._cells[2] = _CALLBACKS.index(callback), len(messages)

    @property
    def state(self) -> int:
        """`RUNNING`, `DELIVERED` or `RAISED`."""
        return self._cells[0]

    @state.setter
    def state(self, state: int) -> None:
        self._cells[0] = state

    @property
    def callback(self) -> str:
        """The callback that began last."""
        return _CALLBACKS[self._cells[1]]

    @property
    def rows(self) -> list[int]:
        """The rows that it has."""
        return self._cells[3 : 3 + self._cells[2]].tolist()
