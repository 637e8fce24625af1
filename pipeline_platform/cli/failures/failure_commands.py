"""`pipeline-platform failures`: list, show, retry, close and reopen failures."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated

import typer
from pydantic import Field

from pipeline_platform.cli import loading
from pipeline_platform.cli.failures.failure_selection import (
    Cause,
    Chosen,
    Every,
    Id,
    Kind,
    Reason,
    SourceName,
    Windows,
    chosen_windows,
    failed_messages,
    for_history,
    selected_by,
)
from pipeline_platform.cli.failures.failure_views import list_, show
from pipeline_platform.cli.history_command import Why, record, user
from pipeline_platform.cli.launch import retry_all
from pipeline_platform.cli.loading import counted
from pipeline_platform.cli.options import Json, Name
from pipeline_platform.cli.output import Output, print_json
from pipeline_platform.cli.progress import progress
from pipeline_platform.cli.runs.context_settings import Settings, settings_of
from pipeline_platform.cli.runs.planned_runs import DryRun, IgnorePause, Launch, Wait
from pipeline_platform.cli.terminal import say
from pipeline_platform.cli.time_range import Since, Until
from pipeline_platform.lake.failures import closing
from pipeline_platform.lake.failures.failure_events import Selection
from pipeline_platform.lake.tables import Tables

app = typer.Typer(help="Show why messages failed; retry, close and reopen them.", no_args_is_help=True)
app.command("list")(list_)
app.command()(show)

CountOnly = Annotated[bool, typer.Option("--dry-run", help="Print the number of failures, and change nothing.")]


class ChangedOutput(Output):
    """Output of `failures close` and `failures reopen`."""

    failures: int = Field(description="Number of failures that were closed or reopened, or would be in a dry run.")
    dry_run: bool = Field(description="Whether nothing was changed.")


@app.command()
def retry(
    pipeline: Name,
    message_id: Id = None,
    source: SourceName = None,
    window: Windows = None,
    state: Chosen = None,
    kind: Kind = None,
    reason: Reason = None,
    cause: Cause = None,
    since: Since = None,
    until: Until = None,
    every: Every = False,
    ignore_pause: IgnorePause = False,
    settings: Settings = None,
    why: Why = "",
    dry_run: DryRun = False,
    wait: Wait = False,
    as_json: Json = False,
) -> None:
    """Launch runs that retry failures, on the instance in DAGSTER_HOME: one run per contiguous range of windows.

    If there are more failures than the pipeline may have in flight, wait for these runs, and launch the next.
    """
    selected = selected_by(message_id, source, window or since or until, state, kind, reason, cause, every=every)
    with loading.opened() as opened:
        say(f"Looking for failures of {pipeline} in {opened.lake.root}.", err=True)
        of, windows = opened.pipeline(pipeline), chosen_windows(opened, pipeline, window, since, until)
        context = settings_of(of, settings)

        def write_history(messages: int) -> None:
            chosen = for_history(selected, windows)
            record(opened, of.name, "failures retry", why, messages=messages, set=sorted(context), **chosen)

        launch = Launch(of, f"{pipeline}_retry", dry_run=dry_run, wait=wait, as_json=as_json)
        launched = retry_all(
            opened, launch, Selection(**selected), windows or (), write_history, context, ignore_pause=ignore_pause
        )
    launch.report(launched)


@app.command()
def close(
    pipeline: Name,
    why: Annotated[str, typer.Option(help="Reason, shown by `failures show` and `trace`.", prompt=True)],
    by: Annotated[str, typer.Option(help="Name of the person. Default: the user of this machine.")] = "",
    message_id: Id = None,
    source: SourceName = None,
    window: Windows = None,
    state: Chosen = None,
    kind: Kind = None,
    reason: Reason = None,
    cause: Cause = None,
    since: Since = None,
    until: Until = None,
    every: Every = False,
    dry_run: CountOnly = False,
    as_json: Json = False,
) -> None:
    """Close failures that need no retry. `failures reopen` reverses it."""
    selected = selected_by(message_id, source, window or since or until, state, kind, reason, cause, every=every)
    with loading.opened() as opened:
        window = chosen_windows(opened, pipeline, window, since, until)
        failed = failed_messages(opened, pipeline, window, due_by=datetime.now(UTC), **selected)
        count = failed.backlog().messages or 0
        if dry_run:
            _report("would close", count, dry_run=True, as_json=as_json)
            return
        with _progress("Closing", count) as shown:
            closed = closing.close(Tables(opened.lake, opened.pipeline(pipeline)), failed, by or user(), why, shown)
        record(opened, pipeline, "failures close", why, by=by, messages=closed, **for_history(selected, window))
    _report("Closed", closed, as_json=as_json)


@app.command()
def reopen(
    pipeline: Name,
    message_id: Id = None,
    source: SourceName = None,
    window: Windows = None,
    kind: Kind = None,
    reason: Reason = None,
    cause: Cause = None,
    every: Annotated[bool, typer.Option("--all", help="All manually closed failures.")] = False,
    why: Why = "",
    dry_run: CountOnly = False,
    as_json: Json = False,
) -> None:
    """Reopen failures that were closed with `failures close`. Failures that a retry ended stay closed."""
    selected = selected_by(message_id, source, window, None, kind, reason, cause, every=every)
    with loading.opened() as opened:
        failed = failed_messages(opened, pipeline, window, **selected)
        count = sum(closed.count() for _, closed in closing.closed_manually(failed))
        if dry_run:
            _report("would reopen", count, dry_run=True, as_json=as_json)
            return
        with _progress("Reopening", count) as shown:
            opened_again = closing.reopen(Tables(opened.lake, opened.pipeline(pipeline)), failed, shown)
        record(opened, pipeline, "failures reopen", why, messages=opened_again, **for_history(selected, window))
    _report("Reopened", opened_again, as_json=as_json)


def _report(verb: str, failures: int, *, as_json: bool, dry_run: bool = False) -> None:
    if as_json:
        print_json(ChangedOutput(failures=failures, dry_run=dry_run))
    else:
        say(f"{verb} {counted(failures, 'failure')}.")


@contextmanager
def _progress(verb: str, count: int) -> Iterator[closing.Progress]:
    """Print the number of failures, and yield a function that shows progress."""
    say(f"{verb} {counted(count, 'failure')}.", err=True)
    with progress(count) as show_progress:
        yield lambda done: show_progress(done, f"{done:,} of {count:,}")
