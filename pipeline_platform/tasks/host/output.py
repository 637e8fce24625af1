"""What callbacks print and log while a task calls them, for the log of the run: so many lines, the rest counted."""

from __future__ import annotations

import logging
import mmap
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

LINES = 100
ROOM = 16 * 2**10
"""Lines, and bytes of them, that are kept of a task."""
_LINE = 2_000
"""Characters that are kept of a line."""
_USED, _KEPT, _MORE = range(3)
_HEAD = 3 * 8


class Said:
    """The lines of one task, in memory that it shares with its forks: what one says before it dies is kept, too."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _HEAD + ROOM)
        self._counts = memoryview(self._memory)[:_HEAD].cast("q")
        self._lock = threading.Lock()
        self._begun: dict[tuple[int, int], str] = {}
        """Lines that have not ended, by stream and thread."""

    def hear(self, stream: int, text: str) -> None:
        """Take text that was written to a stream."""
        if self._counts[_MORE] and "\n" not in text:
            return
        key = stream, threading.get_ident()
        *lines, begun = (self._begun.pop(key, "") + text).split("\n")
        for line in lines:
            self._keep(line)
        if begun:
            self._begun[key] = begun[: _LINE + 1]

    def end_line(self, stream: int) -> None:
        """Take what this thread has begun as a line."""
        if begun := self._begun.pop((stream, threading.get_ident()), ""):
            self._keep(begun)

    def notes(self) -> dict[str, Any]:
        """What the driver gets: nothing, if nothing was said."""
        while self._begun:
            self._keep(self._begun.popitem()[1])
        more = self._counts[_MORE]
        text = self._memory[_HEAD : _HEAD + self._counts[_USED]].decode("utf-8", "replace")
        return {"said": text, "unsaid": more} if text or more else {}

    def _keep(self, line: str) -> None:
        # A fork may have come while another thread held the lock, which nobody gives back in the child.
        if not self._lock.acquire(timeout=1):
            return
        try:
            counts = self._counts
            if not counts[_MORE]:
                shown = line if len(line) <= _LINE else f"{line[:_LINE]}..."
                encoded = shown.encode("utf-8", "backslashreplace") + b"\n"
                end = counts[_USED] + len(encoded)
                if counts[_KEPT] < LINES and end <= ROOM:
                    self._memory[_HEAD + counts[_USED] : _HEAD + end] = encoded
                    counts[_USED], counts[_KEPT] = end, counts[_KEPT] + 1
                    return
            counts[_MORE] += 1
        finally:
            self._lock.release()


class _Stream:
    """Writes on to the stream in whose place it stands, which is that of Spark's log."""

    def __init__(self, original: TextIO, said: Said) -> None:
        self._original, self._said = original, said

    def write(self, text: str) -> int:
        written = self._original.write(text)
        self._said.hear(id(self), text)
        return written

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._said.end_line(id(self))
        self._original.flush()

    def close(self) -> None:
        """Stay open, for the messages that come."""
        self.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


@contextmanager
def heard() -> Iterator[Said]:
    """Hear what Python code of this process prints and logs meanwhile; it is written to where it was, too."""
    said = Said()
    originals = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    streams = {
        name: cast(TextIO, _Stream(original, said)) for name, original in originals.items() if original is not None
    }
    for name, stream in streams.items():
        setattr(sys, name, stream)
        _redirect(originals[name], stream)
    try:
        yield said
    finally:
        for name, stream in streams.items():
            if getattr(sys, name) is stream:
                setattr(sys, name, originals[name])
            _redirect(stream, originals[name])


def _redirect(before: TextIO, after: TextIO) -> None:
    """Have logging's handlers of a stream write to another: they were made before, or last longer."""
    known = logging.root.manager.loggerDict.values()
    for logger in [logging.root, *(one for one in known if isinstance(one, logging.Logger))]:
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                with suppress(Exception):  # the stream that it flushes may be closed
                    handler.setStream(after)
