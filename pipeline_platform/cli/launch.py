"""Runs that retry failures, launched on the deployment's Dagster instance by commands or from Python."""

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from pipeline_platform.cli import loading
from pipeline_platform.cli.loading import counted
from pipeline_platform.cli.runs.planned_runs import (
    Launch,
    Launched,
    PlannedRun,
    RunOutput,
    launch_all,
    refuse_paused,
    windows_text,
)
from pipeline_platform.cli.waiting import waiting
from pipeline_platform.control.quota import Quota
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.failures.failure_events import Selection, State
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.windows import expect_window


def retry_failures(
    pipeline: str,
    *,
    state: State = "open",
    kind: str | None = None,
    reason: str | None = None,
    cause: str | None = None,
    message_id: str | None = None,
    source: str | None = None,
    windows: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    ignore_pause: bool = False,
    module: str | None = None,
) -> list[Launched]:
    """Launch runs that retry failures. Without criteria, retry all open failures, including dead failures.

    If a range of windows has more failures than fit into a receive, its run retries them in several receives.

    Args:
        pipeline: Name of the pipeline.
        state: `open` (all), `waiting` (not dead), `due` or `dead`.
        kind: Only failures of this kind.
        reason: Only failures whose reason contains this text.
        cause: Only failures with this cause, or with the cause of this reason.
        message_id: Only failures of this message.
        source: Only failures from the source with this name. Ids are unique per source.
        windows: Only failures of these windows; all windows if empty.
        settings: Fields of the pipeline's context to change in these runs, as JSON.
        ignore_pause: Whether to retry although the pipeline is paused. Not possible during a drain.
        module: Module of the deployment. Default: see `loading.location_of`.

    Returns:
        A run for each contiguous range of windows with matching failures.

    Raises:
        SetUpError: The current folder has no deployment, the pipeline is paused, several sources have the id and
            `source` is not set, or Dagster refused to launch a run.
        ValueError: A key in `windows` is not valid, or a setting is not a field of the context or has an invalid value.
    """
    selection = Selection(state=state, kind=kind, reason=reason, cause=cause, message_id=message_id, source=source)
    with loading.opened(module) as opened:
        of = opened.pipeline(pipeline)
        of.context_of(settings)  # refuses invalid settings
        refuse_paused(opened.control, BoundProducer(of), ignore_pause=ignore_pause)
        most = Quota(BoundProducer(of), opened.control).per_run
        ranges = _ranges(opened, of, selection, windows)
        options = {"context": settings, "ignore_pause": ignore_pause}
        runs = [_run(of, each, min(each.messages, most), selection, options) for each in ranges]
        return list(launch_all(f"{of.name}_retry", runs, module))


def retry_all(
    opened: loading.Deployment,
    launch: Launch,
    selection: Selection,
    windows: Sequence[str],
    write_history: Callable[[int], object],
    settings: Mapping[str, Any],
    *,
    ignore_pause: bool,
) -> list[RunOutput]:
    """Launch runs that retry all selected failures, and print a line for each; in a dry run, only print them.

    If the capacity of the pipeline is too small for all failures at once, wait for the runs that use it, and launch the
    next. A failure that fails again meanwhile is not retried once more. `write_history` is called with the number of
    failures before the first launch. `settings` and `ignore_pause` are those of `retry_failures`.

    Raises:
        SetUpError: The pipeline is paused, failures of several sources have the selected id, DAGSTER_HOME is not set,
            Dagster does not launch a run, or runs retried nothing.
        ValueError: A key in `windows` is not valid.
    """
    pipeline = launch.pipeline
    quota, options = Quota(BoundProducer(pipeline), opened.control), {"context": settings, "ignore_pause": ignore_pause}
    refuse_paused(opened.control, quota.producer, ignore_pause=ignore_pause)
    with waiting("the lake"):
        ranges = _ranges(opened, pipeline, selection, windows)
    if not ranges:
        launch.say("No matching failures; nothing launched.")
        return []
    most, total = quota.per_run, sum(each.messages for each in ranges)
    if launch.dry_run:
        for each in ranges:
            several = f" in {counted(count, 'run')}" if (count := math.ceil(each.messages / most)) > 1 else ""
            launch.say(f"would launch {launch.job}: retries {each}{several}")
        needed = sum(math.ceil(each.messages / most) for each in ranges)
        launch.say(f"Dry run: launched none of {counted(needed, 'run')}.")
        return [
            RunOutput(run_id=None, windows=each.windows, messages=min(most, each.messages - start), status=None)
            for each in ranges
            for start in range(0, each.messages, most)
        ]
    write_history(total)
    if total <= quota.capacity and all(each.messages <= most for each in ranges):
        runs = [_run(pipeline, each, each.messages, selection, options) for each in ranges]
        return _carry_out(launch, runs, ranges)
    launch.say(f"{counted(total, 'failure')} to retry, up to {quota.capacity:,} at once.")
    launched = list[RunOutput]()
    selection, left = selection.model_copy(update={"failed_before": datetime.now(UTC)}), total
    while ranges:
        runs, room = list[PlannedRun](), quota.capacity
        for each in ranges:
            if (messages := min(each.messages, most, room)) > 0:
                runs.append(_run(pipeline, each, messages, selection, options, demand=messages))
                room -= messages
        launched += _carry_out(launch._replace(wait=True), runs, ranges)
        if any(run.status != "success" for run in launched):
            break
        ranges, before = _ranges(opened, pipeline, selection, windows), left
        left = sum(each.messages for each in ranges)
        launch.say(f"Retried {total - left:,} of {counted(total, 'failure')}.")
        if left >= before:
            raise loading.SetUpError(
                f"the last runs of {pipeline.name} retried no failures. Check that the pipeline is not paused, and "
                "that other runs leave it capacity; then retry again"
            )
    return launched


class _Range(NamedTuple):
    """Contiguous windows, and the number of their selected failures."""

    windows: list[str]
    messages: int

    def __str__(self) -> str:
        return f"{counted(self.messages, 'failure')} of {windows_text(self.windows)}"


def _ranges(
    opened: loading.Deployment, pipeline: type[Pipeline], selection: Selection, windows: Sequence[str]
) -> list[_Range]:
    """Return the contiguous ranges of windows with selected failures; of all windows if `windows` is empty."""
    from pipeline_platform.orchestration.asset_windows import contiguous

    for window in windows:
        expect_window(window)
    failed = FailedMessages(
        name=pipeline.name,
        lake=opened.lake,
        pipeline=pipeline.name,
        windows=tuple(windows) or None,
        selection=selection.at(datetime.now(UTC)),
        holds=pipeline.holds_partitions(),
    )
    if selection.message_id is not None and selection.source is None and len(sources := failed.sources()) > 1:
        raise loading.SetUpError(
            f"several sources have failures with the id {selection.message_id!r}. Choose a source: {', '.join(sources)}"
        )
    waiting = failed.chosen_by_window()
    return [
        _Range(neighbours, sum(waiting[window] for window in neighbours))
        for neighbours in contiguous(pipeline, waiting)
    ]


def _run(
    pipeline: type[Pipeline],
    of: _Range,
    messages: int,
    selection: Selection,
    options: Mapping[str, Any],
    demand: int | None = None,
) -> PlannedRun:
    from pipeline_platform.orchestration.jobs import run_request

    whole = BoundProducer(pipeline)
    request = run_request(whole, "failed", of.windows, messages, demand, selection=selection, **options)
    return PlannedRun(of.windows, messages, request)


def _carry_out(launch: Launch, runs: Sequence[PlannedRun], ranges: Sequence[_Range]) -> list[RunOutput]:
    totals = {each.windows[0]: each for each in ranges}

    def describe(run: PlannedRun | Launched) -> str:
        whole = totals[run.windows[0]]
        return f"retries {whole}" if run.messages == whole.messages else f"retries {run.messages:,} of {whole}"

    return launch.carry_out(runs, describe, "failure")
