"""`pipeline-platform receives`: list unfinished receives."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pipeline_platform.cli import loading
from pipeline_platform.cli.failure_commands import Json
from pipeline_platform.cli.terminal import plain, say
from pipeline_platform.lake.ledger import ReceiveError
from pipeline_platform.model.pipeline import Pipeline

_TAKE_OVER = (
    "Take over the receives of another control store that is permanently lost. Its runs must have ended: messages of a "
    "run that is still active would be handled twice."
)
_COLUMNS = ("pipeline", "receive", "run", "age_s", "step", "messages", "lease_s")


def receives(
    pipeline: Annotated[str | None, typer.Argument(help="Only this pipeline.", show_default=False)] = None,
    take_over: Annotated[bool, typer.Option("--take-over", help=_TAKE_OVER)] = False,
    as_json: Json = False,
) -> None:
    """List unfinished receives with their run, age, next step, number of messages, and lease.

    Ages and leases are in seconds. A negative lease has expired. A receive without a lease has no active run: the next
    run finishes it, or releases its messages.
    """
    from pipeline_platform.run import finish

    with loading.opened() as opened:
        chosen = [opened.pipeline(pipeline)] if pipeline else opened.pipelines.values()
        taken = sum(finish.adopt(opened.flow(each)) for each in chosen) if take_over else 0
        found = [row for each in chosen for row in _rows(opened, each)]
    if as_json:
        typer.echo(json.dumps(found))
        return
    table = Table(*(name.replace("_s", ", s") for name in _COLUMNS), box=None)
    for row in found:
        table.add_row(*(plain("none" if row[name] is None else str(row[name])) for name in _COLUMNS))
    if found:
        Console().print(table)
    if take_over:
        say(f"Took over {loading.counted(taken, 'receive')}. The next runs finish or release them.")
    say(f"{loading.counted(len(found), 'unfinished receive')}.")


def _rows(opened: loading.Deployment, pipeline: type[Pipeline]) -> Iterator[dict[str, Any]]:
    """Yield each unfinished receive of the lake, and each receive with a claim in the control store."""
    from pipeline_platform.run.receive_state import Phase, ReceiveState

    next_steps = {
        Phase.BEGUN: "receive", Phase.LEASED: "handle", Phase.HANDLED: "batch", Phase.BATCHED: "decide",
        Phase.DECIDED: "publish", Phase.PUBLISHED: "acknowledge",
    }  # fmt: skip
    flow, control, now = opened.flow(pipeline), opened.control, datetime.now(UTC)
    held = [*control.over(pipeline.name, of_all=True), *control.in_flight(pipeline.name, of_all=True)]
    claims = {claim.receive_id: claim for claim in held}
    for receive_id in dict.fromkeys([*flow.ledger.unfinished(), *claims]):
        state, claim, begun, step = ReceiveState(flow, receive_id), claims.get(receive_id), None, "receive"
        messages = claim.messages if claim else None
        try:
            if begun := state.receive:
                step = next_steps.get(state.phase, "none: fenced or finished")
                messages = messages or flow.ledger.manifest(begun).totals.received
        except ReceiveError as error:
            step = str(error)
        started = begun.started_at if begun else claim.started_at if claim else None
        yield {
            "pipeline": pipeline.name,
            "receive": receive_id,
            "run": claim.run_id if claim else begun.run_id if begun else None,
            "age_s": started and round((now - started).total_seconds()),
            "step": step,
            "messages": messages,
            "lease_s": claim and round((claim.expires_at - now).total_seconds()),
        }
