"""A fake of AWS Glue for tests: moto's, run by `glue_app.py`.

It keeps everything in memory and checks no credentials. Unlike Glue, it does not compare the version of a table before
it changes the table: of two commits at the same time, the later one replaces the earlier one.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path

from servers.server import Server, in_memory


def missing() -> str | None:
    """Return what is missing to run the server, or None."""
    return None if find_spec("moto") else "moto is not installed; run make setup-dev"


def serve(_folder: Path) -> AbstractContextManager[Server]:
    """Return a context that runs the server on loopback until the block or this process ends.

    Raises:
        ServerError: The server does not start.
    """
    # Without -P, Python would import `redis` and other libraries from this folder.
    return in_memory([sys.executable, "-P", str(Path(__file__).with_name("glue_app.py"))], "http://")
