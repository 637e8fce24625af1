"""Reasons for a run to end its rounds."""

import os
import sys
import sysconfig
import time
from datetime import UTC, datetime
from typing import Any

import dagster as dg

from pipeline_platform.launcher.run_process import never_begins
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.orchestration.asset_windows import window_now
from pipeline_platform.orchestration.jobs import RunTags, tags_of
from pipeline_platform.orchestration.sensors.runs_under_way import UNDER_WAY, runs_to_lease, runs_with
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.stopping import end_after_step, is_to_end

_MAX_RUNTIME = "dagster/max_runtime"
"""Tag of a run with a limit of its own."""
_LOADED_AT = time.time()
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))

_LOOK_EVERY_S = 5.0
"""Time between two looks at Dagster's runs and at the loaded files."""
_RUNTIME_SHARE = 0.9
"""Share of `max_runtime` after which no more rounds start."""


class RoundsEnd:
    """Whether a run is to end its rounds."""

    def __init__(self, context: dg.AssetExecutionContext, flow: Flow) -> None:
        self._context, self._flow = context, flow
        self._last_message = self._looked = time.monotonic()
        self._files = _loaded_files()
        self._queued: set[str] = set()
        record = context.instance.get_run_record_by_id(context.run.run_id)
        self._started_at = (record.start_time if record else None) or time.time()
        self._max_runtime_s = _max_runtime_s(context)

    def defer(self) -> None:
        """Store that a message waits now."""
        self._last_message = time.monotonic()

    def reason(self) -> str | None:
        """Return why the run is to end its rounds, or None."""
        pipeline, key, now = self._flow.pipeline, self._flow.quota.key, time.monotonic()
        idle_timeout = self._flow.producer.options.idle_timeout
        if is_to_end():
            return "the run was asked to stop"
        if idle_timeout is None or now - self._last_message >= idle_timeout.total_seconds():
            return f"no message arrived for {idle_timeout}"
        if self._context.partition_keys[-1] != window_now(pipeline):
            return f"window {self._context.partition_keys[-1]} has ended"
        if (paused := self._flow.quota.paused) is not None:
            return f"{key} is paused: {paused}"
        if self._max_runtime_s and time.time() - self._started_at > _RUNTIME_SHARE * self._max_runtime_s:
            return f"max_runtime of {self._max_runtime_s:g} s is near"
        if now - self._looked < _LOOK_EVERY_S:
            return None
        self._looked = now
        return self._ended_in_dagster() or self._changed_code() or self._older_runs() or self._waiting_run()

    def _ended_in_dagster(self) -> str | None:
        """Return why a run is to end that Dagster counts as ended, and in whose place it may start another run."""
        run = self._context.instance.get_run_by_id(self._context.run.run_id)
        if run is None or not (run.is_finished or run.status is dg.DagsterRunStatus.CANCELING):
            return None
        end_after_step()  # by a signal: otherwise Dagster would mark the run as succeeded
        return f"Dagster has marked the run as {run.status.value}"

    def _changed_code(self) -> str | None:
        for file, state in self._files.items():
            if _state(file) != state:
                return f"{os.path.basename(file)} was changed"
        return None

    def _older_runs(self) -> str | None:
        """Return why a run above `max_runs` is to end: it was lowered, or a stalled run has continued."""
        flow = self._flow
        active = [claim.run_id for claim in flow.control.in_flight(flow.quota.key) if claim.is_stand_by]
        older = active[: active.index(self._context.run.run_id)] if self._context.run.run_id in active else []
        allowed = flow.control.options_of(flow.producer).max_runs
        if len(older) < allowed:
            return None
        runs = "1 run" if allowed == 1 else f"{allowed} runs"
        return f"max_runs allows {runs}, and run {older[-1]} is older"

    def _waiting_run(self) -> str | None:
        instance, flow, run_id = self._context.instance, self._flow, self._context.run.run_id
        claimed = {claim.run_id for claim in flow.control.in_flight(flow.pipeline.name, of_all=True)}
        for record in runs_with(instance, UNDER_WAY, tags_of(flow.pipeline, "failed", "messages")):
            run = record.dagster_run
            is_to_claim = RunTags.of(flow.pipeline).receive_id not in run.tags
            # The host of a run that Dagster counts as active may be lost.
            if run.run_id in claimed or (is_to_claim and not never_begins(record, instance, datetime.now(UTC))):
                return f"run {run.run_id}, a retry or replay, is active"
        if flow.pipeline.takes_turns(leases_partitions=flow.source.leases_partitions):
            for producer in BoundProducer.all_of(flow.pipeline):
                for other, _, _ in runs_to_lease(producer, instance, flow.control):
                    if other != run_id:
                        return f"run {other} waits for its turn"
        before, self._queued = self._queued, _queued(instance)
        if waiting := before & self._queued:
            return f"run {min(waiting)} waits for a slot"
        return None


def _queued(instance: dg.DagsterInstance) -> set[str]:
    """Return the runs in Dagster's queue, if all its slots are used."""
    most = _slots(instance)
    queued = instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.QUEUED]), limit=20)
    if not queued or most is None:
        return set()
    busy = dg.RunsFilter(statuses=[status for status in UNDER_WAY if status is not dg.DagsterRunStatus.QUEUED])
    return {run.run_id for run in queued} if instance.get_runs_count(busy) >= most else set()


def _slots(instance: dg.DagsterInstance) -> int | None:
    """Return how many runs Dagster executes at once; None for any number."""
    most = instance.get_concurrency_config().run_queue_config
    limit = most.max_concurrent_runs if most else None
    return limit if limit is not None and limit >= 0 else None


def _max_runtime_s(context: dg.AssetExecutionContext) -> float:
    """Return the seconds after which Dagster ends the run; 0 if it never does."""
    given: Any = context.run.tags.get(_MAX_RUNTIME) or context.instance.run_monitoring_max_runtime_seconds
    return float(given or 0)


def _loaded_files() -> dict[str, float | None]:
    """Return the modification times of the project's loaded modules. A file edited after its load has no time."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    own = {file for file in files if isinstance(file, str) and not file.startswith(_INSTALLED)}
    now, times = time.time(), {file: _state(file) for file in own}
    return {file: None if _LOADED_AT < changed_at <= now else changed_at for file, changed_at in times.items()}


def _state(file: str) -> float:
    try:
        return os.stat(file).st_mtime
    except OSError:
        return 0.0
