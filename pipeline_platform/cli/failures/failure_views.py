"""`pipeline-platform failures list` and `show`: causes of failures, and the history of a failed message."""

import shlex
from codecs import getincrementaldecoder
from collections.abc import Mapping
from datetime import UTC, datetime
from shutil import get_terminal_size
from textwrap import wrap
from typing import Annotated, Any, Literal

import typer
from pydantic import Field

from pipeline_platform.cli import loading
from pipeline_platform.cli.failures.failure_selection import (
    Cause,
    Kind,
    Reason,
    Windows,
    chosen_windows,
    failed_messages,
)
from pipeline_platform.cli.loading import counted
from pipeline_platform.cli.options import Json, Name
from pipeline_platform.cli.output import Output, Time, print_json
from pipeline_platform.cli.terminal import plain, say
from pipeline_platform.cli.time_range import Since, Until
from pipeline_platform.cli.waiting import waiting
from pipeline_platform.lake.failures.failure_events import State
from pipeline_platform.lake.failures.inspection import Group, grouped, history, state_of_failure

_PAYLOAD = 4_000
"""Bytes of a payload to show."""
_REASON = 300


class FailureCause(Output):
    """Failures with the same state, kind and cause."""

    messages: int = Field(description="Number of failures.")
    state: Literal["waiting", "due", "dead", "closed"] = Field(description="State of the failures.")
    kind: str = Field(description="Kind of the latest failure of each message; may be empty for closed failures.")
    cause: str = Field(description="Reason, with `*` for numbers, ids and quoted values if they differ.")
    first: Time = Field(description="Time of the first failure, by the latest failure of each message.")
    last: Time = Field(description="Time of the last failure.")
    first_window: str = Field(description="Oldest window.")
    last_window: str = Field(description="Newest window.")
    due_at: Time | None = Field(description="Time of the first automatic retry. Null without one.")
    example: str = Field(description="Id of a message.")


class FailureListOutput(Output):
    """Output of `failures list`, with all causes: `--limit` applies to text only."""

    messages: int = Field(description="Number of failures.")
    causes: list[FailureCause] = Field(description="The most frequent cause first. At most 10,000.")


class ShownPayload(Output):
    """The start of a payload: `text` if it is UTF-8, else `hex`."""

    bytes: int = Field(description="Size of the whole payload.")
    text: str | None = Field(None, description="Its first 4,000 bytes.")
    hex: str | None = Field(None, description="Its first 4,000 bytes, as hexadecimal digits.")


class FailureEvent(Output):
    """An event of a failed message."""

    window: str = Field(description="Window of the message.")
    source: str = Field(description="Name of the source.")
    message_id: str = Field(description="Id of the message.")
    attempt: int = Field(description="1 for the first delivery, and one more for each retry.")
    state: Literal["open", "dead", "closed"] = Field(description="State after the event.")
    due_at: Time | None = Field(description="Time of the automatic retry. Null without one.")
    stage: str | None = Field(description="Stage that failed, such as `handle`.")
    kind: str | None = Field(description="Kind of the failure.")
    reason: str | None = Field(description="Reason of the failure. For `closed`: who closed it, and why.")
    traceback: str | None = Field(description="Traceback of an exception.")
    batcher: str | None = Field(description="Batcher, if the batch failed.")
    batch_key: str | None = Field(description="Key of the batch.")
    data: ShownPayload = Field(description="The payload as it was delivered.")
    metadata: str | None = Field(description="Metadata of the message.")
    at: Time = Field(description="Time of the event.")
    receive_id: str = Field(description="Receive of the event.")


class FailureShowOutput(Output):
    """Output of `failures show`."""

    events: list[FailureEvent] = Field(description="Failures of the message and their ends, in order, by source.")


def list_(
    pipeline: Name,
    window: Windows = None,
    state: Annotated[Literal[State, "closed"], typer.Option(help="Only failures in this state.")] = "open",
    kind: Kind = None,
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
        window = chosen_windows(opened, pipeline, window, since, until)
        failed = failed_messages(
            opened, pipeline, window, state=chosen, kind=kind, reason=reason, cause=cause, due_by=now
        )
        with waiting("the lake"):
            groups, total = grouped(failed, now, closed=closed)
    if as_json:
        causes = [FailureCause(**group._asdict()) for group in groups]
        print_json(FailureListOutput(messages=total, causes=causes))
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
    cause = cause if group.kind or group.cause else "a later attempt succeeded"
    say(*wrap(f"{group.messages:>9,}  {cause}", width, subsequent_indent=margin))
    due = f" from {group.due_at:%Y-%m-%d %H:%M:%S}" if group.state == "waiting" and group.due_at else ""
    lines = [f"{margin}{group.state}{due}"]
    for detail in (_period(group.first, group.last), f"id {group.example}"):
        if len(lines[-1]) + 2 + len(detail) <= width:
            lines[-1] += f"; {detail}"
        else:
            lines.append(f"{margin}{detail}")
    say(*lines)


def _period(first: datetime, last: datetime) -> str:
    """Return two times to the minute; the date of the second only if it differs."""
    if f"{first:%Y-%m-%d %H:%M}" == f"{last:%Y-%m-%d %H:%M}":
        return f"{first:%Y-%m-%d %H:%M}"
    return f"{first:%Y-%m-%d %H:%M} to {last:{'%H:%M' if first.date() == last.date() else '%Y-%m-%d %H:%M'}}"


def show(
    pipeline: Name,
    message_id: Annotated[str, typer.Argument(help="Id of the message.")],
    window: Windows = None,
    as_json: Json = False,
) -> None:
    """Show a failed message: its failures, original payload, metadata and traceback."""
    with loading.opened() as opened:
        events = history(failed_messages(opened, pipeline, window), message_id)
    if not events:
        raise typer.BadParameter(f"{pipeline} has no failure of message {message_id!r}.", param_hint="MESSAGE_ID")
    if as_json:
        shown = [FailureEvent(**{**event, "data": _payload(event["data"])}) for event in events]
        print_json(FailureShowOutput(events=shown))
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


def happened(event: Mapping[str, Any]) -> str:
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
    cut = f", first {_PAYLOAD:,} bytes" if shown.bytes > _PAYLOAD else ""
    name, text = ("text", shown.text or "") if shown.hex is None else ("hex", shown.hex)
    say(f"Payload ({counted(shown.bytes, 'byte')}{cut}), as {name}:", *text.split("\n"))
    if event["traceback"]:
        say(*event["traceback"].rstrip().split("\n"))


def _payload(data: bytes | None) -> ShownPayload:
    """Return the first bytes of a payload as text if they are UTF-8, otherwise as hexadecimal digits."""
    whole = data or b""
    some = whole[:_PAYLOAD]
    try:
        # The first bytes may end within a character.
        text = getincrementaldecoder("utf-8")().decode(some, len(some) == len(whole))
    except UnicodeDecodeError:
        return ShownPayload(bytes=len(whole), hex=some.hex())
    return ShownPayload(bytes=len(whole), text=text)
