"""Whether Dagster evaluates the sensors and schedules of pipelines."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg

from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline

_SILENT_AFTER = timedelta(minutes=2)
"""Dagster's daemon writes a heartbeat every 30 s."""
_TIMES = (
    "last_tick_timestamp",
    "last_tick_start_timestamp",
    "last_sensor_start_timestamp",
    "last_iteration_timestamp",
    "start_timestamp",
)
"""Times in the states of sensors and schedules."""


def not_asked_for(producer: BoundProducer, instance: dg.DagsterInstance) -> str | None:
    """Return why no runs of a producer are requested: all sensors are off, or no daemon runs; None if they are."""
    askers = _askers(producer)
    on = set(askers) - set(_off(askers, instance))
    if not on:
        return f"{' and '.join(askers)} {'is' if len(askers) == 1 else 'are'} turned off in Dagster"
    daemons = {"SENSOR": "SENSOR", "SCHEDULE": "SCHEDULER"}
    seen = last_seen(instance, [daemons[askers[name][0]] for name in on])
    if (last := max(filter(None, seen.values()), default=None)) is None:
        return "Dagster's daemon has never run"
    return f"Dagster's daemon was last seen at {last:%Y-%m-%d %H:%M:%S} UTC" if is_silent(last) else None


def turned_off(pipeline: type[Pipeline], instance: dg.DagsterInstance) -> list[str]:
    """Return the sensors and schedules of a pipeline that are turned off, besides those that request its pulls."""
    names = [
        *(f"{producer.prefix}_backlog" for producer in BoundProducer.all_of(pipeline)),
        f"{pipeline.name}_history",
        f"{pipeline.name}_retry",
        f"{pipeline.name}_retry_schedule",
        f"{pipeline.name}_maintenance_schedule",
    ]
    return _off(dict.fromkeys(names, ("", True)), instance)


def last_seen(instance: dg.DagsterInstance, daemons: Iterable[str]) -> dict[str, datetime | None]:
    """Return the last heartbeat of daemons by type; None for a daemon that has never run."""
    beats = instance.get_daemon_heartbeats()
    return {
        daemon: datetime.fromtimestamp(beats[daemon].timestamp, UTC) if daemon in beats else None
        for daemon in sorted(daemons)
    }


def is_silent(seen: datetime | None) -> bool:
    """Whether a daemon with this last heartbeat is stopped or hangs."""
    return seen is None or datetime.now(UTC) - seen > _SILENT_AFTER


def last_active(state: Any) -> datetime:
    """Return the time of the last tick of a sensor or a schedule, or of its start if that is later.

    Dagster keeps the states of code locations that were removed or renamed.
    """
    found = (getattr(state.instigator_data, name, None) or 0.0 for name in _TIMES)
    return datetime.fromtimestamp(max(found), UTC)


def _askers(producer: BoundProducer) -> dict[str, tuple[str, bool]]:
    """Return the sensor and the schedule of a producer by name: Dagster's kind, and whether it is on by default."""
    by_clock = producer.options.schedule is not None
    askers = {f"{producer.prefix}_producer": ("SENSOR", not by_clock)}
    return askers | ({f"{producer.prefix}_pull_schedule": ("SCHEDULE", True)} if by_clock else {})


def _off(askers: dict[str, tuple[str, bool]], instance: dg.DagsterInstance) -> list[str]:
    """Return the sensors and schedules that are off, by their stored states and their defaults."""
    newest_last = sorted(instance.all_instigator_state(), key=last_active)
    states = {state.instigator_name: state.status.value for state in newest_last}
    return [
        name
        for name, (_, is_on) in askers.items()
        if not (is_on if states.get(name) in (None, "DECLARED_IN_CODE") else states[name] == "RUNNING")
    ]
