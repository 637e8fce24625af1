"""`pipeline-platform doctor`: checks of a deployment, with problems and fixes."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline_platform.cli.doctor.check import CheckState, DoctorOutput
from pipeline_platform.cli.doctor.examination import examine
from pipeline_platform.cli.loading import counted
from pipeline_platform.cli.options import Json
from pipeline_platform.cli.output import print_json
from pipeline_platform.cli.terminal import plain, say
from pipeline_platform.cli.waiting import waiting

_STYLES = {CheckState.OK: "green", CheckState.WARNING: "yellow", CheckState.ERROR: "red"}


def doctor(
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1, metavar="SECONDS", help="Longest time of a check.")
    ] = 10,
    as_json: Json = False,
) -> None:
    """Check the deployment, and print each problem with its fix.

    Checks packages, Dagster's storage, daemon, sensors and settings, the code, the control store and its clock, the
    lake, Spark and the sources. It changes nothing. Exits with 1 after a warning, and with 2 after an error.
    """
    with waiting("the checks") as wait:
        found = examine(timeout_s, wait.look)
    if as_json:
        print_json(found)
    else:
        _print(found)
    raise typer.Exit(found.state.exit_code)


def _print(found: DoctorOutput) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for style in ("", "dim", ""):
        table.add_column(style=style, overflow="fold")
    for check in found.checks:
        lines = [check.text, *([f"Fix: {check.fix}."] if check.fix else [])]
        style = _STYLES[check.state]
        shown = Text(plain("\n".join(lines)), style="" if check.state is CheckState.OK else style)
        table.add_row(Text(check.state, style=style), check.name, shown)
    Console().print(table)
    counts = {state: sum(check.state is state for check in found.checks) for state in CheckState}
    bad = [counted(counts[state], state) for state in (CheckState.ERROR, CheckState.WARNING) if counts[state]]
    say(f"{counted(len(found.checks), 'check')}: {', '.join(bad) or 'all ok'}.")
