"""`pipeline-platform replay`: all messages of some windows, handled again by runs that replace their rows."""

from typing import Annotated, Any

import typer

from pipeline_platform.cli import loading
from pipeline_platform.cli.history_command import Why, record
from pipeline_platform.cli.loading import counted
from pipeline_platform.cli.options import Json, Name
from pipeline_platform.cli.runs.context_settings import Settings, settings_of
from pipeline_platform.cli.runs.planned_runs import (
    DryRun,
    IgnorePause,
    Launch,
    Launched,
    PlannedRun,
    Wait,
    refuse_paused,
    windows_text,
)
from pipeline_platform.cli.terminal import say
from pipeline_platform.cli.time_range import Since, Until, windows_between
from pipeline_platform.cli.waiting import waiting
from pipeline_platform.control.quota import Quota
from pipeline_platform.lake.replay import ReplayedWindow, decided_messages, preview
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline

_Windows = Annotated[list[str] | None, typer.Option("--window", help="Replay this window; repeat it for others.")]


def replay(
    pipeline: Name,
    window: _Windows = None,
    since: Since = None,
    until: Until = None,
    ignore_pause: IgnorePause = False,
    settings: Settings = None,
    reason: Why = "",
    dry_run: DryRun = False,
    wait: Wait = False,
    as_json: Json = False,
) -> None:
    """Launch runs that handle all messages of windows again, on the instance in DAGSTER_HOME.

    The new rows replace the rows of these windows in every table, and their failures. One run is launched for each
    contiguous range of windows that have messages. Check the effect with --dry-run first.
    """
    if (window is None) == (since is None and until is None):
        raise typer.BadParameter("Choose windows with either --window or --since.", param_hint="--window")
    with loading.opened() as opened:
        of = opened.pipeline(pipeline)
        context = settings_of(of, settings)
        windows = windows_between(of, since, until) or window or []
        _check_known(of, windows)
        refuse_paused(opened.control, BoundProducer(of), ignore_pause=ignore_pause)
        say(f"Counting messages of {counted(len(windows), 'window')} in {opened.lake.root}.", err=True)
        tables = Tables(opened.lake, of)
        with waiting("the lake"):
            messages = decided_messages(tables, windows) if tables["outcomes"].exists() else {}
        runs = _runs(opened, of, messages, context, ignore_pause=ignore_pause)
        launch = Launch(of, f"{pipeline}_replay", dry_run=dry_run, wait=wait, as_json=as_json)
        if not runs:
            launch.say("No messages in these windows; nothing launched.")
            launch.report([])
            return
        if dry_run:
            for replayed in preview(tables, messages):
                launch.say(_line(replayed))
        else:
            count = sum(run.messages for run in runs)
            windows = sorted(messages)
            record(opened, of.name, "replay", reason, messages=count, set=sorted(context), windows=windows)
        launched = launch.carry_out(runs, _replays, "message")
    launch.report(launched)


def _check_known(pipeline: type[Pipeline], windows: list[str]) -> None:
    """Refuse keys that are not windows of a pipeline: their messages would be left out silently."""
    from pipeline_platform.orchestration.asset_windows import contiguous

    known = {window for neighbours in contiguous(pipeline, windows) for window in neighbours}
    if unknown := [window for window in windows if window not in known]:
        raise typer.BadParameter(
            f"{', '.join(unknown)}: not a window of {pipeline.name}. Its windows follow {pipeline.window_cron} (UTC).",
            param_hint="--window",
        )


def _runs(
    opened: loading.Deployment,
    pipeline: type[Pipeline],
    messages: dict[str, int],
    context: dict[str, Any],
    *,
    ignore_pause: bool,
) -> list[PlannedRun]:
    from pipeline_platform.orchestration.asset_windows import contiguous
    from pipeline_platform.orchestration.jobs import run_request

    whole = BoundProducer(pipeline)
    capacity, runs = Quota(whole, opened.control).capacity, []
    for windows in contiguous(pipeline, messages):
        count = sum(messages[window] for window in windows)
        expected = min(count, capacity)
        request = run_request(whole, "messages", windows, expected, ignore_pause=ignore_pause, context=context)
        runs.append(PlannedRun(windows, count, request))
    return runs


def _replays(run: PlannedRun | Launched) -> str:
    return f"replays {counted(run.messages, 'message')} of {windows_text(run.windows)}"


def _line(replayed: ReplayedWindow) -> str:
    rows = [f"{counted(count, 'row')} of {table}" for table, count in replayed.rows.items()]
    failures = [counted(replayed.open_failures, "open failure")] if replayed.open_failures else []
    replaced = ", ".join([*rows, *failures]) or "no rows"
    line = f"window {replayed.window}: {counted(replayed.messages, 'message')}; replaces {replaced}"
    if replayed.missing:
        return f"{line}. The raw log lacks {counted(replayed.missing, 'message')}: a replay of this window fails."
    return line
