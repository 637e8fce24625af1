"""Starts runs in processes that have loaded the project before.

Dagster starts a process per run, which imports Dagster, the project and Spark's client first: three to four seconds on
two cores, twice as long as a run of one message works. `StandbyRunLauncher` has one process that did so already stand
by for each code location, and starts the next when that one has got a run. Set in `dagster.yaml`:

    run_launcher:
      module: pipeline_platform.launcher.run_launcher
      class: StandbyRunLauncher
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

import dagster as dg
from dagster._config import Array, Field, UserConfigSchema
from dagster._core.launcher import CheckRunHealthResult, LaunchRunContext, WorkerStatus
from dagster._core.remote_origin import ManagedGrpcPythonEnvCodeLocationOrigin
from dagster._grpc.types import ExecuteRunArgs
from dagster._serdes import ConfigurableClassData, serialize_value

from pipeline_platform.launcher.run_process import PROCESS_TAG, RunProcess

MODULES = ("dagster_pyspark", "pyspark.sql.connect.dataframe", "pyspark.sql.connect.session", "pyarrow.dataset")
"""Imported ahead by default: what a run of a pipeline needs that its code location loads late."""

_SETTLE_S = 2
"""The next process is prepared when the run has ended, or has had the machine to itself for so long.

Measured: with 3 s and one message each five seconds the next run came before its process had loaded; with none the two
were in each other's way. A run of one message works for 1.5 to 2 s.
"""

_LOAD_S = 30
"""A process that has not loaded by then is given up; the run gets one that begins with it."""

_CHECK_S = 5


class Standby:
    """A process of `pipeline_platform.launcher.standby`, and what it is asked."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "pipeline_platform.launcher.standby"]
            self.process = subprocess.Popen(command, stdin=theirs.fileno())  # noqa: S603
        self._channel = ours
        self._answers = ours.makefile(encoding="utf-8")

    def load(self, origin: str, modules: Sequence[str], instance: str, location: str) -> None:
        """Have it load a code location. Returns at once."""
        self._ask(do="load", origin=origin, modules=list(modules), instance=instance, location=location)

    def is_ready(self) -> bool:
        """Whether it has loaded what a new process would load; waits for it to end loading."""
        try:
            self._answer(_LOAD_S)
            self._ask(do="check")
            return self._answer(_CHECK_S)
        except (OSError, ValueError):  # it died, or takes too long
            return False

    def run(self, arguments: ExecuteRunArgs) -> None:
        """Make it the process of a run. Returns at once."""
        self._ask(do="run", arguments=serialize_value(arguments))

    def wait(self) -> int:
        """Wait until it has ended; return its exit code."""
        code = self.process.wait()
        self._answers.close()
        self._channel.close()
        return code

    def dismiss(self) -> None:
        """Have it end, whatever it does."""
        self.process.kill()
        self.wait()

    def _ask(self, **request: Any) -> None:
        self._channel.sendall(json.dumps(request).encode() + b"\n")

    def _answer(self, patience_s: float) -> bool:
        self._channel.settimeout(patience_s)
        return bool(json.loads(self._answers.readline()))


class StandbyRunLauncher(dg.DefaultRunLauncher):
    """Runs of code locations that Dagster loads on this machine begin in a process that has loaded them before.

    There is one such process for each location that had a run, with 270 MB or so. A run that finds none, or one whose
    code was edited since, begins in a new process. Runs of locations behind a server of somebody else's, or of another
    Python than this, are started as Dagster does.

    A process that dies is noticed at once, or, if the process that launched the run is gone too, by Dagster's run
    monitoring; Dagster's launcher would leave that run as started until `max_runtime_seconds`.

    Args:
        inst_data: Dagster's, if the launcher comes from `dagster.yaml`.
        modules: Importable names that a process imports ahead, besides the location.
    """

    def __init__(self, inst_data: ConfigurableClassData | None = None, modules: Sequence[str] = MODULES) -> None:
        super().__init__(inst_data)
        self._modules = modules
        self._waiting: dict[str, Standby] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._has_looked_back = False

    @classmethod
    def config_type(cls) -> UserConfigSchema:
        """What `dagster.yaml` may say."""
        described = "Importable names that a process imports ahead, besides the code location."
        return {"modules": Field(Array(str), default_value=list(MODULES), is_required=False, description=described)}

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData, config_value: Mapping[str, Any]) -> Self:
        """Make one as `dagster.yaml` says."""
        return cls(inst_data, **config_value)

    def launch_run(self, context: LaunchRunContext) -> None:
        """Start a run, in the process that stands by for its code location if there is one."""
        run = context.dagster_run
        if run.job_code_origin is None or not _is_ours(context):
            super().launch_run(context)
            return
        self._look_back()
        location = run.remote_job_origin.location_name if run.remote_job_origin else ""
        origin = serialize_value(run.job_code_origin.repository_origin)
        standby = self._take(location) or Standby()
        # Before it starts, for a run writes tags of its own, and the storage keeps those of the last who wrote.
        self._instance.add_run_tags(run.run_id, {PROCESS_TAG: RunProcess.tag(run.run_id, standby.process.pid)})
        standby.run(ExecuteRunArgs(run.job_code_origin, run.run_id, self._instance.get_ref()))
        self._run_ids.add(run.run_id)
        attend = threading.Thread(
            target=self._attend, args=(standby, run.run_id, origin, location), name="standby", daemon=True
        )
        attend.start()

    def terminate(self, run_id: str) -> bool:
        """Ask a run's process to end, as a Ctrl-C would; return whether it was asked."""
        run = self._instance.get_run_by_id(run_id)
        process = RunProcess.of(run) if run else None
        if run is None or process is None:
            return bool(super().terminate(run_id))  # type: ignore[no-untyped-call]
        if run.is_finished:
            return False
        self._instance.report_run_canceling(run)
        if not process.is_here:
            refusal = f"Its process runs on {process.host}: only a web server or daemon there can end it."
        elif not process.lives:
            refusal = f"Its process {process.pid} has ended."
        else:
            os.kill(process.pid, signal.SIGTERM)
            return True
        self._instance.report_engine_event(refusal, run, cls=type(self))
        return False

    @property
    def supports_check_run_worker_health(self) -> bool:
        """Dagster's run monitoring may ask."""
        return True

    def check_run_worker_health(self, run: dg.DagsterRun) -> CheckRunHealthResult:
        """Whether a run's process lives, as far as this host can tell."""
        process = RunProcess.of(run)
        if process is None:
            return CheckRunHealthResult(WorkerStatus.RUNNING, "watched by the code server that started it")
        if not process.is_here:
            return CheckRunHealthResult(WorkerStatus.RUNNING, f"runs on {process.host}, which alone can tell")
        if process.lives:
            return CheckRunHealthResult(WorkerStatus.RUNNING)
        return CheckRunHealthResult(WorkerStatus.FAILED, f"process {process.pid} has ended before the run")

    def dispose(self) -> None:
        """Let the waiting processes go; those that run runs are left alone."""
        with self._lock:
            self._is_closed = True
            waiting, self._waiting = self._waiting, {}
        for standby in waiting.values():
            standby.dismiss()

    def standing_by(self, location: str) -> int | None:
        """The id of the process that waits, or still loads, for the next run of a code location."""
        with self._lock:
            standby = self._waiting.get(location)
        return standby.process.pid if standby else None

    def _take(self, location: str) -> Standby | None:
        """The process that stands by for a location, if it still has what a new one would load."""
        with self._lock:
            standby = self._waiting.pop(location, None)
        if standby is None or standby.is_ready():
            return standby
        standby.dismiss()
        return None

    def _attend(self, standby: Standby, run_id: str, origin: str, location: str) -> None:
        """Prepare the next process when there is time for it, and watch the one that runs."""
        with suppress(subprocess.TimeoutExpired):
            standby.process.wait(_SETTLE_S)
        try:
            self._stand_by(origin, location)
        except OSError as error:  # no memory for one more process, say
            dg.get_dagster_logger("standby").warning(f"No process stands by for {location}: {error}")
        code = standby.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._report_death(run_id, how)

    def _stand_by(self, origin: str, location: str) -> None:
        with self._lock:
            if self._is_closed or not self.has_instance or location in self._waiting:
                return
            standby = Standby()
            self._waiting[location] = standby
            standby.load(origin, self._modules, serialize_value(self._instance.get_ref()), location)

    def _look_back(self) -> None:
        """Once, report the runs that died before they started, and their launcher with them.

        Run monitoring asks about the processes of started runs alone; of these it would know after
        `start_timeout_seconds`.
        """
        with self._lock:
            looked, self._has_looked_back = self._has_looked_back, True
        if looked:
            return
        for run in self._instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTING])):
            process = RunProcess.of(run)
            if process and process.is_here and not process.lives:
                self._report_death(run.run_id, "ended")

    def _report_death(self, run_id: str, how: str) -> None:
        """Say how a run went whose process ended without saying so."""
        if not self.has_instance:
            return
        run = self._instance.get_run_by_id(run_id)
        if run is None or run.is_finished:
            return
        if run.status is dg.DagsterRunStatus.CANCELING:  # it was not listening yet, or would not
            self._instance.report_run_canceled(run)
            return
        self._instance.report_run_failed(run, f"The run's process {how} before the run was through.")


def _is_ours(context: LaunchRunContext) -> bool:
    """Whether a run's code location is loaded by Dagster on this machine, by the Python that this process has."""
    run = context.dagster_run
    if context.workspace is None or run.remote_job_origin is None or run.job_code_origin is None:
        return False
    location = context.workspace.get_code_location(run.remote_job_origin.location_name)
    return (
        isinstance(location.origin, ManagedGrpcPythonEnvCodeLocationOrigin)
        and run.job_code_origin.repository_origin.executable_path == sys.executable
    )
