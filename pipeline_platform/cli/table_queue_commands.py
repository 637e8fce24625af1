"""`pipeline-platform table-queue`: the tables of a queue of this deployment, made and looked at."""

import json
from typing import Annotated, Literal

import typer

from pipeline_platform.cli import loading
from pipeline_platform.cli.failure_commands import Json
from pipeline_platform.cli.terminal import say
from pipeline_platform.connectors.table_queue import TableQueue

app = typer.Typer(help="Make the tables of a table queue, or look at them.", no_args_is_help=True)

Key = Annotated[str, typer.Argument(help="Key of the resource in this deployment.")]


@app.command()
def create(
    key: Key,
    payload: Annotated[Literal["bytes", "json"], typer.Option(help="Type of the payload in a new table.")] = "bytes",
) -> None:
    """Make the tables that are missing; existing ones stay as they are."""
    with loading.opened() as opened:
        queue = _queue(opened, key)
        queue.create(payload)
        beside = ", ".join(f"{queue.table}_{name}" for name in ("leases", "receives", "readers"))
        say(f"{key} is ready: table {queue.table!r} with {beside}.")


@app.command()
def show(key: Key, as_json: Json = False) -> None:
    """Show how many messages wait, since when, and which receives hold how many."""
    with loading.opened() as opened:
        queue = _queue(opened, key)
        waiting, held = queue.backlog(), queue.held()
    if as_json:
        leases = [dict(zip(("receive", "lease_s", "messages"), one, strict=True)) for one in held]
        found = {"messages": waiting.messages, "oldest": waiting.oldest, "leases": leases}
        typer.echo(json.dumps(found, default=str))
        return
    since = f", the oldest since {waiting.oldest:%Y-%m-%d %H:%M:%S} UTC" if waiting.oldest else ""
    say(f"{waiting.messages:,} messages wait{since}.")
    for receive_id, left_s, messages in held:
        who = "are given back, and wait" if receive_id is None else f"are leased by receive {receive_id}"
        until = f"for {left_s:.0f} s more" if left_s > 0 else "until the next run: the lease ran out"
        say(f"{messages:,} messages {who} {until}.")


def _queue(opened: loading.Deployment, key: str) -> TableQueue:
    source = opened.sources.get(key)
    if not isinstance(source, TableQueue):
        queues = sorted(one for one, source in opened.sources.items() if isinstance(source, TableQueue))
        raise typer.BadParameter(
            f"{key!r} is no table queue of this deployment; there is {', '.join(queues) or 'none'}"
        )
    return source
