"""A line on the terminal with the operations that a command waits for, a second after its start."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from pipeline_platform.cli.terminal import plain

_ACTIVE: list["Wait"] = []
_AFTER_S = 1.0
_REDRAW_S = 0.2
_LEAST_S = 0.2
"""A line that disappears sooner would only flicker."""
_NAMED = 3


class Wait:
    """Parts that a command waits for, by name, set from several threads."""

    def __init__(self, text: str) -> None:
        self._started, self._lock = time.monotonic(), threading.Lock()
        self._parts = {"": text}

    def look(self, name: str, part: str) -> None:
        """Set the text of a part; an empty text removes the part. The first call replaces the initial text."""
        with self._lock:
            parts = {key: value for key, value in self._parts.items() if key not in ("", name)}
            self._parts = {**parts, name: part} if part else parts

    def __str__(self) -> str:
        """Return the parts, and the time since the start."""
        parts = [f"{part} of {name}" if name else part for name, part in self._parts.items()]
        more = f" and {len(parts) - _NAMED} more" if len(parts) > _NAMED else ""
        return f"Waiting for {', '.join(parts[:_NAMED])}{more} ({time.monotonic() - self._started:.0f} s)"


def delay_s() -> float:
    """Return the time until the line is shown. It includes the time in which the command loaded its own code."""
    return max(_LEAST_S, _AFTER_S - time.process_time())


@contextmanager
def waiting(text: str) -> Iterator[Wait]:
    """Show the operations that the block waits for, until its end.

    Nothing is shown if errors are not printed on a terminal. Within another block, its line is shown.
    """
    if _ACTIVE:
        yield _ACTIVE[0]
        return
    wait, console, ended = Wait(text), Console(stderr=True), threading.Event()

    def show() -> None:
        if ended.wait(delay_s()):
            return
        with console.status("") as line:
            while not ended.is_set():
                line.update(Text(plain(str(wait))))
                ended.wait(_REDRAW_S)

    thread = threading.Thread(target=show, name="waiting", daemon=True)
    if console.is_terminal:
        thread.start()
    _ACTIVE.append(wait)
    try:
        yield wait
    finally:
        _ACTIVE.clear()
        ended.set()
        if thread.ident is not None:
            thread.join()
