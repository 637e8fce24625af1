"""`pipeline-platform repair`: tables with files that nobody can read."""

import json
from typing import Annotated

import typer

from pipeline_platform.cli import loading
from pipeline_platform.cli.failure_commands import Json, Name
from pipeline_platform.cli.terminal import say
from pipeline_platform.lake.repair import repair as repair_tables
from pipeline_platform.lake.repair import unreadable
from pipeline_platform.lake.tables import Tables

_APPLY = "Take the files out, and record anew what became of their messages; else they are only named."


def repair(
    pipeline: Name, apply: Annotated[bool, typer.Option("--apply", help=_APPLY)] = False, as_json: Json = False
) -> None:
    """Find files of a pipeline's tables that lack the end or the length that the table's log names."""
    with loading.opened() as opened:
        tables = Tables(opened.lake, opened.pipeline(pipeline))
        broken = unreadable(tables)
        if as_json:
            again = repair_tables(tables) if broken and apply else 0
            files = [file._asdict() for file in broken]
            typer.echo(json.dumps({"unreadable": files, "taken_out": apply, "open_again": again}, default=str))
            return
        for file in broken:
            say(f"{pipeline}/{file.table}: {file.path} cannot be read ({file.rows:,} rows).")
        if not broken:
            say(f"Every file of {pipeline} has its end and its length.")
        elif not apply:
            say("Take them out with --apply, while no run of the pipeline is under way.")
        else:
            again = repair_tables(tables)
            windows = ", ".join(sorted({file.window for file in broken}))
            say(f"They are out of their tables. {again:,} messages are open failures now: backfill {windows}.")
            say(f"Rows that are missing besides come back by a replay of {windows}.")
