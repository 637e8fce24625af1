"""The process of a run, by a tag of the run: on its own host it can be asked whether it lives."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass

import dagster as dg

from pipeline_platform.process import born

PROCESS_TAG = ".dagster/pipeline_platform/process"
"""On a run that `run_launcher` started: its process. The UI hides tags with Dagster's own prefix."""


@dataclass(frozen=True)
class RunProcess:
    """The process of a run: of which run, on which host, its id there, and when it was born."""

    run_id: str
    host: str
    pid: int
    born: str

    @classmethod
    def of(cls, run: dg.DagsterRun) -> RunProcess | None:
        """The process that runs it; None if Dagster's own launcher started it."""
        written = run.tags.get(PROCESS_TAG)
        process = cls(**json.loads(written)) if written else None
        # A re-execution begins with a copy of its parent's tags, hidden ones too.
        return process if process and process.run_id == run.run_id else None

    @classmethod
    def tag(cls, run_id: str, pid: int) -> str:
        """The value of the tag for a run that a process of this host runs."""
        return json.dumps(asdict(cls(run_id, socket.gethostname(), pid, born(pid) or "")))

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, on this host."""
        return self.host == socket.gethostname()

    @property
    def lives(self) -> bool:
        """Whether it has not ended. Known on its own host only."""
        return born(self.pid) == self.born
