"""What `benchmarks.recovery` deploys: a daemon, over one source and a warm Spark of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import dagster as dg
import polars as pl

from benchmarks.recovery_location import NAME, Asked
from benchmarks.recovery_sources import SOURCES, Ground
from pipeline_platform.lake.ledger import Ledger, Receive
from pipeline_platform.lake.storage import Lake
from pipeline_platform.orchestration.runs_under_way import UNDER_WAY
from pipeline_platform.spark import server as spark_server

ROOT = Path(__file__).parents[1]


class Deployment:
    """A daemon over one source, in a folder of its own."""

    def __init__(self, folder: Path, ground: Ground, instance: dg.DagsterInstance, asked: Asked) -> None:
        self.folder, self.ground, self.instance = folder, ground, instance
        self.spark_folder = folder / "spark"
        self.lake = Lake(root=str(folder / "lake"))
        self._environment = {**os.environ, **ground.environment, "RECOVERY_BENCHMARK": asked.model_dump_json()}
        self._started: list[subprocess.Popen[bytes]] = []
        self.trials = 0

    @property
    def daemon(self) -> subprocess.Popen[bytes]:
        """The daemon that was started last."""
        return self._started[-1]

    def start_daemon(self) -> None:
        """Start a daemon; its code server and the runs that it launches are in its process group."""
        command = [
            sys.executable,
            "-m",
            "dagster._daemon",
            "run",
            "-m",
            "benchmarks.recovery_location",
            "-d",
            str(ROOT),
        ]
        with (self.folder / "daemon.log").open("ab") as log:
            self._started.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def stop(self) -> None:
        """End every daemon, with all that it started."""
        for sent in (signal.SIGTERM, signal.SIGCONT, signal.SIGKILL):
            for daemon in self._started:
                with suppress(ProcessLookupError):
                    os.killpg(daemon.pid, sent)
            if sent is not signal.SIGTERM:
                for daemon in self._started:
                    with suppress(subprocess.TimeoutExpired):
                        daemon.wait(5)

    def under_way(self) -> list[dg.DagsterRun]:
        """Runs that have not ended."""
        return list(self.instance.get_runs(dg.RunsFilter(statuses=UNDER_WAY)))

    def rows(self, table: str) -> pl.DataFrame:
        """What a table of the pipeline holds."""
        path = self.folder / "lake" / NAME / table
        return pl.read_delta(str(path)) if path.exists() else pl.DataFrame(schema={"text": str, "data": bytes})

    def unfinished(self) -> list[Receive]:
        """Receives that are not acknowledged; what a run wrote into a folder after its receive ended is none."""
        return Ledger(self.lake, NAME).under_way()[0]


@contextmanager
def deployed(source: str, max_runs: int | None) -> Iterator[Deployment]:
    """Start all that a source's trials need; end it with the block."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recovery-", ignore_cleanup_errors=True)))
        ground: Ground = stack.enter_context(SOURCES[source](folder))
        asked = Asked(folder=str(folder), source=ground.connector, options=ground.options)
        asked = asked if max_runs is None else asked.model_copy(update={"max_runs": max_runs})
        home = folder / "dagster"
        home.mkdir()
        (home / "dagster.yaml").write_text((ROOT / "dagster.yaml").read_text())
        os.environ.update({**ground.environment, "DAGSTER_HOME": str(home)})
        spark = folder / "spark"
        stack.callback(spark_server.stop, spark)
        spark_server.start(spark)
        # Opened before any process: two that make the same SQLite storage at once leave it unusable.
        instance = stack.enter_context(dg.DagsterInstance.get())
        deployment = Deployment(folder, ground, instance, asked)
        stack.callback(deployment.stop)
        deployment.start_daemon()
        yield deployment
