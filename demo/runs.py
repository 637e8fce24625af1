"""What Dagster says of a demo: its runs and their steps, its sensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import dagster as dg

from assets.tags import RunTags
from pipelines.flights import Flights


class Step(NamedTuple):
    """An op of a run: its name without the graph's, and when it began and ended, in seconds since the epoch."""

    name: str
    started: float | None
    ended: float | None


class Run(NamedTuple):
    """A run: where its messages come from, or else its job; how many it takes on; its times in seconds as above."""

    run_id: str
    status: str
    origin: str
    demand: int
    started: float | None
    ended: float | None
    steps: Sequence[Step]
    under_way: bool


def runs_of(instance: dg.DagsterInstance) -> list[Run]:
    """Return all runs, newest first, with their steps in the order they began."""
    tags, runs = RunTags.of(Flights), []
    for record in instance.get_run_records():
        run = record.dagster_run
        # A run that has not begun has no log yet.
        stats = instance.get_run_step_stats(run.run_id) if record.start_time else []
        steps = [Step(step.step_key.rpartition(".")[2], step.start_time, step.end_time) for step in stats]
        steps.sort(key=lambda step: step.started or float("inf"))
        origin, demand = run.tags.get(tags.origin, run.job_name), int(run.tags.get(tags.demand, 0))
        times = (record.start_time, record.end_time)
        runs.append(Run(run.run_id, run.status.value, origin, demand, *times, steps, not run.is_finished))
    return runs


def sensor_says(instance: dg.DagsterInstance) -> str:
    """Return what the last tick of the producer sensor came to."""
    for state in instance.all_instigator_state():
        if state.name == f"{Flights.name}_producer":
            for tick in instance.get_ticks(state.instigator_origin_id, state.selector_id, limit=1):
                return tick.skip_reason or f"asked for {len(tick.run_ids)} runs"
    return "has not looked yet"
