"""What callbacks print and log while a task calls them, for the log of the run: so many lines, the rest counted."""

import inspect
import logging
import mmap
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from pipeline_platform.model.message import BatchInfo, Message
from pipeline_platform.model.safe_text import printable

LINES = 100
BYTES = 16 * 2**10
"""Lines, and bytes of them, that are shown of a task."""
_LINE = 2_000
"""Characters that are shown of a line."""
_USED, _SHOWN, _MORE = range(3)
_HEAD = 3 * 8


class Output:
    """The lines of one task, in memory that it shares with its forks: what one prints before it dies is there, too."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _HEAD + BYTES)
        self._counts = memoryview(self._memory)[:_HEAD].cast("q")
        self._lock = threading.Lock()
        self._begun: dict[tuple[int, int], str] = {}
        """Lines that have not ended, by stream and thread."""

    def take(self, stream: int, text: str) -> None:
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
        """What the driver gets: nothing, if there is none."""
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
                encoded = printable(shown, keep="\t").encode() + b"\n"
                end = counts[_USED] + len(encoded)
                if counts[_SHOWN] < LINES and end <= BYTES:
                    self._memory[_HEAD + counts[_USED] : _HEAD + end] = encoded
                    counts[_USED], counts[_SHOWN] = end, counts[_SHOWN] + 1
                    return
            counts[_MORE] += 1
        finally:
            self._lock.release()


class _Stream:
    """Writes on to the stream in whose place it stands, which is that of Spark's log."""

    def __init__(self, original: TextIO, output: Output) -> None:
        self._original, self._output = original, output

    def write(self, text: str) -> int:
        written = self._original.write(text)
        self._output.take(id(self), text)
        return written

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._output.end_line(id(self))
        self._original.flush()

    def close(self) -> None:
        """Stay open, for the messages that come."""
        self.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _Format(logging.Formatter):
    """Level, the message or the batch that a callback has, and what it logs; further lines are indented."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record).replace("\n", "\n  ")
        return f"{record.levelname} {_at_work() or record.name}: {text}"


def _at_work() -> str:
    """Find what a callback was called with, in the frames of the platform above its own: to note it costs each call."""
    frame = inspect.currentframe()
    while frame := frame and frame.f_back:
        if frame.f_globals.get("__name__", "").startswith("pipeline_platform.tasks."):
            known = frame.f_locals
            if (message := known.get("message")).__class__ is Message:
                return f"message {message.message_id!r}"
            if (info := known.get("info")).__class__ is BatchInfo:
                return f"batcher {info.batcher!r}, batch key {info.batch_key!r}"
    return ""


@contextmanager
def _logged(package: str) -> Iterator[None]:
    """Have the loggers of a package log meanwhile from INFO on, unless somebody has configured logging."""
    logger = logging.getLogger(package)
    if not package or logging.root.handlers or logger.handlers:
        yield
        return
    handler, level = logging.StreamHandler(), logger.level
    handler.setFormatter(_Format())
    logger.addHandler(handler)
    logger.setLevel(level or logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def captured(package: str = "") -> Iterator[Output]:
    """Take what Python code of this process prints and logs meanwhile; it is written to where it was, too.

    The package is the pipeline's own: nothing needs to be configured for its loggers.
    """
    output = Output()
    originals = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    streams = {
        name: cast(TextIO, _Stream(original, output)) for name, original in originals.items() if original is not None
    }
    for name, stream in streams.items():
        setattr(sys, name, stream)
        _redirect(originals[name], stream)
    try:
        with _logged(package):
            yield output
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
