"""`pipeline-platform failures`: list, show, retry, close and reopen failures."""

import json
import shlex
from codecs import getincrementaldecoder
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline_platform.cli import loading
from pipeline_platform.cli.history_command import Why, record, user
from pipeline_platform.cli.launch import plan_retries
from pipeline_platform.cli.loading import counted
from pipeline_platform.cli.planned_runs import DryRun, Wait, carry_out, windows_text
from pipeline_platform.cli.terminal import plain, say
from pipeline_platform.cli.time_range import Since, Until, windows_between
from pipeline_platform.lake import closing
from pipeline_platform.lake.failed import FailedMessages
from pipeline_platform.lake.failure_events import Selection, State
from pipeline_platform.lake.inspection import grouped, history, state_of_failure
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.windows import expect_window

app = typer.Typer(help="List, show, retry, close and reopen failures.", no_args_is_help=True)

_PAYLOAD = 4_000
"""Bytes of a payload to show."""
_REASON = 300


def _expected(windows: list[str] | None) -> list[str] | None:
    for window in windows or ():
        try:
            expect_window(window)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return windows


Name = Annotated[str, typer.Argument(help="Name of the pipeline.")]
Windows = Annotated[
    list[str] | None,
    typer.Option("--window", help="Only failures of this window. Repeat the option for more.", callback=_expected),
]
_Kind = Annotated[str | None, typer.Option(help="Only failures of this kind: the name of an exception, or `failed`.")]
Reason = Annotated[str | None, typer.Option(help="Only failures whose reason contains this text.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_(
    pipeline: Name,
    window: Windows = None,
    state: Annotated[Literal[State, "closed"], typer.Option(help="Only failures in this state.")] = "open",
    kind: _Kind = None,
    reason: Reason = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of groups to show.")] = 50,
    as_json: Json = False,
) -> None:
    """Count failures by window, state, kind and reason, with some message ids of each group."""
    now, closed = datetime.now(UTC), state == "closed"
    if closed and (kind or reason):
        message = "closed failures have no kind or reason. Choose them by --window."
        raise typer.BadParameter(message, param_hint="--state")
    chosen = "open" if closed else state
    with loading.opened() as opened:
        window = _windows(opened, pipeline, window, since, until)
        failed = _failed(opened, pipeline, window, state=chosen, kind=kind, reason=reason, due_by=now)
        groups = grouped(failed, now, closed=closed)
    if as_json:
        typer.echo(json.dumps([group._asdict() for group in groups], default=str))
        return
    table = Table(box=None)
    for column in ("window", "state", "messages", "kind", "reason", "ids"):
        table.add_column(column, no_wrap=column in ("window", "ids"), overflow="fold")  # so that they can be copied
    for group in groups[:limit]:
        due = f" {group.due_at:%Y-%m-%d %H:%M:%S}" if group.state == "waiting" and group.due_at else ""
        ids = "\n".join([*group.ids[:3], *(["..."] if group.messages > 3 else [])])
        cells = (group.window, f"{group.state}{due}", f"{group.messages:,}", group.kind, group.reason[:_REASON], ids)
        table.add_row(*(Text(plain(cell)) for cell in cells))
    if groups:
        Console().print(table)
    total = sum(group.messages for group in groups)
    say(f"{counted(total, 'failure')} {'is' if total == 1 else 'are'} {state}.")
    if len(groups) > limit:
        say(f"{counted(len(groups) - limit, 'more group')} not shown. Use --limit or --json.")


@app.command()
def show(
    pipeline: Name,
    message_id: Annotated[str, typer.Argument(help="Id of the message.")],
    window: Windows = None,
    as_json: Json = False,
) -> None:
    """Show a failed message: its failures, original payload, metadata and traceback."""
    with loading.opened() as opened:
        events = history(_failed(opened, pipeline, window), message_id)
    if not events:
        raise typer.BadParameter(f"{pipeline} has no failure of message {message_id!r}.", param_hint="MESSAGE_ID")
    if as_json:
        typer.echo(json.dumps([{**event, "data": _payload(event["data"])} for event in events], default=str))
        return
    for source in dict.fromkeys(event["source"] for event in events):
        mine = [event for event in events if event["source"] == source]
        failures = [event for event in mine if event["state"] != "closed"]
        state = state_of_failure(mine[-1], datetime.now(UTC))
        say(f"Message {message_id} of {source}, window {mine[-1]['window']}: {state}")
        for event in mine:
            say(f"  {happened(event)}")
        if failures:
            _say_payload(failures[-1])
    say(f"For its full history: pipeline-platform trace {pipeline} {shlex.quote(message_id)}")


def happened(event: dict[str, Any]) -> str:
    """Return an event of a failure as a line."""
    text = f"{event['at']:%Y-%m-%d %H:%M:%S} attempt {event['attempt']}: {event['state']}"
    if event["state"] != "closed":
        text += f" in {event['stage']}, {event['kind']}: {event['reason']}"
    elif event["reason"]:
        text = f"{text.removesuffix('closed')}{event['kind']} by {event['reason']}"
    due = f" (due {event['due_at']:%Y-%m-%d %H:%M:%S})" if event["due_at"] else ""
    return f"{text}{due}; receive {event['receive_id']}"


def _say_payload(event: dict[str, Any]) -> None:
    shown = _payload(event["data"])
    say(f"Metadata: {event['metadata'] or 'none'}")
    cut = f", first {_PAYLOAD:,} bytes" if shown["bytes"] > _PAYLOAD else ""
    name = "text" if "text" in shown else "hex"
    say(f"Payload ({counted(shown['bytes'], 'byte')}{cut}), as {name}:\n{shown[name]}")
    if event["traceback"]:
        say(event["traceback"].rstrip())


Id = Annotated[str | None, typer.Option("--id", help="Only failures of the message with this id.")]
SourceName = Annotated[str | None, typer.Option(help="Only failures from this source. Ids are unique per source.")]
Every = Annotated[bool, typer.Option("--all", help="All open failures, including dead failures.")]
Chosen = Annotated[State | None, typer.Option(help="Only failures in this state.")]


@app.command()
def retry(
    pipeline: Name,
    message_id: Id = None,
    source: SourceName = None,
    window: Windows = None,
    state: Chosen = None,
    kind: _Kind = None,
    reason: Reason = None,
    since: Since = None,
    until: Until = None,
    every: Every = False,
    why: Why = "",
    dry_run: DryRun = False,
    wait: Wait = False,
) -> None:
    """Launch runs that retry failures, on the instance in DAGSTER_HOME: one run per contiguous range of windows."""
    selected = _selected(message_id, source, window or since or until, state, kind, reason, every=every)
    chosen = Selection(**selected)
    with loading.opened() as opened:
        say(f"Looking for failures of {pipeline} in {opened.lake.root}.", err=True)
        of, windows = opened.pipeline(pipeline), _windows(opened, pipeline, window, since, until)
        runs = plan_retries(opened, of, chosen, windows or ())
        if not runs:
            say("No matching failures; nothing launched.")
            return
        if not dry_run:
            messages = sum(run.messages for run in runs)
            record(opened, of.name, "failures retry", why, messages=messages, **_options(selected, windows))
        carry_out(
            of,
            f"{of.name}_retry",
            runs,
            lambda run: f"retries {counted(run.messages, 'failure')} of {windows_text(run.windows)}",
            "failure",
            dry_run=dry_run,
            wait=wait,
        )


@app.command()
def close(
    pipeline: Name,
    why: Annotated[str, typer.Option(help="Reason, shown by `failures show` and `trace`.", prompt=True)],
    by: Annotated[str, typer.Option(help="Name of the person. Default: the user of this machine.")] = "",
    message_id: Id = None,
    source: SourceName = None,
    window: Windows = None,
    state: Chosen = None,
    kind: _Kind = None,
    reason: Reason = None,
    since: Since = None,
    until: Until = None,
    every: Every = False,
) -> None:
    """Close failures that need no retry. `failures reopen` reverses it."""
    selected = _selected(message_id, source, window or since or until, state, kind, reason, every=every)
    with loading.opened() as opened:
        window = _windows(opened, pipeline, window, since, until)
        failed = _failed(opened, pipeline, window, due_by=datetime.now(UTC), **selected)
        closed = closing.close(Tables(opened.lake, opened.pipeline(pipeline)), failed, by or user(), why)
        record(opened, pipeline, "failures close", why, by=by, messages=closed, **_options(selected, window))
    say(f"Closed {counted(closed, 'failure')}.")


@app.command()
def reopen(
    pipeline: Name,
    message_id: Id = None,
    source: SourceName = None,
    window: Windows = None,
    every: Annotated[bool, typer.Option("--all", help="All manually closed failures.")] = False,
    why: Why = "",
) -> None:
    """Reopen failures that were closed with `failures close`. Failures that a retry ended stay closed."""
    selected = _selected(message_id, source, window, every=every)
    with loading.opened() as opened:
        failed = _failed(opened, pipeline, window, **selected)
        opened_again = closing.reopen(Tables(opened.lake, opened.pipeline(pipeline)), failed)
        record(opened, pipeline, "failures reopen", why, messages=opened_again, **_options(selected, window))
    say(f"Reopened {counted(opened_again, 'failure')}.")


def _selected(
    message_id: str | None,
    source: str | None,
    window: list[str] | str | None,
    state: State | None = None,
    kind: str | None = None,
    reason: str | None = None,
    *,
    every: bool,
) -> dict[str, Any]:
    """Return the criteria of options. At least one is required, or `--all` alone."""
    criteria = {"message_id": message_id, "source": source, "kind": kind, "reason": reason}
    if every == any(value is not None for value in (*criteria.values(), window, state)):
        raise typer.BadParameter("Choose failures by --id, --source, --window, ... (see --help), or use --all alone.")
    return {**criteria, "state": state or "open"}


def _options(selected: dict[str, Any], windows: list[str] | None) -> dict[str, Any]:
    """Return the criteria for the history, without the text of `--reason`, which may quote payloads."""
    shown = {name: value for name, value in selected.items() if name != "reason"}
    return {**shown, "by_reason": selected["reason"] is not None, "windows": windows}


def _windows(
    opened: loading.Deployment, pipeline: str, window: list[str] | None, since: str | None, until: str | None
) -> list[str] | None:
    """Return the windows that options choose; None for all."""
    of_range = windows_between(opened.pipeline(pipeline), since, until)
    if of_range is None:
        return window
    if window:
        raise typer.BadParameter("Choose windows with either --window or --since.", param_hint="--window")
    return of_range


def _failed(opened: loading.Deployment, pipeline: str, windows: list[str] | None, **selection: Any) -> FailedMessages:
    name = opened.pipeline(pipeline).name
    chosen = Selection(**selection)
    return FailedMessages(
        name=name, lake=opened.lake, pipeline=name, windows=tuple(windows) if windows else None, selection=chosen
    )


def _payload(data: bytes | None) -> dict[str, Any]:
    """Return the first bytes of a payload as text if they are UTF-8, otherwise as hexadecimal digits."""
    whole = data or b""
    some = whole[:_PAYLOAD]
    try:
        # The first bytes may end within a character.
        return {"bytes": len(whole), "text": getincrementaldecoder("utf-8")().decode(some, len(some) == len(whole))}
    except UnicodeDecodeError:
        return {"bytes": len(whole), "hex": some.hex()}
