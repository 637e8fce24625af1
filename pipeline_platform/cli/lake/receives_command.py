"""`pipeline-platform receives`: list unfinished receives."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Literal

import typer
from pydantic import Field
from rich.console import Console
from rich.table import Column, Table

from pipeline_platform.cli import loading
from pipeline_platform.cli.options import Json, OptionalName
from pipeline_platform.cli.output import Output, Time, print_json
from pipeline_platform.cli.terminal import plain, say
from pipeline_platform.lake.decisions.ledger import ReceiveError
from pipeline_platform.model.pipeline import Pipeline

_TAKE_OVER = (
    "Take over the receives of another control store that is permanently lost. Its runs must have ended: messages of a "
    "run that is still active would be handled twice."
)
_COLUMNS = {"receive_id": "receive", "run_id": "run", "age_s": "age, s", "lease_s": "lease, s"}
"""Titles of columns that differ from their fields."""

Step = Literal["receive", "handle", "batch", "decide", "publish", "acknowledge", "none", "unknown"]


class UnfinishedReceive(Output):
    """An unfinished receive."""

    pipeline: str = Field(description="Name of the pipeline.")
    receive_id: str = Field(description="Id of the receive.")
    run_id: str | None = Field(description="Run that works on it, or started it. Null if it is not recorded.")
    started_at: Time | None = Field(description="Start of the receive.")
    age_s: int | None = Field(description="Time since its start.")
    step: Step = Field(
        description="Next step. `none`: it was fenced or is finished. `unknown`: its record cannot be read."
    )
    error: str | None = Field(description="Reason why its record cannot be read. Null if it can be read.")
    messages: int | None = Field(description="Number of messages. Null if it is not recorded.")
    lease_s: int | None = Field(description="Time until its claim expires, negative after that. Null without a claim.")


class ReceivesOutput(Output):
    """Output of `receives`."""

    taken_over: int = Field(description="Receives of another control store that were taken over.")
    receives: list[UnfinishedReceive] = Field(description="Unfinished receives.")


def receives(
    pipeline: OptionalName = None,
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
        print_json(ReceivesOutput(taken_over=taken, receives=found))
        return
    names = [name for name in UnfinishedReceive.model_fields if name not in ("started_at", "error")]
    table = Table(*(Column(_COLUMNS.get(name, name), overflow="fold") for name in names), box=None)
    for row in found:
        shown = {**dict(row), "step": row.error or row.step}
        table.add_row(*(plain("none" if shown[name] is None else str(shown[name])) for name in names))
    if found:
        Console().print(table)
    if take_over:
        say(f"Took over {loading.counted(taken, 'receive')}. The next runs finish or release them.")
    say(f"{loading.counted(len(found), 'unfinished receive')}.")


def _rows(opened: loading.Deployment, pipeline: type[Pipeline]) -> Iterator[UnfinishedReceive]:
    """Yield each unfinished receive of the lake, and each receive with a claim in the control store."""
    from pipeline_platform.run.receive_state import Phase, ReceiveState

    next_steps: dict[Phase, Step] = {
        Phase.BEGUN: "receive", Phase.LEASED: "handle", Phase.HANDLED: "batch", Phase.BATCHED: "decide",
        Phase.DECIDED: "publish", Phase.PUBLISHED: "acknowledge",
    }  # fmt: skip
    flow, control, now = opened.flow(pipeline), opened.control, datetime.now(UTC)
    held = [*control.over(pipeline.name, of_all=True), *control.in_flight(pipeline.name, of_all=True)]
    claims = {claim.receive_id: claim for claim in held if not claim.is_stand_by}
    for receive_id in dict.fromkeys([*flow.ledger.unfinished(), *claims]):
        state, claim, begun = ReceiveState(flow, receive_id), claims.get(receive_id), None
        step: Step = "receive"
        messages, why = claim.messages if claim else None, None
        try:
            if begun := state.receive:
                step = next_steps.get(state.phase, "none")
                messages = messages or flow.ledger.manifest(begun).totals.received
        except ReceiveError as error:
            step, why = "unknown", str(error)
        started = begun.started_at if begun else claim.started_at if claim else None
        yield UnfinishedReceive(
            pipeline=pipeline.name,
            receive_id=receive_id,
            run_id=claim.run_id if claim else begun.run_id if begun else None,
            started_at=started,
            age_s=None if started is None else round((now - started).total_seconds()),
            step=step,
            error=why,
            messages=messages,
            lease_s=None if claim is None else round((claim.expires_at - now).total_seconds()),
        )
