"""`pipeline-platform history`: acts of operators, recorded by the commands that change a pipeline."""

import json
import os
import socket
import textwrap
from datetime import UTC, datetime
from getpass import getuser
from typing import Annotated, Any

import typer
from pydantic import Field

from pipeline_platform.cli import loading
from pipeline_platform.cli.options import Json, OptionalName
from pipeline_platform.cli.output import Output, Time, print_json
from pipeline_platform.cli.terminal import say
from pipeline_platform.cli.time_range import FORM, time_of
from pipeline_platform.control.history import Act

_WIDTH = 80
_LISTED = 6
"""Maximum number of values of an option, such as windows, that are recorded one by one."""
Why = Annotated[str, typer.Option(help="Reason, shown by `history`.", show_default=False)]


class RecordedAct(Output):
    """An act of an operator."""

    at: Time = Field(description="Time of the act.")
    key: str = Field(description="The pipeline, or `<pipeline>/<producer>`.")
    name: str = Field(description="Name of the command, such as `pause`.")
    who: str = Field(description="User and host of the command line, or the run in Dagster.")
    reason: str = Field(description="Reason that the operator gave; may be empty.")
    options: dict[str, Any] = Field(description="Options that were set, and counts.")


class HistoryOutput(Output):
    """Output of `history`."""

    acts: list[RecordedAct] = Field(description="Acts, oldest first.")


def history(
    pipeline: OptionalName = None,
    since: Annotated[str | None, typer.Option(help=f"Acts since then: {FORM}.")] = None,
    as_json: Json = False,
) -> None:
    """Show who paused, limited, retried, erased or otherwise changed a pipeline, when and why, newest act last."""
    start = None if since is None else time_of(since, "--since", datetime.now(UTC))
    with loading.opened() as opened:
        acts = opened.control.acts(pipeline, start)
        if pipeline is not None and not acts:  # a pipeline that was removed still has acts
            opened.pipeline(pipeline)
    if as_json:
        print_json(HistoryOutput(acts=[RecordedAct(**act._asdict()) for act in acts]))
        return
    for act in acts:
        say(*_lines(act))
    say(f"{loading.counted(len(acts), 'act')}.")


def _lines(act: Act) -> list[str]:
    options = ", ".join(f"{name} {_value(value)}" for name, value in act.options.items())
    parts = {
        "": f"{act.at:%Y-%m-%d %H:%M:%S} {act.key}: {act.name} by {act.who}",
        "  ": options,
        "  reason: ": act.reason,
    }
    return [
        line
        for begin, part in parts.items()
        if part.strip()
        for line in textwrap.wrap(part, _WIDTH, initial_indent=begin, subsequent_indent="    ")
    ]


def _value(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


def record(opened: loading.Deployment, key: str, name: str, reason: str = "", *, by: str = "", **options: Any) -> None:
    """Record an act of the user of this machine, or of the person `by`."""
    given = {option: _short(value) if isinstance(value, list) else value for option, value in options.items()}
    opened.control.record_act(key, name, f"{by or user()}@{socket.gethostname()}", reason, **given)


def _short(values: list[Any]) -> list[Any] | str:
    return values if len(values) <= _LISTED else f"{len(values)} from {values[0]} to {values[-1]}"


def user() -> str:
    """Return the user of this machine; the number of a user without a name, as in some containers."""
    try:
        return getuser()
    except (KeyError, OSError):
        return str(os.getuid())
