"""`pipeline-platform repair`: remove truncated files from tables."""

from typing import Annotated

import typer
from pydantic import Field

from pipeline_platform.cli import loading
from pipeline_platform.cli.options import Json, Name
from pipeline_platform.cli.output import Output, print_json
from pipeline_platform.cli.terminal import say
from pipeline_platform.cli.waiting import waiting
from pipeline_platform.lake.maintenance.repair import repair as repair_tables
from pipeline_platform.lake.maintenance.repair import unreadable
from pipeline_platform.lake.tables import Tables

_APPLY = "Remove the files, and record messages whose outcome is lost as open failures. By default, only list them."


class UnreadableFile(Output):
    """A truncated file."""

    table: str = Field(description="Name of the table.")
    path: str = Field(description="Path of the file under the table.")
    window: str = Field(description="Window of its rows.")
    rows: int = Field(description="Number of its rows, by the log of the table.")


class RepairOutput(Output):
    """Output of `repair`."""

    unreadable: list[UnreadableFile] = Field(description="Truncated files.")
    is_removed: bool = Field(description="Whether the files were removed from their tables (`--apply`).")
    recorded_failures: int = Field(description="Messages with a lost outcome that were recorded as open failures.")


def repair(
    pipeline: Name, apply: Annotated[bool, typer.Option("--apply", help=_APPLY)] = False, as_json: Json = False
) -> None:
    """Find truncated files in a pipeline's tables."""
    with loading.opened() as opened:
        tables = Tables(opened.lake, opened.pipeline(pipeline))
        with waiting("the lake"):
            broken = unreadable(tables)
        if as_json:
            again = repair_tables(tables) if broken and apply else 0
            found = [
                UnreadableFile(table=file.table, path=file.path, window=file.window, rows=file.rows) for file in broken
            ]
            print_json(RepairOutput(unreadable=found, is_removed=apply and bool(broken), recorded_failures=again))
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
