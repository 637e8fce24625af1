"""Progress of launched runs on the terminal: one line per change of a run's status, step or counts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import typer

from pipeline_platform.cli.loading import counted
from pipeline_platform.cli.progress import Show, progress
from pipeline_platform.cli.terminal import say
from pipeline_platform.model.pipeline import Pipeline

if TYPE_CHECKING:
    import dagster as dg

_LOOK_S = 1.0
_QUEUED_S = 60.0
"""Time in the queue after which a line names the usual causes."""
_NOT_STARTED = ("queued", "not started")
_OUTCOMES = ("received", "handled", "failed", "skipped", "returned", "duplicates")


def follow(
    pipeline: type[Pipeline], run_ids: Sequence[str], sleep: Callable[[float], None] = time.sleep, *, err: bool = False
) -> dict[str, str]:
    """Wait until runs on the instance in DAGSTER_HOME end, and print a line for each change.

    Args:
        pipeline: Pipeline of the runs.
        run_ids: Ids of the runs.
        sleep: Waits a number of seconds.
        err: Whether to print to standard error.

    Returns:
        The last status of each run by its id, such as `success`.

    Raises:
        typer.Exit: The user interrupted the wait; the runs continue.
    """
    import dagster as dg

    with dg.DagsterInstance.get() as instance:
        try:
            with progress(len(run_ids), lines=False) as show:
                ended = _wait(pipeline, run_ids, instance, sleep, show, err=err)
        except KeyboardInterrupt:
            say(f"Stopped waiting: {counted(len(run_ids), 'run')} continue in Dagster.", err=True)
            raise typer.Exit(130) from None
    counts = Counter(ended.values())
    succeeded = counts.pop("success", 0)
    others = "".join(f", {count:,} {status}" for status, count in sorted(counts.items()))
    say(f"{counted(len(run_ids), 'run')} ended: {succeeded:,} succeeded{others}.", err=err)
    return ended


def _wait(
    pipeline: type[Pipeline],
    run_ids: Sequence[str],
    instance: dg.DagsterInstance,
    sleep: Callable[[float], None],
    show: Show,
    *,
    err: bool,
) -> dict[str, str]:
    """Print changes until all runs have ended; return the last status of each run."""
    pending, shown, ended, waited = list(run_ids), dict.fromkeys(run_ids, ""), dict[str, str](), 0.0
    while True:
        for run_id in tuple(pending):
            run = instance.get_run_by_id(run_id)
            status = "deleted" if run is None else run.status.value.lower().replace("_", " ")
            line = status if run is None else f"{status}{_details(pipeline, run, instance)}"
            if line != shown[run_id]:
                say(f"run {run_id[:8]}: {line}", err=err)
                shown[run_id] = line
            if run is None or run.is_finished:
                pending.remove(run_id)
                ended[run_id] = status
        show(len(run_ids) - len(pending), f"{len(run_ids) - len(pending):,} of {counted(len(run_ids), 'run')} ended")
        if not pending:
            return ended
        if waited < _QUEUED_S <= waited + _LOOK_S and all(shown[run_id] in _NOT_STARTED for run_id in run_ids):
            say(f"No run has started for {_QUEUED_S:.0f} s. Check that the Dagster daemon runs.", err=True)
        sleep(_LOOK_S)
        waited += _LOOK_S


def _details(pipeline: type[Pipeline], run: dg.DagsterRun, instance: dg.DagsterInstance) -> str:
    """Return the step of a run and its counts of messages, each after a comma."""
    from pipeline_platform.orchestration.jobs import RunTags

    if run.is_finished:
        counts = _counts(pipeline, run.run_id, instance)
        shown = [f"{name} {counts[name]:,}" for name in _OUTCOMES if counts[name] or name in _OUTCOMES[:3]]
        return f", {', '.join(shown)}" if counts else ""
    received = run.tags.get(RunTags.of(pipeline).received)
    messages = [counted(int(received), "message")] if received else []
    return "".join(f", {detail}" for detail in (*_steps(run.run_id, instance), *messages))


def _steps(run_id: str, instance: dg.DagsterInstance) -> list[str]:
    steps = instance.get_run_step_stats(run_id)
    return [step.step_key.rpartition(".")[2] for step in steps if step.start_time and not step.end_time]


def _counts(pipeline: type[Pipeline], run_id: str, instance: dg.DagsterInstance) -> Counter[str]:
    """Return what a run has reported, summed over its windows; empty if it has reported nothing."""
    import dagster as dg

    counts: Counter[str] = Counter()
    key = dg.AssetKey([pipeline.name, "messages"])
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION):
        event = entry.asset_materialization
        if event is not None and event.asset_key == key:
            for name in _OUTCOMES:
                if isinstance(value := event.metadata.get(name), dg.IntMetadataValue) and value.value is not None:
                    counts[name] += value.value
    return counts
