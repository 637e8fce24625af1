"""Checks of Dagster: its daemon, the sensors and schedules, and the settings in dagster.yaml."""

from collections.abc import Sequence
from typing import Any

import dagster as dg

from pipeline_platform.cli.dagster_instance import Instance
from pipeline_platform.cli.doctor.check import Finding, error, ok, warning
from pipeline_platform.cli.loading import counted
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.jobs import REPLAY_TAG
from pipeline_platform.orchestration.sensors.asking import is_silent, last_seen, not_asked_for, turned_off

Pipelines = Sequence[type[Pipeline]]

_SPARE_S = 10
"""Seconds that a terminated run needs besides twice its `shutdown`."""


def storage(instance: Instance) -> Finding:
    """Check that Dagster's storage answers."""
    if isinstance(instance, str):
        return error(instance, "Set DAGSTER_HOME to the folder of a correct dagster.yaml, and start Dagster")
    runs = instance.get_runs_count()
    return ok(f"{instance.root_directory}: {counted(runs, 'run')}")


def daemon(instance: dg.DagsterInstance) -> Finding:
    """Check that the daemon has written a heartbeat for each of its tasks, without an error."""
    seen = last_seen(instance, instance.get_required_daemon_types())
    if silent := [name for name, time in seen.items() if is_silent(time)]:
        last = max((time for time in seen.values() if time), default=None)
        text = "it has never run" if last is None else f"last seen at {last:%Y-%m-%d %H:%M:%S} UTC"
        part = "" if len(silent) == len(seen) else f" (only {', '.join(silent)})"
        return error(f"{text}{part}", "Start it: dagster-daemon run -w workspace.yaml. If it runs, see its log")
    beats = instance.get_daemon_heartbeats()
    if failed := [name for name in seen if beats[name].errors]:
        errors = beats[failed[0]].errors or ()
        reason = errors[0].message.strip().partition("\n")[0]
        return warning(f"{', '.join(failed)} failed: {reason}", "See the log of the daemon")
    return ok(f"{counted(len(seen), 'task')} with a recent heartbeat")


def sensors(instance: dg.DagsterInstance, pipelines: Pipelines) -> Finding:
    """Check that runs of each pipeline are requested, and that its other sensors and schedules are on."""
    producers = [producer for pipeline in pipelines for producer in BoundProducer.all_of(pipeline)]
    why = {producer.key: not_asked_for(producer, instance) for producer in producers}
    fix = "Turn it on in the UI, on the page Automation"
    if off := {key: reason for key, reason in why.items() if reason and reason.endswith("in Dagster")}:
        return error("; ".join(off.values()), fix)
    if others := [name for pipeline in pipelines for name in turned_off(pipeline, instance)]:
        return warning(f"turned off in Dagster: {', '.join(others)}", fix)
    return ok(f"those of {counted(len(pipelines), 'pipeline')} are on")


def run_queue(instance: dg.DagsterInstance, pipelines: Pipelines) -> Finding:
    """Check that the queue of runs has a slot for each run that may be active, and limits replays."""
    queue: Any = instance.get_concurrency_config().run_queue_config
    if queue is None:
        return error(
            f"run_coordinator is {type(instance.run_coordinator).__name__}: nothing limits the number of runs",
            "Set run_coordinator in dagster.yaml to QueuedRunCoordinator, as in the template",
        )
    limited = [limit.get("key") for limit in queue.tag_concurrency_limits]
    if REPLAY_TAG not in limited:
        return warning(
            f"concurrency.runs.tag_concurrency_limits has no limit for {REPLAY_TAG}: replays run at the same time",
            "Copy the limit from the template's dagster.yaml",
        )
    most = queue.max_concurrent_runs
    endless = [p for pipeline in pipelines for p in BoundProducer.all_of(pipeline) if p.options.idle_timeout]
    if 0 <= most <= len(endless):
        return warning(
            f"max_concurrent_runs is {most}, and {counted(len(endless), 'producer')} may have a continuous run each",
            "Raise concurrency.runs.max_concurrent_runs in dagster.yaml",
        )
    return ok(f"up to {counted(most, 'run')} at once" if most >= 0 else "any number of runs at once")


def run_monitoring(instance: dg.DagsterInstance, pipelines: Pipelines) -> Finding:
    """Check that runs of lost hosts end, and that terminated runs have the time to publish."""
    if not instance.run_monitoring_enabled:
        return error(
            "run_monitoring is off: a run whose host is lost stays active forever",
            "Set run_monitoring.enabled: true in dagster.yaml",
        )
    if not instance.run_monitoring_max_runtime_seconds:
        return warning(
            "run_monitoring.max_runtime_seconds is not set: a run whose host is lost stays active forever",
            "Set it in dagster.yaml, for example to 7200",
        )
    longest = max((pipeline.shutdown.total_seconds() for pipeline in pipelines), default=0.0)
    needed, given = 2 * longest + _SPARE_S, instance.run_monitoring_cancel_timeout_seconds
    if given < needed:
        return warning(
            f"run_monitoring.cancel_timeout_seconds is {given}, and a terminated run may need {needed:.0f}",
            f"Set it to at least {needed:.0f} in dagster.yaml, or lower `shutdown` of the pipelines",
        )
    return ok(f"on, runs of lost hosts end after {instance.run_monitoring_max_runtime_seconds} s")


def run_retries(instance: dg.DagsterInstance) -> Finding:
    """Check Dagster's retries of runs, which do not apply to runs of pipelines."""
    if instance.run_retries_enabled:
        return ok("on; runs of pipelines have the tag dagster/max_retries: 0, because the next run continues them")
    return ok("off")


def ticks(instance: dg.DagsterInstance, pipelines: Pipelines) -> Finding:
    """Check that a slow source delays no other sensor, and that ticks may wait for a first message."""
    fix = "Set use_threads: true and num_workers under sensors and schedules in dagster.yaml"
    settings = {name: instance.get_settings(name) or {} for name in ("sensors", "schedules")}
    if serial := [name for name, given in settings.items() if not given.get("use_threads")]:
        return warning(f"use_threads of {' and '.join(serial)} is off: a slow source delays all others", fix)
    producers = sum(len(BoundProducer.all_of(pipeline)) for pipeline in pipelines)
    workers = settings["sensors"].get("num_workers") or 0
    if workers <= producers:
        return warning(
            f"sensors.num_workers is {workers}, with {counted(producers, 'producer')}: ticks do not wait for a first "
            "message, which is then handled up to 5 s later",
            f"Set sensors.num_workers to at least {producers + 1} in dagster.yaml",
        )
    return ok(f"{workers} threads for sensors, {settings['schedules'].get('num_workers') or 'any'} for schedules")


def retention(instance: dg.DagsterInstance) -> Finding:
    """Check that ticks are deleted: a sensor has 17,280 a day."""
    days = (instance.get_settings("retention") or {}).get("sensor", {}).get("purge_after_days")
    skipped = days.get("skipped", 7) if isinstance(days, dict) else days
    if days is None or skipped == -1:
        return warning(
            "retention.sensor.purge_after_days is not set: skipped ticks are kept for a week or forever",
            "Set it in dagster.yaml, as in the template",
        )
    return ok(f"skipped ticks are deleted after {counted(int(skipped), 'day')}")
