"""Folder of a demo, and the files in it."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from pipeline_platform.control.store import ControlStore

Kind = Literal["table", "postgres", "sqs", "kafka", "kinesis", "rabbitmq", "pubsub", "files"]  # the demo's source
ALL_FLIGHTS = 336_776
PROJECT = Path(__file__).resolve().parents[1]  # the checkout: working directory of all processes
MARK = "PIPELINE_PLATFORM_DEMO"  # variable that marks the processes of a demo, which ends only these


class DemoError(Exception):
    """The demo failed; the message contains the reason and the fix."""


class Begun(BaseModel, frozen=True):
    """The kind of a demo's queue, and the start of its first window."""

    source: Kind = "table"
    since: str = ""


class Place:
    """Folder of a demo, and the files in it."""

    def __init__(self, home: Path) -> None:
        self.home = home = home.resolve()
        self.lake, self.dagster, self.logs = home / "lake", home / "dagster", home / "logs"
        self.queue, self.control, self.alerts = (home / f"{name}.sqlite" for name in ("queue", "control", "alerts"))
        self.incoming, self.catalog = home / "incoming", home / "files.sqlite"
        self.chart, self._begun = home / "demo.png", home / "demo.json"

    @property
    def begun(self) -> Begun:
        """The last demo in this folder."""
        return Begun.model_validate_json(self._begun.read_bytes()) if self._begun.exists() else Begun()

    def write(self, begun: Begun) -> None:
        """Write what `make dev` needs of this demo."""
        self._begun.write_text(begun.model_dump_json())

    def clear(self) -> None:
        """Remove the files of demos, and no other files."""
        for folder in (self.lake, self.dagster, self.logs, self.incoming):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (self.queue, self.catalog, self.control, self.alerts, self.chart, self._begun):
            for part in self.home.glob(f"{file.name}*"):  # also SQLite's -wal and -shm
                part.unlink()

    def enter(self, queue: Mapping[str, str]) -> None:
        """Set environment variables of this process and its children to this folder and its queue."""
        for name in ("LAKE", "CONTROL", "SPARK"):
            os.environ.pop(f"PIPELINE_PLATFORM_{name}", None)
        os.environ |= {
            "DAGSTER_HOME": str(self.dagster),
            "PIPELINE_PLATFORM_HOME": str(self.home),
            "FLIGHTS_ALERTS": str(self.alerts),
            "FLIGHTS_SOURCE": "",
            **({"FLIGHTS_SINCE": self.begun.since} if self.begun.since else {}),
            "PYTHONUNBUFFERED": "1",
            **queue,
        }

    def control_store(self) -> ControlStore:
        """Return the control store of the demo."""
        return ControlStore(f"sqlite:///{self.control}")

    def status_command(self, queue: Mapping[str, str]) -> str:
        """Return the shell command for backlog, runs and failures."""
        variables = {"DAGSTER_HOME": str(self.dagster), "PIPELINE_PLATFORM_HOME": str(self.home), **queue}
        given = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        return f"{given} .venv/bin/pipeline-platform status"
