"""`pipeline-platform repair`: remove truncated files from tables."""

import json
from typing import Annotated

import typer

from pipeline_platform.cli import loading
from pipeline_platform.cli.failure_commands import Json, Name
from pipeline_platform.cli.terminal import say
from pipeline_platform.lake.repair import repair as repair_tables
from pipeline_platform.lake.repair import unreadable
from pipeline_platform.lake.tables import Tables

_APPLY = "Remove the files, and record messages whose outcome is lost as open failures. By default, only list them."


def repair(
    pipeline: Name, apply: Annotated[bool, typer.Option("--apply", help=_APPLY)] = False, as_json: Json = False
) -> None:
    """Find truncated files in a pipeline's tables."""
    with loading.opened() as opened:
        tables = Tables(opened.lake, opened.pipeline(pipeline))
        broken = unreadable(tables)
        if as_json:
            again = repair_tables(tables) if broken and apply else 0
            found = [file._asdict() for file in broken]
            typer.echo(json.dumps({"unreadable": found, "taken_out": apply, "open_again": again}, default=str))
            return
        for file in broken:
            say(f"{pipeline}/{file.table}: {file.path} is unreadable ({loading.counted(file.rows, 'row')}).")
        if not broken:
            say(f"All files of {pipeline} are intact.")
        elif not apply:
            say("Remove them with --apply while the pipeline has no active run.")
        else:
            again = repair_tables(tables)
            windows = ", ".join(sorted({file.window for file in broken}))
            say(f"Removed them from the tables. Recorded {loading.counted(again, 'message')} as open failures.")
            say(f"Retry the failures of {windows}. To restore other missing rows, replay {windows}.")
