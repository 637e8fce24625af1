"""`pipeline-platform repair`: tables with files that nobody can read."""

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

_APPLY = "Take files and rows out, and record again what became of their messages; else they are only named."


def repair(
    pipeline: Name, apply: Annotated[bool, typer.Option("--apply", help=_APPLY)] = False, as_json: Json = False
) -> None:
    """Find files of a pipeline's tables that are cut off, and rows with values that not every reader can read.

    Every row is read. Messages whose rows are taken out become open failures.
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
            say(f"{pipeline}/{file.table}: {file.path} cannot be read ({file.rows:,} rows).")
        for row in rows:
            message = f"message {row['message_id']} of {row['source']}, attempt {row['attempt']}"
            say(f"{pipeline}/{row['table']}: {row['path']} has a row that not every reader can read: {message}.")
        if not broken and not values:
            say(f"All files of {pipeline} are intact.")
        elif not apply:
            say("Take them out with --apply, while no run of the pipeline is under way.")
        else:
            again = repair_tables(tables)
            windows = ", ".join(sorted({file.window for file in [*broken, *values]}))
            say(f"They are out of their tables. {again:,} messages are open failures now: backfill {windows}.")
            say(f"Rows that are missing besides come back by a replay of {windows}.")


def _named(rows: pa.Table) -> list[dict[str, Any]]:
    """The messages of rows; an id may be what cannot be read."""
    texts = [rows[name].cast(pa.binary()).to_pylist() for name in ("source", "message_id")]
    return [
        {"source": source.decode(errors="replace"), "message_id": id_.decode(errors="replace"), "attempt": attempt}
        for source, id_, attempt in zip(*texts, rows["attempt"].to_pylist(), strict=True)
    ]
