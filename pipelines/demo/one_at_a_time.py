"""One demo at a time in one place."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class BusyError(Exception):
    """Another demo, or `make dev`, works here."""


@contextmanager
def only(home: Path) -> Iterator[None]:
    """Keep others away until the block ends, or this process does.

    Raises:
        BusyError: Another is here.
    """
    home.mkdir(parents=True, exist_ok=True)
    (home / ".gitignore").write_text("*\n")
    with (home / "demo.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"a demo or `make dev` is running in {home}; stop it first") from None
        yield
