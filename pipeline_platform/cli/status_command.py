"""`pipeline-platform status`: what waits, what is in flight, what is left to do; Dagster need not run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from sqlalchemy.exc import SQLAlchemyError

from pipeline_platform.cli import loading
from pipeline_platform.cli.dagster_instance import Instance, asking, dagster_instance, known
from pipeline_platform.cli.failure_commands import Json
from pipeline_platform.cli.terminal import plain, say
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.failed import FailedMessages
from pipeline_platform.lake.ledger import ReceiveError
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.options import Producer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.source.contract import SourceError
from pipeline_platform.spark.late_tasks import late_tasks

if TYPE_CHECKING:
    import dagster as dg

    from pipeline_platform.orchestration.sensors.producer_state import ProducerState

T = TypeVar("T")
Rows = dict[str, str | Text]


def status(
    pipeline: Annotated[str | None, typer.Argument(help="This pipeline only.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Show backlog, limits, runs, leases, receives to be finished, and open failures of pipelines.

    `in flight` are the messages that runs hold, by their claims in the control store. Runs that have leased nothing yet
    are listed with the most that they may take, as the instance in DAGSTER_HOME reports. `runs in Dagster` are the runs
    that it has queued or started.
    """
    console = Console()
    with dagster_instance() as instance, loading.opened(None, known(instance)) as opened:
        wanted = [opened.pipeline(pipeline)] if pipeline else opened.pipelines.values()
        if as_json:
            found = {chosen.name: _rows(opened, chosen, instance) for chosen in wanted}
            about = {"control_store": str(opened.control), "lake": opened.lake.root, "pipelines": found}
            typer.echo(json.dumps(about, default=str))
            return
        say(f"Control store: {opened.control}\nLake: {opened.lake.root}")
        for chosen in wanted:
            table = Table(title=chosen.name, title_justify="left", title_style="bold", box=None, show_header=False)
            table.add_column(style="dim")
            table.add_column()
            for name, value in _rows(opened, chosen, instance).items():
                style = value.style if isinstance(value, Text) else ""
                table.add_row(name, Text(plain(str(value)), style))
            console.print(table)


def _rows(opened: loading.Deployment, pipeline: type[Pipeline], instance: Instance) -> Rows:
    return {
        **_producers(opened, pipeline, instance),
        **_runs(pipeline, instance),
        **_receives(opened, pipeline),
        **_failures(opened.lake, pipeline),
        **_columns(opened.lake, pipeline),
        **_coming_back(opened.lake, pipeline),
    }


def _producers(opened: loading.Deployment, pipeline: type[Pipeline], instance: Instance) -> Rows:
    """What waits and what may be done, of each producer; of several under its name, then what holds for them all."""
    from pipeline_platform.launcher.run_process import end_claims
    from pipeline_platform.orchestration.sensors.producer_state import state_of
    from pipeline_platform.orchestration.sensors.runs_under_way import in_flight

    rows, control = Rows(), opened.control
    _asking(instance, lambda asked: end_claims(asked, control, pipeline.name) if asked else None)
    for name, producer in pipeline.producers_of().items():
        key, looked = pipeline.limits_key(name), (pipeline, name, opened.sources[producer.source], control)
        state = _asking(instance, lambda asked, looked=looked: state_of(*looked, asked))  # type: ignore[misc]
        held = _in_flight(control, key, state.in_flight.to_lease, opened.spark_ui)
        asks = asking(pipeline, name, instance)
        if isinstance(state.backlog, SourceError):
            asks = "not paused, but no runs are asked for: the source does not answer"
        of_one = {"now": state.sentence, **_backlog(state), **_limits(control, key, producer, asks), **held}
        rows |= {f"{name}: {what}" if name else what: value for what, value in of_one.items()}
    if pipeline.producers:
        at_run_time = str(control.overrides(pipeline.name))
        rows |= {"set at run time": at_run_time} if at_run_time else {}
        to_lease = _asking(instance, lambda asked: in_flight(pipeline, asked, control)).to_lease
        held = _in_flight(control, pipeline.name, to_lease, opened.spark_ui)
        of_all = {**_state(control, pipeline.name, "not paused"), **held}
        rows |= {f"backfills, replays: {what}": value for what, value in of_all.items()}
    return rows


def _asking(instance: Instance, look: Callable[[dg.DagsterInstance | None], T]) -> T:
    """What a look tells that asks Dagster, too, if it answers; `runs in Dagster` says why it does not."""
    try:
        return look(known(instance))
    except SQLAlchemyError:
        return look(None)


def _backlog(state: ProducerState) -> Rows:
    name, waiting, allowed = state.source, state.backlog, state.oldest_allowed
    if isinstance(waiting, SourceError):
        return {"backlog": Text(f"{name} {waiting.summary}: {waiting}", style="red")}
    oldest: str | Text = "none waits" if waiting.messages == 0 else "the source cannot tell"
    if waiting.oldest is not None:
        age = datetime.now(UTC) - waiting.oldest
        oldest = f"{_seconds(age.total_seconds())} ago"
        if allowed is not None and age > allowed:
            oldest = Text(f"{oldest}, longer than the {_seconds(allowed.total_seconds())} allowed", style="yellow")
    lost = {"lost": Text(waiting.lost, style="red")} if waiting.lost else {}
    free = waiting._replace(messages=state.at_source)  # "in flight" counts the others
    rows: Rows = {"backlog": f"{free} in {name}", "oldest": oldest, **lost}
    if waiting.others is None:
        rows["other deployments"] = "the source cannot tell whether others read it"
    return rows


def _state(control: ControlStore, key: str, otherwise: str) -> Rows:
    paused, stops_at = control.paused(key), control.draining(key)
    if not paused:
        return {"state": otherwise}
    drains = f", and drained: runs begin no message after {stops_at:%H:%M:%S} UTC" if stops_at else ""
    return {"state": Text(f"paused: {paused}{drains}", style="yellow")}


def _limits(control: ControlStore, key: str, producer: Producer, asks: str) -> Rows:
    rows = _state(control, key, asks)
    if at_run_time := str(control.overrides(key)):
        rows["set at run time"] = at_run_time
    limit = control.rate_limiting(key, producer.rate_limiting)
    if limit is None:
        return {**rows, "rate limit": "none"}
    left = control.spare(key, limit, timedelta(0)) or 0
    every = _seconds(limit.interval.total_seconds())
    origin = "" if limit == producer.rate_limiting else ", set at run time"
    rows["rate limit"] = f"{limit.allowed_messages:,} every {every}{origin}"
    return {**rows, "permits": f"{left:,} left in the current interval"}


def _in_flight(control: ControlStore, key: str, to_lease: Mapping[str, int], spark_ui: str) -> Rows:
    """What runs hold; and the most that runs may take which have leased nothing yet."""
    live, now = control.in_flight(key), datetime.now(UTC)
    holding = [claim for claim in live if claim.run_id not in to_lease]
    messages = sum(claim.messages for claim in holding)
    rows: Rows = {"in flight": f"{messages:,} messages in {loading.counted(len(holding), 'run')}"}
    for claim in holding:
        began, left = _seconds((now - claim.started_at).total_seconds()), (claim.expires_at - now).total_seconds()
        rows[f"  run {claim.run_id[:8]}"] = f"{claim.messages:,} messages for {began}, lease for {_seconds(left)} more"
        if spark_ui and (late := late_tasks(spark_ui, claim.receive_id)):
            rows[f"  late in {claim.run_id[:8]}"] = Text(late, style="yellow")
    for claim in control.over(key):
        since = _seconds((now - claim.expires_at).total_seconds())
        dead = f"{claim.messages:,} messages, dead or stalled: its lease ended {since} ago"
        rows[f"  run {claim.run_id[:8]}"] = Text(dead, style="yellow")
    takes = {f"  run {run_id[:8]}": f"will take on up to {wanted:,} messages" for run_id, wanted in to_lease.items()}
    return rows | takes


def _runs(pipeline: type[Pipeline], instance: Instance) -> Rows:
    """The runs of the pipeline's sensor, schedules and jobs; of assets materialised by hand once they receive."""
    if isinstance(instance, str):
        return {"runs in Dagster": instance}
    from pipeline_platform.launcher.run_process import never_begins
    from pipeline_platform.orchestration.jobs import runs_of
    from pipeline_platform.orchestration.sensors.runs_under_way import UNDER_WAY

    try:
        if isinstance(instance, Exception):
            raise instance
        records = instance.get_run_records(runs_of(pipeline, UNDER_WAY))
        lost = [one.dagster_run.run_id[:8] for one in records if never_begins(one, instance, datetime.now(UTC))]
    except Exception as error:  # of whatever storage the instance has: the rest is reported all the same
        reason = str(error).partition("\n")[0]
        return {"runs in Dagster": Text(f"cannot be asked for: {type(error).__name__}: {reason}", style="yellow")}
    counts = Counter(record.dagster_run.status for record in records)
    live = ", ".join(f"{counts[one]:,} {one.value.lower().replace('_', ' ')}" for one in UNDER_WAY if counts[one])
    rows: Rows = {"runs in Dagster": live or "none under way"}
    if lost:
        rows["  died"] = Text(f"{', '.join(lost)}: Dagster will know later; they hold nothing", style="yellow")
    return rows


def _receives(opened: loading.Deployment, pipeline: type[Pipeline]) -> Rows:
    from pipeline_platform.run.receive_state import Phase, ReceiveState

    flow = opened.flow(pipeline)
    found: dict[str, list[str]] = {"undecided receives": [], "unfinished receives": [], "unreadable receives": []}
    for receive_id in flow.ledger.unfinished():
        state = ReceiveState(flow, receive_id)
        try:
            if state.record:
                kind = "undecided receives" if state.phase < Phase.DECIDED else "unfinished receives"
                phase = state.phase.name.lower().replace("_", " ")
                found[kind].append(f"{receive_id[:8]} of run {state.record.run_id[:8]} ({phase})")
        except ReceiveError as error:
            found["unreadable receives"].append(str(error))
    unreadable = found.pop("unreadable receives")
    rows: Rows = {kind: ", ".join(receives) or "none" for kind, receives in found.items()}
    if found["unfinished receives"]:
        why = "the check `acknowledged` of the run says what is left, and the next run does it"
        rows["unfinished receives"] = f"{', '.join(found['unfinished receives'])}: {why}"
    if unreadable:
        rows["unreadable receives"] = Text("\n".join(unreadable), style="red")
    return rows


def _failures(lake: Lake, pipeline: type[Pipeline]) -> Rows:
    waiting = FailedMessages(name=pipeline.name, lake=lake, pipeline=pipeline.name).by_window()
    if not waiting:
        return {"open failures": "none"}
    windows = {f"  window {window}": _counted(counts.open, counts.dead) for window, counts in waiting.items()}
    every = _counted(sum(one.open for one in waiting.values()), sum(one.dead for one in waiting.values()))
    return {"open failures": Text(every, style="yellow"), **windows}


def _columns(lake: Lake, pipeline: type[Pipeline]) -> Rows:
    """What runs would refuse: a model that no longer fits its table."""
    from pipeline_platform.lake.tables import Tables

    refused = Tables(lake, pipeline).refusals()
    return {"changed types": Text("\n".join(refused.values()), style="red")} if refused else {}


def _coming_back(lake: Lake, pipeline: type[Pipeline]) -> Rows:
    from pipeline_platform.lake.coming_back import coming_back
    from pipeline_platform.lake.tables import Tables

    found = coming_back(Tables(lake, pipeline)["outcomes"])
    if found is None:
        return {}
    much = f"{loading.counted(found.messages, 'message')}, given back up to {found.deliveries:,} times"
    return {"come back": Text(f"{much}, the oldest since window {found.oldest}", style="yellow")}


def _counted(open_: int, dead: int) -> str:
    return f"{open_:,}, {dead:,} of them dead" if dead else f"{open_:,}"


def _seconds(seconds: float) -> str:
    """A span in its largest unit, with a digit after the point below ten."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.{1 if seconds < 10 * length else 0}f} {unit}"
    return f"{seconds:.{1 if seconds < 10 else 0}f} s"
