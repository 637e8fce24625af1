"""The Dagster instance of the command line."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import dagster as dg

Instance: TypeAlias = "dg.DagsterInstance | str"
"""A Dagster instance, or the reason why it is unavailable."""


@contextmanager
def dagster_instance() -> Iterator[Instance]:
    """Open the instance in DAGSTER_HOME, or yield the reason why it is unavailable."""
    import dagster as dg

    if not os.environ.get("DAGSTER_HOME"):
        yield "DAGSTER_HOME is not set"
        return
    if not _is_made(Path(os.environ["DAGSTER_HOME"])):
        yield "no instance yet: Dagster has not been started with this DAGSTER_HOME"
        return
    try:
        instance = dg.DagsterInstance.get()
    except Exception as error:  # any error of the instance's storage; the caller reports everything else
        yield unavailable(error)
        return
    with instance:
        yield instance


def _is_made(home: Path) -> bool:
    """Whether Dagster's SQLite files are complete. Two processes that create them at the same time corrupt them."""
    settings, last = home / "dagster.yaml", home / "schedules" / "schedules.db"
    if not home.is_dir() or (settings.is_file() and re.search(r"^(run_)?storage:", settings.read_text(), re.M)):
        return True  # the storage is elsewhere, or Dagster reports what is missing
    if not last.is_file():
        return False
    with closing(sqlite3.connect(last)) as database, suppress(sqlite3.OperationalError):
        return database.execute("SELECT 1 FROM alembic_version").fetchone() is not None
    return False


def known(instance: Instance) -> dg.DagsterInstance | None:
    """Return the instance, or None if it is unavailable."""
    return None if isinstance(instance, str) else instance


def unavailable(error: Exception) -> str:
    """Return the reason why Dagster's storage is unavailable."""
    reason = str(error).partition("\n")[0]
    return f"unavailable: {type(error).__name__}: {reason}"
