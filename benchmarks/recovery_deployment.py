"""Deployment of `benchmarks.recovery` and `benchmarks.endurance`: a daemon, sources and a warm Spark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import dagster as dg
import polars as pl

from pipeline_platform.lake.decisions.ledger import Ledger, Receive
from pipeline_platform.lake.storage import Lake
from pipeline_platform.orchestration.sensors.runs_under_way import UNDER_WAY
from pipeline_platform.spark import server as spark_server

ROOT = Path(__file__).parents[1]


class Deployment:
    """A daemon with a code location of the benchmarks, in its own folder."""

    def __init__(self, folder: Path, instance: dg.DagsterInstance, location: str) -> None:
        self.folder, self.instance, self._location = folder, instance, location
        self.spark_folder = folder / "spark"
        self.lake = Lake(root=str(folder / "lake"))
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def daemon(self) -> subprocess.Popen[bytes]:
        """The daemon that was started last."""
        return self._started[-1]

    def start_daemon(self) -> None:
        """Start a daemon. Its code server and the runs that it launches are in its process group."""
        command = [
            sys.executable,
            "-m",
            "dagster._daemon",
            "run",
            "-m",
            self._location,
            "-d",
            str(ROOT),
        ]
        with (self.folder / "daemon.log").open("ab") as log:
            self._started.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def stop(self) -> None:
        """End every daemon with all its children."""
        for sent in (signal.SIGTERM, signal.SIGCONT, signal.SIGKILL):
            for daemon in self._started:
                with suppress(ProcessLookupError):
                    os.killpg(daemon.pid, sent)
            if sent is not signal.SIGTERM:
                for daemon in self._started:
                    with suppress(subprocess.TimeoutExpired):
                        daemon.wait(5)

    def under_way(self) -> list[dg.DagsterRun]:
        """Return the runs that have not ended."""
        return list(self.instance.get_runs(dg.RunsFilter(statuses=UNDER_WAY)))

    def rows(self, pipeline: str, table: str) -> pl.DataFrame:
        """Return the rows of a table of a pipeline."""
        path = self.folder / "lake" / pipeline / table
        return pl.read_delta(str(path)) if path.exists() else pl.DataFrame(schema={"text": str, "data": bytes})

    def unfinished(self, pipeline: str) -> list[Receive]:
        """Return the receives that are not acknowledged, without remains that a run wrote after its receive ended."""
        return Ledger(self.lake, pipeline).under_way()[0]


@contextmanager
def deployed(folder: Path, location: str, environment: Mapping[str, str]) -> Iterator[Deployment]:
    """Start a daemon and a Spark with a code location and an `environment`; end them with the block."""
    with ExitStack() as stack:
        home = folder / "dagster"
        home.mkdir()
        (home / "dagster.yaml").write_text((ROOT / "dagster.yaml").read_text())
        os.environ.update({**environment, "DAGSTER_HOME": str(home)})
        spark = folder / "spark"
        stack.callback(spark_server.stop, spark)
        spark_server.start(spark)
        # Opened before any process, because two processes that create the same SQLite storage at once damage it.
        instance = stack.enter_context(dg.DagsterInstance.get())
        deployment = Deployment(folder, instance, location)
        stack.callback(deployment.stop)
        deployment.start_daemon()
        yield deployment
