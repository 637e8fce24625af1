"""Folder and progress of a demo, with which an interrupted demo continues."""

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
MARK = "PIPELINE_PLATFORM_DEMO"  # variable that marks the processes of a demo, which ends only these


class DemoError(Exception):
    """The demo cannot continue; the message contains the reason and the fix."""


class Progress(BaseModel, frozen=True):
    """Progress of a demo whose queue was filled.

    Attributes:
        source: Kind of its queue.
        flights: Number of flights in the queue.
        since: Start of the first window.
        finished: Whether its figures added up.
    """

    source: Kind
    flights: int
    since: str
    finished: bool = False


class Place:
    """Folder of a demo, and the files in it."""

    def __init__(self, home: Path) -> None:
        self.home = home = home.resolve()
        self.lake, self.dagster, self.logs = home / "lake", home / "dagster", home / "logs"
        self.queue, self.control, self.alerts = (home / f"{name}.sqlite" for name in ("queue", "control", "alerts"))
        self.chart, self._progress = home / "demo.png", home / "demo.json"

    def progress(self) -> Progress | None:
        """Return the progress of the last demo in this folder; None if its queue was never filled.

        Raises:
            DemoError: The file cannot be read. A new demo would erase the messages in its queue.
        """
        try:
            return Progress.model_validate_json(self._progress.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            raise DemoError(
                f"This release cannot read {self._progress}. Continue with the release that started it, or remove "
                f"{self.home} and the messages in its queue"
            ) from None

    def write(self, progress: Progress) -> None:
        """Write the progress of this demo atomically."""
        aside = self._progress.with_suffix(".new")
        aside.write_text(progress.model_dump_json(indent=2))
        aside.replace(self._progress)

    def clear(self) -> None:
        """Remove the files of demos, and no other files."""
        self._progress.unlink(missing_ok=True)  # first, so that no demo continues with the rest if this is interrupted
        for folder in (self.lake, self.dagster, self.logs):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (self.queue, self.control, self.alerts, self.chart):
            for part in self.home.glob(f"{file.name}*"):  # also SQLite's -wal and -shm
                part.unlink()

    def enter(self, queue: Mapping[str, str], progress: Progress | None) -> None:
        """Set environment variables of this process and its children to this folder and its queue."""
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
        """Return the shell command for backlog, runs and failures."""
        variables = {"PIPELINE_PLATFORM_HOME": str(self.home), **queue}
        given = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        return f"{given} .venv/bin/pipeline-platform status"
