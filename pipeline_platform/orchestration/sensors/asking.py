"""Whether Dagster evaluates the sensor or the schedule that requests a producer's runs."""

from datetime import UTC, datetime, timedelta

import dagster as dg

from pipeline_platform.model.bound_producer import BoundProducer

_SILENT_AFTER = timedelta(minutes=2)
"""Dagster's daemon writes a heartbeat every 30 s."""


def not_asked_for(producer: BoundProducer, instance: dg.DagsterInstance) -> str | None:
    """Return why no runs of a producer are requested: all sensors are off, or no daemon runs; None if they are."""
    by_clock = producer.options.schedule is not None
    # By name: Dagster's kind, and whether it is on by default.
    askers = {f"{producer.prefix}_producer": ("SENSOR", not by_clock)}
    if by_clock:
        askers[f"{producer.prefix}_pull_schedule"] = ("SCHEDULE", True)
    states = {state.instigator_name: state.status.value for state in instance.all_instigator_state()}
    on = {kind for name, (kind, is_on) in askers.items() if _is_on(states.get(name), is_on)}
    if not on:
        off = " and ".join(askers)
        return f"{off} {'is' if len(askers) == 1 else 'are'} turned off in Dagster"
    daemons = {"SENSOR": "SENSOR", "SCHEDULE": "SCHEDULER"}
    beats = instance.get_daemon_heartbeats()
    last = max((beats[daemons[kind]].timestamp for kind in on if daemons[kind] in beats), default=None)
    if last is None:
        return "Dagster's daemon has never run"
    seen = datetime.fromtimestamp(last, UTC)
    is_silent = datetime.now(UTC) - seen > _SILENT_AFTER
    return f"Dagster's daemon was last seen at {seen:%Y-%m-%d %H:%M:%S} UTC" if is_silent else None


def _is_on(status: str | None, is_on: bool) -> bool:
    """Whether a sensor or schedule is on, given its stored state, if any, and its default."""
    return is_on if status in (None, "DECLARED_IN_CODE") else status == "RUNNING"
