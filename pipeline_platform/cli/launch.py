"""Runs that retry failures, launched on the deployment's Dagster instance by commands or from Python."""

from collections.abc import Sequence
from datetime import UTC, datetime

from pipeline_platform.cli import loading
from pipeline_platform.cli.planned_runs import Launched, PlannedRun, launch_all
from pipeline_platform.lake.failed import FailedMessages
from pipeline_platform.lake.failure_events import Selection, State
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.windows import expect_window


def retry_failures(
    pipeline: str,
    *,
    state: State = "open",
    kind: str | None = None,
    reason: str | None = None,
    message_id: str | None = None,
    source: str | None = None,
    windows: Sequence[str] = (),
    module: str | None = None,
) -> list[Launched]:
    """Launch runs that retry failures. Without criteria, retry all open failures, including dead failures.

    Args:
        pipeline: Name of the pipeline.
        state: `open` (all), `waiting` (not dead), `due` or `dead`.
        kind: Only failures of this kind.
        reason: Only failures whose reason contains this text.
        message_id: Only failures of this message.
        source: Only failures from the source with this name. Ids are unique per source.
        windows: Only failures of these windows; all windows if empty.
        module: Module of the deployment. Default: see `loading.location_of`.

    Returns:
        A run for each contiguous range of windows with matching failures.

    Raises:
        SetUpError: There is no deployment here, several sources have the id and `source` is not set, or Dagster
            refused to launch a run.
        ValueError: A key in `windows` is not valid.
    """
    selection = Selection(state=state, kind=kind, reason=reason, message_id=message_id, source=source)
    with loading.opened(module) as opened:
        of = opened.pipeline(pipeline)
        runs = plan_retries(opened, of, selection, windows)
        return list(launch_all(f"{of.name}_retry", runs, module or loading.chosen_module()))


def plan_retries(
    opened: loading.Deployment, pipeline: type[Pipeline], selection: Selection, windows: Sequence[str] = ()
) -> list[PlannedRun]:
    """Return a run for each contiguous range of windows with selected failures; of all windows if `windows` is empty.

    Raises:
        SetUpError: Failures of several sources have the selected id.
        ValueError: A key in `windows` is not valid.
    """
    from pipeline_platform.orchestration.asset_windows import contiguous
    from pipeline_platform.orchestration.jobs import run_request

    for window in windows:
        expect_window(window)
    failed = FailedMessages(
        name=pipeline.name,
        lake=opened.lake,
        pipeline=pipeline.name,
        windows=tuple(windows) or None,
        selection=selection.at(datetime.now(UTC)),
    )
    if selection.message_id is not None and selection.source is None and len(sources := failed.sources()) > 1:
        raise loading.SetUpError(
            f"several sources have failures with the id {selection.message_id!r}. Choose a source: {', '.join(sources)}"
        )
    waiting, runs = failed.chosen_by_window(), []
    for neighbours in contiguous(pipeline, waiting):
        messages = sum(waiting[window] for window in neighbours)
        expected = min(messages, opened.control.processors_of(pipeline).per_run)
        request = run_request(BoundProducer(pipeline), "failed", neighbours, expected=expected, selection=selection)
        runs.append(PlannedRun(neighbours, messages, request))
    return runs
