"""Where a demo lies, and how far it has come: what lets an interrupted one go on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from pipelines.local_servers import sqs

Kind = Literal["table", "sqs"]
"""The queue of the demo: a table of its own, or a queue of an SQS server on this machine."""

ALL_FLIGHTS = 336_776
PROJECT = Path(__file__).resolve().parents[2]
"""The checkout: where `dagster.yaml` and `workspace.yaml` are, and what the processes work in."""


class Progress(BaseModel):
    """What a demo has done, kept so that the next one knows.

    Attributes:
        source: Which queue.
        flights: How many go through it.
        filled: All of them are in the queue; before that, a demo starts afresh.
        queue_url: Of the SQS queue.
        server: Of the SQS server: its address, process and when that was born.
        backfills: Ids of the backfills that were launched, oldest first.
        finished: The figures added up.
        interrupted: It was started again in between.
    """

    source: Kind
    flights: int
    filled: bool = False
    queue_url: str | None = None
    server: tuple[str, int, str] | None = None
    backfills: list[str] = []
    finished: bool = False
    interrupted: bool = False


@dataclass(frozen=True)
class Place:
    """The folder of a demo.

    Attributes:
        home: The folder; everything the demo makes is in it.
    """

    home: Path

    @property
    def lake(self) -> Path:
        """The tables."""
        return self.home / "lake"

    @property
    def queue(self) -> Path:
        """The table queue's database."""
        return self.home / "queue.sqlite"

    @property
    def control(self) -> Path:
        """The control store's database."""
        return self.home / "control.sqlite"

    @property
    def alerts(self) -> Path:
        """What `handle_batch` writes to: a database outside the lake."""
        return self.home / "alerts.sqlite"

    @property
    def dagster(self) -> Path:
        """DAGSTER_HOME."""
        return self.home / "dagster"

    @property
    def logs(self) -> Path:
        """What the processes say."""
        return self.home / "logs"

    @property
    def servers(self) -> Path:
        """Installed servers: the checkout's, shared with the tests."""
        return PROJECT / ".servers"

    @property
    def chart(self) -> Path:
        """The picture at the end."""
        return self.home / "demo.png"

    def progress(self) -> Progress | None:
        """What an earlier demo here has done; None if there was none, or one of another version."""
        try:
            return Progress.model_validate_json((self.home / "demo.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return None

    def keep(self, progress: Progress) -> None:
        """Remember it, whole or not at all."""
        aside = self.home / f".demo.json.{os.getpid()}"
        aside.write_text(progress.model_dump_json(indent=2))
        aside.replace(self.home / "demo.json")

    def environment(self, progress: Progress | None) -> dict[str, str]:
        """The variables of every process that works on this demo."""
        ours = {"PIPELINE_PLATFORM_LAKE", "PIPELINE_PLATFORM_CONTROL", "PIPELINE_PLATFORM_SPARK", "FLIGHTS_SQS_URL"}
        inherited = {name: value for name, value in os.environ.items() if name not in ours}
        inherited |= {
            "DAGSTER_HOME": str(self.dagster),
            "PIPELINE_PLATFORM_HOME": str(self.home),
            "FLIGHTS_ALERTS": str(self.alerts),
            "PYTHONUNBUFFERED": "1",
        }
        if progress and progress.queue_url and progress.server:
            inherited |= sqs.ENVIRONMENT | {
                "FLIGHTS_SQS_URL": progress.queue_url,
                "AWS_ENDPOINT_URL": progress.server[0],
                "AWS_REGION": sqs.REGION,
                # Outlasts a run, and what a killed run held comes back after it.
                "FLIGHTS_SQS_VISIBILITY": "120" if progress.flights <= 50_000 else "400",
            }
        return inherited
