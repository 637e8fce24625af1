"""The Dagster instance that the command line asks, and whether anything there asks for runs of a pipeline."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pipeline_platform.model.pipeline import Pipeline

if TYPE_CHECKING:
    import dagster as dg

Instance: TypeAlias = "dg.DagsterInstance | str | Exception"
"""Dagster's, or why it cannot be asked."""


@contextmanager
def dagster_instance() -> Iterator[Instance]:
    """The instance of DAGSTER_HOME, or why it cannot be asked."""
    import dagster as dg

    if not os.environ.get("DAGSTER_HOME"):
        yield "DAGSTER_HOME is not set"
        return
    if not _is_made(Path(os.environ["DAGSTER_HOME"])):
        yield "none yet: Dagster has not been started with this DAGSTER_HOME"
        return
    try:
        instance = dg.DagsterInstance.get()
    except Exception as error:  # of whatever storage the instance has: the rest is reported all the same
        yield error
        return
    with instance:
        yield instance


def _is_made(home: Path) -> bool:
    """Whether Dagster's own SQLite files are whole: two processes that make them at once leave them unusable."""
    settings, last = home / "dagster.yaml", home / "schedules" / "schedules.db"
    if not home.is_dir() or (settings.is_file() and re.search(r"^(run_)?storage:", settings.read_text(), re.M)):
        return True  # somewhere else, or nowhere: Dagster says so
    if not last.is_file():
        return False
    with closing(sqlite3.connect(last)) as database, suppress(sqlite3.OperationalError):
        return database.execute("SELECT 1 FROM alembic_version").fetchone() is not None
    return False


def known(instance: Instance) -> dg.DagsterInstance | None:
    """The instance, if it can be asked."""
    return None if isinstance(instance, str | Exception) else instance


def asking(pipeline: type[Pipeline], producer: str, instance: Instance) -> str:
    """Whether runs of a producer that is not paused are asked for, in words."""
    from pipeline_platform.orchestration.sensors.asking import not_asked_for

    if isinstance(instance, str):
        return f"not paused; whether runs are asked for is unknown: {instance}"
    try:
        if isinstance(instance, Exception):
            raise instance
        why = not_asked_for(pipeline, producer, instance)
    except Exception as error:  # of whatever storage the instance has
        return f"not paused; whether runs are asked for is unknown: Dagster does not answer ({type(error).__name__})"
    return "asks for runs" if why is None else f"not paused, but no runs are asked for: {why}"
