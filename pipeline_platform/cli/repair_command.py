"""`pipeline-platform repair`: remove unreadable files and rows from tables."""

import json
from typing import Annotated, Any

import pyarrow as pa
import typer

from pipeline_platform.cli import loading
from pipeline_platform.cli.failure_commands import Json, Name
from pipeline_platform.cli.terminal import say
from pipeline_platform.lake.repair import repair as repair_tables
from pipeline_platform.lake.repair import unreadable, unreadable_values
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.message import MESSAGE_KEY

_APPLY = "Remove the files and rows, and record their messages as open failures. By default, only list them."


def repair(
    pipeline: Name, apply: Annotated[bool, typer.Option("--apply", help=_APPLY)] = False, as_json: Json = False
) -> None:
    """Find truncated files in a pipeline's tables, and rows with values that some readers cannot read.

    The command reads every row. Messages of removed rows become open failures.
    """
    with loading.opened() as opened:
        tables = Tables(opened.lake, opened.pipeline(pipeline))
        broken, values = unreadable(tables), unreadable_values(tables)
        rows = [{"table": file.table, "path": file.path, **row} for file, bad in values.items() for row in _named(bad)]
        if as_json:
            again = repair_tables(tables) if (broken or values) and apply else 0
            found = {"unreadable": [file._asdict() for file in broken], "rows": rows}
            typer.echo(json.dumps({**found, "taken_out": apply, "open_again": again}, default=str))
            return
        for file in broken:
            say(f"{pipeline}/{file.table}: {file.path} is unreadable ({loading.counted(file.rows, 'row')}).")
        for row in rows:
            message = f"message {row['message_id']} of {row['source']}, attempt {row['attempt']}"
            say(f"{pipeline}/{row['table']}: {row['path']} has a row that some readers cannot read: {message}.")
        if not broken and not values:
            say(f"All files of {pipeline} are intact.")
        elif not apply:
            say("Remove them with --apply while the pipeline has no active run.")
        else:
            again = repair_tables(tables)
            windows = ", ".join(sorted({file.window for file in [*broken, *values]}))
            say(f"Removed them from the tables. Recorded {loading.counted(again, 'message')} as open failures.")
            say(f"Retry the failures of {windows}. To restore other missing rows, replay {windows}.")


def _named(rows: pa.Table) -> list[dict[str, Any]]:
    """Return the messages of rows. An id may contain invalid UTF-8."""
    texts = [rows[name].cast(pa.binary()).to_pylist() for name in MESSAGE_KEY]
    return [
        {"source": source.decode(errors="replace"), "message_id": id_.decode(errors="replace"), "attempt": attempt}
        for source, id_, attempt in zip(*texts, rows["attempt"].to_pylist(), strict=True)
    ]
