"""`pipeline-platform status`: what waits, what is in flight, what is left to do; Dagster need not run."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline_platform.cli import deployment
from pipeline_platform.cli.limits import changed

if TYPE_CHECKING:
    from pipeline_platform.control.store import ControlStore
    from pipeline_platform.lake.storage import Lake
    from pipeline_platform.model.options import Producer
    from pipeline_platform.model.pipeline import Pipeline
    from pipeline_platform.source.contract import Source

Rows = dict[str, str | Text]


def status(
    pipeline: Annotated[str | None, typer.Argument(help="This pipeline only.", show_default=False)] = None,
) -> None:
    """Show backlog, limits, runs, leases, receives to be finished, and open failures of pipelines.

    `in flight` are the runs that hold messages: claims in the control store, with their leases. `runs in Dagster` are
    those that its instance in DAGSTER_HOME has queued or started, whether they hold messages yet or not.
    """
    console = Console()
    with deployment.opened() as opened:
        wanted = [opened.pipeline(pipeline)] if pipeline else opened.pipelines.values()
        typer.echo(f"Control store: {opened.control}\nLake: {opened.lake.root}")
        for chosen in wanted:
            table = Table(title=chosen.name, title_justify="left", title_style="bold", box=None, show_header=False)
            table.add_column(style="dim")
            table.add_column()
            rows = {
                **_producers(opened, chosen),
                **_runs(chosen),
                **_receives(opened.lake, chosen),
                **_failures(opened.lake, chosen),
            }
            for name, value in rows.items():
                table.add_row(name, value if isinstance(value, Text) else Text(value))
            console.print(table)


def _producers(opened: deployment.Deployment, pipeline: type[Pipeline]) -> Rows:
    """What waits and what may be done, of each producer; of several under its name, then what holds for them all."""
    rows: Rows = {}
    for name, producer in pipeline.producers_of().items():
        key = pipeline.limits_key(name)
        of_one = {
            **_backlog(opened.sources[producer.source], producer),
            **_limits(opened.control, key, producer),
            **_in_flight(opened.control, key),
        }
        rows |= {f"{name}: {what}" if name else what: value for what, value in of_one.items()}
    if pipeline.producers:
        at_run_time = changed(opened.control.overrides(pipeline.name))
        rows |= {"set at run time": at_run_time} if at_run_time else {}
        of_all = {**_state(opened.control, pipeline.name), **_in_flight(opened.control, pipeline.name)}
        rows |= {f"backfills, replays: {what}": value for what, value in of_all.items()}
    return rows


def _backlog(source: Source, producer: Producer) -> Rows:
    from pipeline_platform.source.contract import SourceError

    name = producer.source
    try:
        waiting = source.backlog()
    except SourceError as error:
        return {"backlog": Text(f"{name} does not answer: {error}", style="red")}
    oldest: str | Text = "none waits" if waiting.messages == 0 else "the source cannot tell"
    if waiting.oldest is not None:
        age, allowed = datetime.now(UTC) - waiting.oldest, producer.oldest_allowed
        oldest = f"{_seconds(age.total_seconds())} ago"
        if allowed is not None and age > allowed:
            oldest = Text(f"{oldest}, longer than the {_seconds(allowed.total_seconds())} allowed", style="yellow")
    backlog = "the source cannot tell" if waiting.messages is None else f"{waiting.messages:,} messages"
    return {"backlog": f"{backlog} in {name}", "oldest": oldest}


def _state(control: ControlStore, key: str) -> Rows:
    paused, stops_at = control.paused(key), control.draining(key)
    if not paused:
        return {"state": "asks for runs"}
    drains = f", and drained: runs begin no message after {stops_at:%H:%M:%S} UTC" if stops_at else ""
    return {"state": Text(f"paused: {paused}{drains}", style="yellow")}


def _limits(control: ControlStore, key: str, producer: Producer) -> Rows:
    rows = _state(control, key)
    if at_run_time := changed(control.overrides(key)):
        rows["set at run time"] = at_run_time
    limit = control.rate_limiting(key, producer.rate_limiting)
    if limit is None:
        return {**rows, "rate limit": "none"}
    left = control.spare(key, limit, timedelta(0)) or 0
    every = _seconds(limit.interval.total_seconds())
    origin = "" if limit == producer.rate_limiting else ", set at run time"
    rows["rate limit"] = f"{limit.allowed_messages:,} every {every}{origin}"
    return {**rows, "permits": f"{left:,} left in the current interval"}


def _in_flight(control: ControlStore, key: str) -> Rows:
    live, now = control.in_flight(key), datetime.now(UTC)
    rows: Rows = {"in flight": f"{sum(claim.messages for claim in live):,} messages in {len(live)} runs"}
    for claim in live:
        began, left = _seconds((now - claim.started_at).total_seconds()), (claim.expires_at - now).total_seconds()
        rows[f"  run {claim.run_id[:8]}"] = f"{claim.messages:,} messages for {began}, lease for {_seconds(left)} more"
    for claim in control.over(key):
        since = _seconds((now - claim.expires_at).total_seconds())
        said = f"{claim.messages:,} messages, dead or stalled: its lease ended {since} ago"
        rows[f"  run {claim.run_id[:8]}"] = Text(said, style="yellow")
    return rows


def _runs(pipeline: type[Pipeline]) -> Rows:
    """The runs of the pipeline's sensor, schedules and jobs; of assets materialised by hand once they receive."""
    if not os.environ.get("DAGSTER_HOME"):
        return {"runs in Dagster": "DAGSTER_HOME is not set"}
    import dagster as dg

    from assets.jobs import runs_of
    from sensors.producer import UNDER_WAY

    try:
        with dg.DagsterInstance.get() as instance:
            counts = {status: instance.get_runs_count(runs_of(pipeline, [status])) for status in UNDER_WAY}
    except Exception as error:  # of whatever storage the instance has: the rest is reported all the same
        said = str(error).partition("\n")[0]
        return {"runs in Dagster": Text(f"cannot be asked for: {type(error).__name__}: {said}", style="yellow")}
    said = ", ".join(f"{n:,} {status.value.lower().replace('_', ' ')}" for status, n in counts.items() if n)
    return {"runs in Dagster": said or "none under way"}


def _receives(lake: Lake, pipeline: type[Pipeline]) -> Rows:
    from pipeline_platform.lake.decision import decided
    from pipeline_platform.lake.ledger import Ledger
    from pipeline_platform.lake.tables import Tables

    outcomes = Tables(lake, pipeline)["outcomes"]
    receives, unreadable = Ledger(lake, pipeline.name).under_way()
    undecided: list[str] = []
    unfinished: list[str] = []
    for receive in receives:
        if decided(outcomes, receive):
            unfinished.append(f"{receive.receive_id[:8]} of run {receive.run_id[:8]}")
        else:
            undecided.append(receive.receive_id[:8])
    rows: Rows = {"undecided receives": ", ".join(undecided) or "none", "unfinished receives": "none"}
    if unfinished:
        why = "decided; the check `acknowledged` of the run says what is left, and the next run does it"
        said = f"{', '.join(unfinished)} ({why})"
        rows["unfinished receives"] = said
    if unreadable:
        rows["unreadable receives"] = Text("\n".join(map(str, unreadable)), style="red")
    return rows


def _failures(lake: Lake, pipeline: type[Pipeline]) -> Rows:
    from pipeline_platform.lake.failed import FailedMessages

    waiting = FailedMessages(name=pipeline.name, lake=lake, pipeline=pipeline.name).by_window()
    if not waiting:
        return {"open failures": "none"}
    windows = {f"  window {window}": _counted(counts.open, counts.dead) for window, counts in waiting.items()}
    every = _counted(sum(one.open for one in waiting.values()), sum(one.dead for one in waiting.values()))
    return {"open failures": Text(every, style="yellow"), **windows}


def _counted(open_: int, dead: int) -> str:
    return f"{open_:,}, {dead:,} of them dead" if dead else f"{open_:,}"


def _seconds(seconds: float) -> str:
    """A span in its largest unit, with a digit after the point below ten."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.{1 if seconds < 10 * length else 0}f} {unit}"
    return f"{seconds:.{1 if seconds < 10 else 0}f} s"
