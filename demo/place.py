"""Where a demo lies, and how far it has come: by these an interrupted one goes on."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

Kind = Literal["table", "postgres", "sqs", "kafka", "rabbitmq", "pubsub"]  # the demo's queue
ALL_FLIGHTS = 336_776
PROJECT = Path(__file__).resolve().parents[1]  # the checkout: working directory of all processes
MARK = "PIPELINE_PLATFORM_DEMO"  # a variable that only the processes of a demo have: the demo ends no others


class DemoError(Exception):
    """The demo cannot go on; the message says why, and what to do."""


class Progress(BaseModel, frozen=True):
    """A demo whose queue was filled, and whether its figures added up; an emptier one starts afresh.

    Its windows begin with `since`. An earlier release wrote it before the queue was filled, too, and had another
    `since`.
    """

    source: Kind
    flights: int
    since: str = "2026-11-01T00:00+00:00"
    finished: bool = False
    filled: bool = True


class Place:
    """The folder of a demo, and what the demo makes in it."""

    def __init__(self, home: Path) -> None:
        self.home = home = home.resolve()
        self.lake, self.dagster, self.logs = home / "lake", home / "dagster", home / "logs"
        self.queue, self.control, self.alerts = (home / f"{name}.sqlite" for name in ("queue", "control", "alerts"))
        self.chart, self._progress = home / "demo.png", home / "demo.json"

    def progress(self) -> Progress | None:
        """Return what the last demo here did; None if there was none whose queue was filled.

        Raises:
            DemoError: Nobody can tell, and a new demo would erase what waits in its queue.
        """
        try:
            progress = Progress.model_validate_json(self._progress.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            raise DemoError(
                f"this release cannot read {self._progress}. Go on with the release that began that demo, or remove "
                f"{self.home}, and with it the messages that wait in its queue"
            ) from None
        return progress if progress.filled else None

    def write(self, progress: Progress) -> None:
        """Write what this demo did, whole or not at all."""
        aside = self._progress.with_suffix(".new")
        aside.write_text(progress.model_dump_json(indent=2))
        aside.replace(self._progress)

    def clear(self) -> None:
        """Remove what demos make, and nothing else that lies there."""
        self._progress.unlink(missing_ok=True)  # first: no other demo goes on with what an interruption leaves
        for folder in (self.lake, self.dagster, self.logs):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (self.queue, self.control, self.alerts, self.chart):
            for part in self.home.glob(f"{file.name}*"):  # SQLite's -wal and -shm, too
                part.unlink()

    def enter(self, queue: Mapping[str, str], progress: Progress | None) -> None:
        """Set the variables of this process, and of those that it starts, to this place and its queue."""
        for name in ("LAKE", "CONTROL", "SPARK"):
            os.environ.pop(f"PIPELINE_PLATFORM_{name}", None)
        os.environ |= {
            "DAGSTER_HOME": str(self.dagster),
            "PIPELINE_PLATFORM_HOME": str(self.home),
            "FLIGHTS_ALERTS": str(self.alerts),
            "FLIGHTS_SOURCE": "",
            **({"FLIGHTS_SINCE": progress.since} if progress else {}),
            "PYTHONUNBUFFERED": "1",
            **queue,
        }

    def status_command(self, queue: Mapping[str, str]) -> str:
        """Return what to type in the checkout for backlog, runs and failures."""
        variables = {"PIPELINE_PLATFORM_HOME": str(self.home), **queue}
        given = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        return f"{given} .venv/bin/pipeline-platform status"
