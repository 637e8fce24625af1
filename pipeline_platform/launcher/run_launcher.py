"""Run launcher that starts runs in processes that have already loaded the project.

Dagster starts a process per run, which first imports Dagster, the project and Spark's client: three to four seconds on
two cores, twice the time of a run of one message. `StandbyRunLauncher` keeps one loaded process per code location on
standby, and starts the next process when a run has taken it. Configure it in `dagster.yaml`:

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
    from pipeline_platform.launcher.internals import CheckRunHealthResult, LaunchRunContext, SerialisedLocation

_START_S = 2
"""The next process is started when the run has ended, or after this time.

Measured with one message every 5 s: with 3 s the next run came before its process had loaded; with 0 s run and process
competed for the CPU. A run of one message takes 1.5 to 2 s.
"""

_TERMINATE_TAG = ".dagster/pipeline_platform/terminate"
"""Tag of a run whose process this process cannot reach: the launcher that started the run polls this tag."""
_LOOK_S = 5
"""Seconds between two polls of that tag."""


class StandbyRunLauncher(dg.DefaultRunLauncher):
    """Launcher that starts a run in a process that has already loaded its code location, on this machine.

    It keeps one process for each location that had a run, with about 270 MB of memory. A run starts in a new process if
    there is no standby process, or if the code was edited since it loaded. Runs of locations with another server or
    another Python are launched as Dagster does; all runs are, if this Dagster's private API differs.

    If the process of a run crashes, the launcher reports it at once. If the launcher is gone, too, Dagster's run
    monitoring reports it; with Dagster's launcher that run would stay started until `max_runtime_seconds`.
    """

    def __init__(self, inst_data: Any = None) -> None:
        super().__init__(inst_data)
        self._waiting: dict[str, Standby] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._has_looked_back = False
        if _LACK:
            dg.get_dagster_logger("standby").warning(f"No standby processes, so runs start seconds later: {_LACK}")

    def launch_run(self, context: LaunchRunContext) -> None:
        """Start a run, in the standby process of its code location if there is one."""
        local = None if _LACK else internals.LocalRun.of(context, self._instance)
        if local is None:
            super().launch_run(context)
            return
        # First: the run is already STARTING, and the standby process may need another half a minute to load.
        run_id = context.dagster_run.run_id
        self._instance.add_run_tags(run_id, {LAUNCHER_TAG: RunProcess.tag(run_id, os.getpid())})
        self._look_back()
        try:
            standby = self._hand_over(self._take(local.location.name) or Standby(), run_id, local.arguments)
        except BrokenPipeError:  # it crashed in the meantime
            standby = self._hand_over(Standby(), run_id, local.arguments)
        attend = (standby, run_id, local.location)
        threading.Thread(target=self._attend, args=attend, name="standby", daemon=True).start()

    def _hand_over(self, standby: Standby, run_id: str, arguments: str) -> Standby:
        # Before it starts: a run writes tags, too, and the last writer of the storage wins.
        self._instance.add_run_tags(run_id, {PROCESS_TAG: RunProcess.tag(run_id, standby.process.pid)})
        standby.run(arguments)
        return standby

    def terminate(self, run_id: str) -> bool:
        """Send SIGTERM to the process of a run, directly or by its launcher; return whether it was requested."""
        run = self._instance.get_run_by_id(run_id)
        process = RunProcess.of(run) if run else None
        if run is None or process is None:
            return bool(super().terminate(run_id))  # type: ignore[no-untyped-call]
        if run.is_finished:
            return False
        self._instance.report_run_canceling(run)
        if process.is_here and process.lives:
            os.kill(process.pid, signal.SIGTERM)
            return True
        # Its process is on another host, has ended, or is hidden from this process, as between two units of systemd.
        self._instance.add_run_tags(run_id, {_TERMINATE_TAG: run_id})
        text = f"The daemon on {process.host} will terminate process {process.pid} within {_LOOK_S} s if it is alive."
        self._instance.report_engine_event(text, run, cls=type(self))
        return True

    @property
    def supports_check_run_worker_health(self) -> bool:
        """Whether Dagster's run monitoring can check runs."""
        return not _LACK

    def check_run_worker_health(self, run: dg.DagsterRun) -> CheckRunHealthResult:
        """Return whether the process of a run is alive, if this host can check it."""
        process = RunProcess.of(run)
        if process and is_gone(run):
            why = f"process {process.pid} has ended before the run"
            return internals.CheckRunHealthResult(internals.WorkerStatus.FAILED, why)
        return internals.CheckRunHealthResult(internals.WorkerStatus.RUNNING)

    def dispose(self) -> None:
        """End the standby processes; processes that execute runs continue."""
        with self._lock:
            self._is_closed = True
            waiting, self._waiting = self._waiting, {}
        for standby in waiting.values():
            standby.dismiss()

    def _take(self, location: str) -> Standby | None:
        """Return the standby process of a location, unless its code has changed."""
        with self._lock:
            standby = self._waiting.pop(location, None)
        if standby is None or standby.is_ready():
            return standby
        standby.dismiss()
        return None

    def _attend(self, standby: Standby, run_id: str, location: SerialisedLocation) -> None:
        """Start the next standby process after a while, and watch the process of the run."""
        with suppress(subprocess.TimeoutExpired):
            standby.process.wait(_START_S)
        try:
            with self._lock:
                if not self._is_closed and self.has_instance and location.name not in self._waiting:
                    self._waiting[location.name] = Standby(location)
        except OSError as error:  # for example out of memory
            dg.get_dagster_logger("standby").warning(f"No standby process for {location.name}: {error}")
        while not self._is_terminated_elsewhere(run_id):
            with suppress(subprocess.TimeoutExpired):
                standby.process.wait(_LOOK_S)
                break
        else:
            standby.process.terminate()
        code = standby.process.wait()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._report_death(run_id, how)

    def _is_terminated_elsewhere(self, run_id: str) -> bool:
        """Whether another process requested the termination of the run; errors count as no until the next poll."""
        with suppress(Exception):
            run = self._instance.get_run_by_id(run_id) if self.has_instance else None
            return run is not None and not run.is_finished and run.tags.get(_TERMINATE_TAG) == run_id
        return False

    def _look_back(self) -> None:
        """Report, once per process, runs that crashed together with their launcher before they started.

        Run monitoring checks started runs only; it would report these after `start_timeout_seconds`.
        """
        with self._lock:
            looked, self._has_looked_back = self._has_looked_back, True
        if looked:
            return
        for record in self._instance.get_run_records(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTING])):
            if is_gone(record.dagster_run) or is_lost(record, datetime.now(UTC)):
                self._report_death(record.dagster_run.run_id, "ended")

    def _report_death(self, run_id: str, how: str) -> None:
        """Report a run whose process ended without reporting its end."""
        run = self._instance.get_run_by_id(run_id) if self.has_instance else None
        if run is None or run.is_finished:
            return
        if run.status is dg.DagsterRunStatus.CANCELING:  # it was terminated before it could report
            self._instance.report_run_canceled(run)
            return
        self._instance.report_run_failed(run, f"The run's process {how} before the run finished.")
