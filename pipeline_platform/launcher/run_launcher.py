"""Starts runs in processes that have loaded the project before.

Dagster starts a process per run, which imports Dagster, the project and Spark's client first: three to four seconds on
two cores, twice as long as a run of one message works. `StandbyRunLauncher` has one process that did so already stand
by for each code location, and starts the next when that one has got a run. Set in `dagster.yaml`:

    run_launcher:
      module: pipeline_platform.launcher.run_launcher
      class: StandbyRunLauncher
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import dagster as dg

from pipeline_platform.launcher.run_process import LAUNCHER_TAG, PROCESS_TAG, RunProcess, is_gone, is_lost

try:
    from pipeline_platform.launcher import internals
    from pipeline_platform.launcher.standby import Standby

    _LACK = None
except ImportError as error:
    _LACK = str(error)

if TYPE_CHECKING:
    from pipeline_platform.launcher.internals import CheckRunHealthResult, LaunchRunContext, Location

_START_S = 2
"""The next process is prepared when the run has ended, or has had the machine to itself for so long.

Measured: with 3 s and one message each five seconds the next run came before its process had loaded; with none the two
were in each other's way. A run of one message works for 1.5 to 2 s.
"""

_TERMINATE_TAG = ".dagster/pipeline_platform/terminate"
"""On a run that the daemon that launched it is to terminate: its process is on another host than who was asked."""
_LOOK_S = 5
"""Seconds between two looks at that tag."""


class StandbyRunLauncher(dg.DefaultRunLauncher):
    """Runs of code locations that Dagster loads on this machine begin in a process that has loaded them before.

    There is one such process for each location that had a run, with 270 MB or so. A run that finds none, or one whose
    code was edited since, begins in a new process. Runs of locations behind a server of somebody else's, or of another
    Python than this, are started as Dagster does; with a Dagster whose private API is another, all are.

    A process that dies is noticed at once, or, if the process that launched the run is gone too, by Dagster's run
    monitoring; Dagster's launcher would leave that run as started until `max_runtime_seconds`.
    """

    def __init__(self, inst_data: Any = None) -> None:
        super().__init__(inst_data)
        self._waiting: dict[str, Standby] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._has_looked_back = False
        if _LACK:
            dg.get_dagster_logger("standby").warning(f"Runs start as Dagster starts them, seconds later: {_LACK}")

    def launch_run(self, context: LaunchRunContext) -> None:
        """Start a run, in the process that stands by for its code location if there is one."""
        local = None if _LACK else internals.LocalRun.of(context, self._instance)
        if local is None:
            super().launch_run(context)
            return
        # First of all: the run is STARTING already, and the process that stands by may load for half a minute yet.
        run_id = context.dagster_run.run_id
        self._instance.add_run_tags(run_id, {LAUNCHER_TAG: RunProcess.tag(run_id, os.getpid())})
        self._look_back()
        try:
            standby = self._hand_over(self._take(local.location.name) or Standby(), run_id, local.arguments)
        except BrokenPipeError:  # it died meanwhile
            standby = self._hand_over(Standby(), run_id, local.arguments)
        attend = (standby, run_id, local.location)
        threading.Thread(target=self._attend, args=attend, name="standby", daemon=True).start()

    def _hand_over(self, standby: Standby, run_id: str, arguments: str) -> Standby:
        # Before it starts, for a run writes tags of its own, and the storage keeps those of the last who wrote.
        self._instance.add_run_tags(run_id, {PROCESS_TAG: RunProcess.tag(run_id, standby.process.pid)})
        standby.run(arguments)
        return standby

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
            self._instance.add_run_tags(run_id, {_TERMINATE_TAG: run_id})
            asked = f"The daemon on {process.host} asks its process {process.pid} to end, within {_LOOK_S} s."
            self._instance.report_engine_event(asked, run, cls=type(self))
            return True
        if process.lives:
            os.kill(process.pid, signal.SIGTERM)
            return True
        self._instance.report_engine_event(f"Its process {process.pid} has ended.", run, cls=type(self))
        return False

    @property
    def supports_check_run_worker_health(self) -> bool:
        """Dagster's run monitoring may ask."""
        return not _LACK

    def check_run_worker_health(self, run: dg.DagsterRun) -> CheckRunHealthResult:
        """Whether a run's process lives, as far as this host can tell."""
        process = RunProcess.of(run)
        if process and is_gone(run):
            why = f"process {process.pid} has ended before the run"
            return internals.CheckRunHealthResult(internals.WorkerStatus.FAILED, why)
        return internals.CheckRunHealthResult(internals.WorkerStatus.RUNNING)

    def dispose(self) -> None:
        """Let the waiting processes go; those that run runs are left alone."""
        with self._lock:
            self._is_closed = True
            waiting, self._waiting = self._waiting, {}
        for standby in waiting.values():
            standby.dismiss()

    def _take(self, location: str) -> Standby | None:
        """The process that stands by for a location, if it still has what a new one would load."""
        with self._lock:
            standby = self._waiting.pop(location, None)
        if standby is None or standby.is_ready():
            return standby
        standby.dismiss()
        return None

    def _attend(self, standby: Standby, run_id: str, location: Location) -> None:
        """Prepare the next process when there is time for it, and watch the one that runs."""
        with suppress(subprocess.TimeoutExpired):
            standby.process.wait(_START_S)
        try:
            with self._lock:
                if not self._is_closed and self.has_instance and location.name not in self._waiting:
                    self._waiting[location.name] = Standby(location)
        except OSError as error:  # no memory for one more process, say
            dg.get_dagster_logger("standby").warning(f"No process stands by for {location.name}: {error}")
        while not self._is_terminated_elsewhere(run_id):
            with suppress(subprocess.TimeoutExpired):
                standby.process.wait(_LOOK_S)
                break
        else:
            standby.process.terminate()
        code = standby.process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._report_death(run_id, how)

    def _is_terminated_elsewhere(self, run_id: str) -> bool:
        """Whether a launcher of another host was to terminate the run; what cannot be asked now is asked again."""
        with suppress(Exception):
            run = self._instance.get_run_by_id(run_id) if self.has_instance else None
            return run is not None and not run.is_finished and run.tags.get(_TERMINATE_TAG) == run_id
        return False

    def _look_back(self) -> None:
        """Once, report the runs that died before they started, and their launcher with them.

        Run monitoring asks about the processes of started runs alone; it would know of these after
        `start_timeout_seconds`.
        """
        with self._lock:
            looked, self._has_looked_back = self._has_looked_back, True
        if looked:
            return
        for record in self._instance.get_run_records(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTING])):
            if is_gone(record.dagster_run) or is_lost(record, datetime.now(UTC)):
                self._report_death(record.dagster_run.run_id, "ended")

    def _report_death(self, run_id: str, how: str) -> None:
        """Report a run whose process ended without a report of its own."""
        run = self._instance.get_run_by_id(run_id) if self.has_instance else None
        if run is None or run.is_finished:
            return
        if run.status is dg.DagsterRunStatus.CANCELING:  # it was not listening yet, or would not
            self._instance.report_run_canceled(run)
            return
        self._instance.report_run_failed(run, f"The run's process {how} before the run was through.")
