"""Output of callbacks (print and logging) for the log of the run. A limited number of lines is kept."""

import inspect
import logging
import mmap
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from pipeline_platform.lake.task_report import CallbackOutput
from pipeline_platform.model.message import Message
from pipeline_platform.model.pipeline import BatchInfo
from pipeline_platform.model.safe_text import printable

LINES = 100
BYTES = 16 * 2**10
"""Maximum number of lines and bytes shown per task."""
_LINE = 2_000
"""Maximum number of characters shown per line."""
_USED, _SHOWN, _MORE = range(3)
_HEAD = 3 * 8


class Output:
    """The output of one task, in memory shared with its forks, so that output before a crash is kept."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _HEAD + BYTES)
        self._counts = memoryview(self._memory)[:_HEAD].cast("q")
        self._lock = threading.Lock()
        self._begun: dict[tuple[int, int], str] = {}
        """Incomplete lines, by stream and thread."""

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
        """End the incomplete line of this thread."""
        if begun := self._begun.pop((stream, threading.get_ident()), ""):
            self._keep(begun)

    def of(self, author: str) -> list[CallbackOutput]:
        """Return the output as that of an author; empty without output."""
        while self._begun:
            self._keep(self._begun.popitem()[1])
        more = self._counts[_MORE]
        text = self._memory[_HEAD : _HEAD + self._counts[_USED]].decode("utf-8", "replace")
        return [CallbackOutput(author, text, more)] if text or more else []

    def _keep(self, line: str) -> None:
        # If the fork happened while another thread held the lock, it is never released in the child.
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
    """A stream that captures text and writes it to the original stream, which is Spark's log."""

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
    """Formatter: level, current message or batch, and text. Further lines are indented."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record).replace("\n", "\n  ")
        return f"{record.levelname} {_at_work() or record.name}: {text}"


def _at_work() -> str:
    """Return the current message or batch of a callback, found in the caller's frames: no cost unless it logs."""
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
    """Enable the loggers of a package from INFO on, unless logging is configured."""
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
    """Capture the prints and logs of Python code in this process. They are also written to the original streams.

    Args:
        package: Package of the pipeline. Its loggers need no configuration.
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
    """Replace the stream of existing logging handlers, which keep a reference to it."""
    known = logging.root.manager.loggerDict.values()
    for logger in [logging.root, *(logger for logger in known if isinstance(logger, logging.Logger))]:
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                with suppress(Exception):  # the stream that it flushes may be closed
                    handler.setStream(after)
