"""Options that select failures, and the failures that they select."""

from typing import Annotated, Any

import typer

from pipeline_platform.cli import loading
from pipeline_platform.cli.time_range import windows_between
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.failures.failure_events import Selection, State
from pipeline_platform.model.windows import expect_window

_PANEL = "Selection"


def _expected(windows: list[str] | None) -> list[str] | None:
    for window in windows or ():
        try:
            expect_window(window)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return windows


Windows = Annotated[
    list[str] | None,
    typer.Option(
        "--window",
        help="Only failures of this window. Repeat the option for more.",
        callback=_expected,
        rich_help_panel=_PANEL,
    ),
]
Kind = Annotated[
    str | None,
    typer.Option(help="Only failures of this kind: the name of an exception, or `failed`.", rich_help_panel=_PANEL),
]
Cause = Annotated[
    str | None,
    typer.Option(
        help="Only failures with this cause, as `list` shows it, or with the cause of this reason.",
        rich_help_panel=_PANEL,
    ),
]
Reason = Annotated[
    str | None, typer.Option(help="Only failures whose reason contains this text.", rich_help_panel=_PANEL)
]
Id = Annotated[
    str | None, typer.Option("--id", help="Only failures of the message with this id.", rich_help_panel=_PANEL)
]
SourceName = Annotated[
    str | None, typer.Option(help="Only failures from this source. Ids are unique per source.", rich_help_panel=_PANEL)
]
Every = Annotated[
    bool, typer.Option("--all", help="All open failures, including dead failures.", rich_help_panel=_PANEL)
]
Chosen = Annotated[State | None, typer.Option(help="Only failures in this state.", rich_help_panel=_PANEL)]


def selected_by(
    message_id: str | None,
    source: str | None,
    window: list[str] | str | None,
    state: State | None = None,
    kind: str | None = None,
    reason: str | None = None,
    cause: str | None = None,
    *,
    every: bool,
) -> dict[str, Any]:
    """Return the criteria of options. At least one is required, or `--all` alone."""
    criteria = {"message_id": message_id, "source": source, "kind": kind, "reason": reason, "cause": cause}
    if every == any(value is not None for value in (*criteria.values(), window, state)):
        raise typer.BadParameter("Choose failures by --id, --source, --window, ... (see --help), or use --all alone.")
    return {**criteria, "state": state or "open"}


def for_history(selected: dict[str, Any], windows: list[str] | None) -> dict[str, Any]:
    """Return the criteria for the history, without the texts of `--reason` and `--cause`, which may quote payloads."""
    shown = {name: value for name, value in selected.items() if name not in ("reason", "cause")}
    return {**shown, "by_reason": bool(selected["reason"] or selected["cause"]), "windows": windows}


def chosen_windows(
    opened: loading.Deployment, pipeline: str, window: list[str] | None, since: str | None, until: str | None
) -> list[str] | None:
    """Return the windows that options choose; None for all."""
    of_range = windows_between(opened.pipeline(pipeline), since, until)
    if of_range is None:
        return window
    if window:
        raise typer.BadParameter("Choose windows with either --window or --since.", param_hint="--window")
    return of_range


def failed_messages(
    opened: loading.Deployment, pipeline: str, windows: list[str] | None, **selection: Any
) -> FailedMessages:
    """Return the failures of a pipeline that criteria select; in all windows without `windows`."""
    name = opened.pipeline(pipeline).name
    chosen = Selection(**selection)
    return FailedMessages(
        name=name, lake=opened.lake, pipeline=name, windows=tuple(windows) if windows else None, selection=chosen
    )
