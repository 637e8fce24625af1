"""`pipeline-platform failures`: list, show, retry, close and reopen failures."""

import json
import shlex
import time
from codecs import getincrementaldecoder
from datetime import UTC, datetime
from shutil import get_terminal_size
from textwrap import wrap
from typing import Annotated, Any, Literal

import typer

from pipeline_platform.cli import loading
from pipeline_platform.cli.history_command import Why, record, user
from pipeline_platform.cli.launch import retry_all
from pipeline_platform.cli.loading import counted
from pipeline_platform.cli.planned_runs import DryRun, Wait
from pipeline_platform.cli.terminal import plain, say
from pipeline_platform.cli.time_range import Since, Until, windows_between
from pipeline_platform.lake import closing
from pipeline_platform.lake.failed import FailedMessages
from pipeline_platform.lake.failure_events import Selection, State
from pipeline_platform.lake.inspection import Group, grouped, history, state_of_failure
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
Cause = Annotated[
    str | None,
    typer.Option(help="Only failures with this cause, as `list` shows it, or with the cause of this reason."),
]
Reason = Annotated[str | None, typer.Option(help="Only failures whose reason contains this text.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_(
    pipeline: Name,
    window: Windows = None,
    state: Annotated[Literal[State, "closed"], typer.Option(help="Only failures in this state.")] = "open",
    kind: _Kind = None,
    reason: Reason = None,
    cause: Cause = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of causes to show.")] = 20,
    as_json: Json = False,
) -> None:
    """Show the causes of failures, the most frequent first: count, state, first and last time, and an example id."""
    now, closed = datetime.now(UTC), state == "closed"
    if closed and (kind or reason or cause):
        message = "must not be closed with --kind, --reason or --cause. Remove them, and select by --window."
        raise typer.BadParameter(message, param_hint="--state")
    chosen = "open" if closed else state
    with loading.opened() as opened:
        window = _windows(opened, pipeline, window, since, until)
        failed = _failed(opened, pipeline, window, state=chosen, kind=kind, reason=reason, cause=cause, due_by=now)
        groups, total = grouped(failed, now, closed=closed)
    if as_json:
        typer.echo(json.dumps([group._asdict() for group in groups], default=str))
        return
    for group in groups[:limit]:
        _say_group(group)
    say(f"{counted(total, 'failure')} {'is' if total == 1 else 'are'} {state}.")
    if hidden := total - sum(group.messages for group in groups[:limit]):
        say(f"{counted(hidden, 'failure')} with other causes not shown. Use --limit or --json.")


def _say_group(group: Group) -> None:
    """Print the count and the cause of a group; below, its state, its times and an example id, each as a whole."""
    width, margin = get_terminal_size().columns, " " * 11
    cause = " ".join(plain(f"{group.kind}: {group.cause[:_REASON]}").split())
    say("\n".join(wrap(f"{group.messages:>9,}  {cause}", width, subsequent_indent=margin)))
    due = f" from {group.due_at:%Y-%m-%d %H:%M:%S}" if group.state == "waiting" and group.due_at else ""
    lines = [f"{margin}{group.state}{due}"]
    for detail in (_period(group.first, group.last), f"id {group.example}"):
        if len(lines[-1]) + 2 + len(detail) <= width:
            lines[-1] += f"; {detail}"
        else:
            lines.append(f"{margin}{detail}")
    say("\n".join(lines))


def _period(first: datetime, last: datetime) -> str:
    """Return two times to the minute; the date of the second only if it differs."""
    if f"{first:%Y-%m-%d %H:%M}" == f"{last:%Y-%m-%d %H:%M}":
        return f"{first:%Y-%m-%d %H:%M}"
    return f"{first:%Y-%m-%d %H:%M} to {last:{'%H:%M' if first.date() == last.date() else '%Y-%m-%d %H:%M'}}"


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
CountOnly = Annotated[bool, typer.Option("--dry-run", help="Print the number of failures, and change nothing.")]


@app.command()
def retry(
    pipeline: Name,
    message_id: Id = None,
    source: SourceName = None,
    window: Windows = None,
    state: Chosen = None,
    kind: _Kind = None,
    reason: Reason = None,
    cause: Cause = None,
    since: Since = None,
    until: Until = None,
    every: Every = False,
    why: Why = "",
    dry_run: DryRun = False,
    wait: Wait = False,
) -> None:
    """Launch runs that retry failures, on the instance in DAGSTER_HOME: one run per contiguous range of windows.

    If there are more failures than the pipeline may have in flight, wait for these runs, and launch the next.
    """
    selected = _selected(message_id, source, window or since or until, state, kind, reason, cause, every=every)
    with loading.opened() as opened:
        say(f"Looking for failures of {pipeline} in {opened.lake.root}.", err=True)
        of, windows = opened.pipeline(pipeline), _windows(opened, pipeline, window, since, until)

        def write_history(messages: int) -> None:
            record(opened, of.name, "failures retry", why, messages=messages, **_options(selected, windows))

        retry_all(opened, of, Selection(**selected), windows or (), write_history, dry_run=dry_run, wait=wait)


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
    cause: Cause = None,
    since: Since = None,
    until: Until = None,
    every: Every = False,
    dry_run: CountOnly = False,
) -> None:
    """Close failures that need no retry. `failures reopen` reverses it."""
    selected = _selected(message_id, source, window or since or until, state, kind, reason, cause, every=every)
    with loading.opened() as opened:
        window = _windows(opened, pipeline, window, since, until)
        failed = _failed(opened, pipeline, window, due_by=datetime.now(UTC), **selected)
        count = failed.backlog().messages or 0
        if dry_run:
            say(f"would close {counted(count, 'failure')}")
            return
        progress = _progress("Closing", count)
        closed = closing.close(Tables(opened.lake, opened.pipeline(pipeline)), failed, by or user(), why, progress)
        record(opened, pipeline, "failures close", why, by=by, messages=closed, **_options(selected, window))
    say(f"Closed {counted(closed, 'failure')}.")


@app.command()
def reopen(
    pipeline: Name,
    message_id: Id = None,
    source: SourceName = None,
    window: Windows = None,
    kind: _Kind = None,
    reason: Reason = None,
    cause: Cause = None,
    every: Annotated[bool, typer.Option("--all", help="All manually closed failures.")] = False,
    why: Why = "",
    dry_run: CountOnly = False,
) -> None:
    """Reopen failures that were closed with `failures close`. Failures that a retry ended stay closed."""
    selected = _selected(message_id, source, window, None, kind, reason, cause, every=every)
    with loading.opened() as opened:
        failed = _failed(opened, pipeline, window, **selected)
        count = sum(closed.count() for _, closed in closing.closed_manually(failed))
        if dry_run:
            say(f"would reopen {counted(count, 'failure')}")
            return
        progress = _progress("Reopening", count)
        opened_again = closing.reopen(Tables(opened.lake, opened.pipeline(pipeline)), failed, progress)
        record(opened, pipeline, "failures reopen", why, messages=opened_again, **_options(selected, window))
    say(f"Reopened {counted(opened_again, 'failure')}.")


def _progress(verb: str, count: int) -> closing.Progress:
    """Print the number of failures, and return a function that prints progress every second."""
    say(f"{verb} {counted(count, 'failure')}.", err=True)
    last = time.monotonic()

    def show_progress(done: int) -> None:
        nonlocal last
        if (now := time.monotonic()) >= last + 1:
            last = now
            say(f"{done:,} of {count:,}", err=True)

    return show_progress


def _selected(
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


def _options(selected: dict[str, Any], windows: list[str] | None) -> dict[str, Any]:
    """Return the criteria for the history, without the texts of `--reason` and `--cause`, which may quote payloads."""
    shown = {name: value for name, value in selected.items() if name not in ("reason", "cause")}
    return {**shown, "by_reason": bool(selected["reason"] or selected["cause"]), "windows": windows}


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
