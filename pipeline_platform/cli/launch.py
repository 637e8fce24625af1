"""Runs that retry failures, launched on the deployment's Dagster instance by commands or from Python."""

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from pipeline_platform.cli import loading
from pipeline_platform.cli.launch_runs import launching
from pipeline_platform.lake.failed import FailedMessages
from pipeline_platform.lake.failure_events import Selection, State
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.windows import expect_window


class Launched(NamedTuple):
    """A run that was launched, the neighbouring windows that it is about, and how many failures it is to drive."""

    run_id: str
    windows: list[str]
    messages: int


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
        return list(launch(opened, opened.pipeline(pipeline), selection, windows, module))


def launch(
    opened: loading.Deployment,
    pipeline: type[Pipeline],
    selection: Selection,
    windows: Sequence[str] = (),
    module: str | None = None,
    log: Callable[[str], object] = lambda _: None,
) -> Iterator[Launched]:
    """Launch them, and yield each as it is launched; see `retry_failures`. `log` gets what is waited for."""
    from pipeline_platform.orchestration.asset_windows import contiguous
    from pipeline_platform.orchestration.jobs import run_request

    for window in windows:
        expect_window(window)
    if not os.environ.get("DAGSTER_HOME"):
        raise loading.SetUpError("DAGSTER_HOME is not set: name the folder of the instance that is to run it")
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
    waiting, of_module, job = failed.chosen_by_window(), module or loading.chosen(), f"{pipeline.name}_backfill"
    if not waiting:
        return
    log(f"launching {job}: Dagster loads {of_module or 'the workspace'} for it")
    with launching(job, of_module) as launch_one:
        for neighbours in contiguous(pipeline, waiting):
            messages = sum(waiting[window] for window in neighbours)
            expected = min(messages, opened.control.processors_of(pipeline).per_run)
            request = run_request(pipeline, "failed", neighbours, expected=expected, selection=selection)
            partition = {"dagster/partition": request.partition_key} if request.partition_key else {}
            yield Launched(launch_one(request.run_config, {**request.tags, **partition}), neighbours, messages)


def windows_of(neighbours: Sequence[str]) -> str:
    """Neighbouring windows, in words."""
    return " to ".join(dict.fromkeys((neighbours[0], neighbours[-1])))
