"""`pipeline-platform table-queue`: create or inspect the tables of a table queue."""

from typing import Annotated, Literal

import typer
from pydantic import Field

from pipeline_platform.cli import loading
from pipeline_platform.cli.options import Json
from pipeline_platform.cli.output import Output, Time, print_json
from pipeline_platform.cli.terminal import duration, say
from pipeline_platform.connectors.table_queue import TableQueue

app = typer.Typer(help="Create or inspect the tables of a table queue.", no_args_is_help=True)

Key = Annotated[str, typer.Argument(help="Resource key of the queue in this deployment.")]


class QueueLease(Output):
    """Messages of a table queue that are leased or delayed."""

    receive_id: str | None = Field(description="Receive with the lease. Null for released messages.")
    lease_s: float = Field(description="Time until the lease or the delay ends; negative after that.")
    messages: int = Field(description="Number of messages.")


class TableQueueOutput(Output):
    """Output of `table-queue show`."""

    messages: int = Field(description="Waiting messages.")
    oldest_at: Time | None = Field(description="Time of the oldest waiting message. Null if it is unknown.")
    leases: list[QueueLease] = Field(description="Leased and released messages.")


@app.command()
def create(
    key: Key,
    payload: Annotated[Literal["bytes", "json"], typer.Option(help="Type of the payload in a new table.")] = "bytes",
) -> None:
    """Create missing tables. Existing tables are not changed."""
    with loading.opened() as opened:
        queue = _queue(opened, key)
        queue.create(payload)
        say(f"{key} is ready: table {queue.table!r} with {queue.table}_leases and {queue.table}_receives.")


@app.command()
def show(key: Key, as_json: Json = False) -> None:
    """Show the number of waiting and leased messages."""
    with loading.opened() as opened:
        queue = _queue(opened, key)
        waiting, held = queue.backlog(), queue.held()
    if as_json:
        leases = [QueueLease(receive_id=receive, lease_s=left, messages=count) for receive, left, count in held]
        found = TableQueueOutput(messages=waiting.messages or 0, oldest_at=waiting.oldest, leases=leases)
        print_json(found)
        return
    since = f", the oldest since {waiting.oldest:%Y-%m-%d %H:%M:%S} UTC" if waiting.oldest else ""
    say(f"{loading.counted(waiting.messages or 0, 'message')} waiting{since}.")
    for receive_id, left_s, messages in held:
        count = loading.counted(messages, "message")
        if receive_id is None:
            when = f"in {duration(left_s)}" if left_s > 0 else "now"
            say(f"{count} released, to be redelivered {when}.")
        else:
            lease = f"for another {duration(left_s)}" if left_s > 0 else "until the next run: the lease has expired"
            say(f"{count} leased by receive {receive_id} {lease}.")


def _queue(opened: loading.Deployment, key: str) -> TableQueue:
    source = opened.sources.get(key)
    if not isinstance(source, TableQueue):
        queues = sorted(name for name, source in opened.sources.items() if isinstance(source, TableQueue))
        known = f"The table queues are {', '.join(queues)}." if queues else "There are no table queues."
        raise typer.BadParameter(f"{key!r} is not a table queue of this deployment. {known}")
    return source
