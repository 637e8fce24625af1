"""A small demo in a folder of its own, as a user starts it, and what must come of it."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pipeline_platform.spark import server as spark_server
from pipelines.demo import departures, place, processes, queues

FLIGHTS = 2_000


@dataclass(frozen=True)
class Demo:
    """A demo.

    Attributes:
        home: Its folder.
        source: Its queue.
        flights: How many go through that.
    """

    home: Path
    source: place.Kind = "table"
    flights: int = FLIGHTS

    def start(self, command: str = "run", output: int | IO[str] = subprocess.PIPE) -> subprocess.Popen[str]:
        given = {"SOURCE": self.source, "FLIGHTS": str(self.flights), "PORT": "0"}
        return subprocess.Popen(
            [sys.executable, "-m", "pipelines.demo", command, "--home", str(self.home)],
            env={**os.environ, **given, "COLUMNS": "160", "LINES": "50", "TERM": "xterm"},
            cwd=place.PROJECT,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def progress(self) -> place.Progress | None:
        return place.Place(self.home).progress()

    def claims(self) -> list[str]:
        """The runs that hold messages, oldest first; the claims of killed ones outlive them."""
        if not (self.home / "control.sqlite").exists():
            return []
        try:
            with closing(sqlite3.connect(self.home / "control.sqlite")) as control:
                claims = control.execute("SELECT run_id FROM control_receives ORDER BY rowid").fetchall()
        except sqlite3.OperationalError:
            return []
        return list(dict.fromkeys(run_id for (run_id,) in claims))

    def await_(self, what: str, holds: Callable[[Demo], object]) -> None:
        deadline = time.monotonic() + 120
        while not holds(self):
            assert time.monotonic() < deadline, f"the demo did not come to {what}"
            time.sleep(0.005)

    def await_a_run(self, but: str = "") -> str:
        """Wait until a run other than `but` holds messages; return its id."""

        def others(demo: Demo) -> list[str]:
            return [run_id for run_id in demo.claims() if run_id != but]

        self.await_("a run", others)
        return others(self)[0]

    def left_running(self) -> list[str]:
        """The commands of what lives still, the SQS server among them: that is known by its queue alone."""
        found = [
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            for pid in processes._with_variable(processes.MARK, str(self.home))
        ]
        progress = self.progress()
        return [*found, *([str(progress.server)] if progress and queues.server_lives(progress) else [])]

    def clear_up(self) -> None:
        if self.home.exists():
            processes.Processes(place.Place(self.home)).stop()
            spark_server.stop(self.home)
            queues.stop_server(self.progress())

    def adds_up(self, said: str) -> bool:
        """Whether an account says what the data does."""
        wanted = departures.expected(departures.departures(self.flights))
        return (
            "The figures add up" in said
            and found(said, "received, each once") == f"{self.flights:,}"
            and found(said, "of these in flights/lake") == f"{wanted.lake:,}"
            and found(said, "of these in flights/alerts") == f"{wanted.alerts:,}"
            and found(said, "failed before the backfill") == f"{wanted.cancelled:,}"
            and found(said, "open failures") == "0"
            and found(said, "messages in the batchers' tables") == f"{self.flights:,}"
        )


def found(said: str, line: str) -> str:
    """The last figure of a line of the account."""
    match = re.search(rf"{re.escape(line)}\s+[\d,]+\s+([\d,]+)\s+(ok|WRONG)", said)
    assert match, f"{line!r} is not in the account:\n{said[-6_000:]}"
    return match[1]
