"""`pipeline-platform status`: state of pipelines, also without a running Dagster."""

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
from pipeline_platform.cli.terminal import duration, plain, say
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.failed import FailedMessages
from pipeline_platform.lake.ledger import ReceiveError
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.source.contract import SourceError
from pipeline_platform.spark.late_tasks import late_tasks

if TYPE_CHECKING:
    import dagster as dg

    from pipeline_platform.orchestration.sensors.producer_state import ProducerState

T = TypeVar("T")
_Rows = dict[str, str | Text]


def status(
    pipeline: Annotated[str | None, typer.Argument(help="Only this pipeline.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Show backlog, limits, active runs, unfinished receives and open failures of pipelines.

    `in flight` counts messages that runs have leased, by their claims in the control store. Runs that have leased no
    messages yet are listed with their demand, as reported by the instance in DAGSTER_HOME. `runs in Dagster` counts its
    queued and started runs.
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


def _rows(opened: loading.Deployment, pipeline: type[Pipeline], instance: Instance) -> _Rows:
    return {
        **_producers(opened, pipeline, instance),
        **_runs(pipeline, instance),
        **_receives(opened, pipeline),
        **_failures(opened.lake, pipeline),
        **_columns(opened.lake, pipeline),
        **_coming_back(opened.lake, pipeline),
    }


def _producers(opened: loading.Deployment, pipeline: type[Pipeline], instance: Instance) -> _Rows:
    """Return backlog, limits and runs of each producer; then, if there are several, of retries and replays."""
    from pipeline_platform.launcher.run_process import end_claims
    from pipeline_platform.orchestration.sensors.producer_state import state_of
    from pipeline_platform.orchestration.sensors.runs_under_way import in_flight

    rows, control = _Rows(), opened.control
    _asking(instance, lambda asked: end_claims(asked, control, pipeline.name) if asked else None)
    for producer in BoundProducer.all_of(pipeline):
        looked = producer, opened.sources[producer.source], control
        state = _asking(instance, lambda asked, looked=looked: state_of(*looked, asked))  # type: ignore[misc]
        held = _in_flight(control, producer.key, state.in_flight.to_lease, opened.spark_ui)
        asks = asking(producer, instance)
        if isinstance(state.backlog, SourceError):
            asks = f"not paused, but no runs are requested: the source {state.backlog.summary}"
        own_rows = {"now": state.sentence, **_backlog(state), **_limits(control, producer, asks), **held}
        name = f"{producer.name}: " if producer.name else ""
        rows |= {f"{name}{label}": value for label, value in own_rows.items()}
    if (whole := BoundProducer(pipeline)).is_whole_pipeline:
        at_run_time = str(control.overrides(pipeline.name))
        rows |= {"set at run time": at_run_time} if at_run_time else {}
        to_lease = _asking(instance, lambda asked: in_flight(whole, asked, control)).to_lease
        held = _in_flight(control, pipeline.name, to_lease, opened.spark_ui)
        common_rows = {**_state(control, pipeline.name, "not paused"), **held}
        rows |= {f"retries, replays: {label}": value for label, value in common_rows.items()}
    return rows


def _asking(instance: Instance, look: Callable[[dg.DagsterInstance | None], T]) -> T:
    """Return the result of a function that uses Dagster if it answers. `runs in Dagster` shows why it does not."""
    try:
        return look(known(instance))
    except SQLAlchemyError:
        return look(None)


def _backlog(state: ProducerState) -> _Rows:
    name, waiting, allowed = state.source, state.backlog, state.oldest_allowed
    if isinstance(waiting, SourceError):
        return {"backlog": Text(f"{name} {waiting.summary}: {waiting}", style="red")}
    oldest: str | Text = "none waiting" if waiting.messages == 0 else "unknown: the source does not report it"
    if waiting.oldest is not None:
        age = datetime.now(UTC) - waiting.oldest
        oldest = f"{duration(age.total_seconds())} ago"
        if allowed is not None and age > allowed:
            limit = duration(allowed.total_seconds())
            oldest = Text(f"{oldest}, longer than oldest_allowed ({limit})", style="yellow")
    lost = {"lost": Text(waiting.lost, style="red")} if waiting.lost else {}
    free = waiting._replace(messages=state.at_source)  # "in flight" counts the others
    backlog = f"unknown: {name} does not report it" if free.messages is None else f"{free} in {name}"
    return {"backlog": backlog, "oldest": oldest, **lost}


def _state(control: ControlStore, key: str, otherwise: str) -> _Rows:
    paused, stops_at = control.paused(key), control.draining(key)
    if not paused:
        return {"state": otherwise}
    drains = f"; draining: runs start no messages after {stops_at:%H:%M:%S} UTC" if stops_at else ""
    return {"state": Text(f"paused: {paused}{drains}", style="yellow")}


def _limits(control: ControlStore, producer: BoundProducer, asks: str) -> _Rows:
    key, own = producer.key, producer.options.rate_limiting
    rows = _state(control, key, asks)
    if at_run_time := str(control.overrides(key)):
        rows["set at run time"] = at_run_time
    limit = control.rate_limiting(key, own)
    if limit is None:
        return {**rows, "rate limit": "none"}
    left = control.spare(key, limit, timedelta(0)) or 0
    every = duration(limit.interval.total_seconds())
    origin = "" if limit == own else ", set at run time"
    rows["rate limit"] = f"{loading.counted(limit.allowed_messages, 'message')} every {every}{origin}"
    return {**rows, "permits": f"{left:,} left in the current interval"}


def _in_flight(control: ControlStore, key: str, to_lease: Mapping[str, int], spark_ui: str) -> _Rows:
    """Return the messages that runs have leased, and the demand of runs that have leased no messages yet."""
    live, now = control.in_flight(key), datetime.now(UTC)
    holding = [claim for claim in live if claim.run_id not in to_lease]
    messages = sum(claim.messages for claim in holding)
    rows: _Rows = {"in flight": f"{messages:,} messages in {loading.counted(len(holding), 'run')}"}
    for claim in holding:
        count, began = loading.counted(claim.messages, "message"), duration((now - claim.started_at).total_seconds())
        left = duration((claim.expires_at - now).total_seconds())
        rows[f"  run {claim.run_id[:8]}"] = f"{count}, started {began} ago, claim expires in {left}"
        if spark_ui and (late := late_tasks(spark_ui, claim.receive_id)):
            rows[f"  slow in {claim.run_id[:8]}"] = Text(late, style="yellow")
    for claim in control.over(key):
        count, since = loading.counted(claim.messages, "message"), duration((now - claim.expires_at).total_seconds())
        rows[f"  run {claim.run_id[:8]}"] = Text(
            f"{count}, crashed or stalled: claim expired {since} ago", style="yellow"
        )
    demands = {run_id: loading.counted(wanted, "message") for run_id, wanted in to_lease.items()}
    return rows | {f"  run {run_id[:8]}": f"will lease up to {demand}" for run_id, demand in demands.items()}


def _runs(pipeline: type[Pipeline], instance: Instance) -> _Rows:
    """Return the active runs of the pipeline. Manual materialisations of assets count once they have received."""
    if isinstance(instance, str):
        return {"runs in Dagster": instance}
    from pipeline_platform.launcher.run_process import never_begins
    from pipeline_platform.orchestration.jobs import tags_of
    from pipeline_platform.orchestration.run_queries import runs_with
    from pipeline_platform.orchestration.sensors.runs_under_way import UNDER_WAY

    try:
        if isinstance(instance, Exception):
            raise instance
        records = runs_with(instance, UNDER_WAY, tags_of(pipeline))
        lost = [
            record.dagster_run.run_id[:8] for record in records if never_begins(record, instance, datetime.now(UTC))
        ]
    except Exception as error:  # any error of the instance's storage; the other rows do not depend on it
        reason = str(error).partition("\n")[0]
        return {"runs in Dagster": Text(f"unavailable: {type(error).__name__}: {reason}", style="yellow")}
    counts = Counter(record.dagster_run.status for record in records)
    live = ", ".join(
        f"{counts[status]:,} {status.value.lower().replace('_', ' ')}" for status in UNDER_WAY if counts[status]
    )
    rows: _Rows = {"runs in Dagster": live or "none under way"}
    if lost:
        text = f"{', '.join(lost)}: leased no messages; Dagster will mark the {'run' if len(lost) == 1 else 'runs'}"
        rows["  crashed"] = Text(f"{text} as failed", style="yellow")
    return rows


def _receives(opened: loading.Deployment, pipeline: type[Pipeline]) -> _Rows:
    from pipeline_platform.run.receive_state import Phase, ReceiveState

    flow = opened.flow(pipeline)
    found: dict[str, list[str]] = {"undecided receives": [], "unfinished receives": [], "unreadable receives": []}
    for receive_id in flow.ledger.unfinished():
        state = ReceiveState(flow, receive_id)
        try:
            if state.receive:
                kind = "undecided receives" if state.phase < Phase.DECIDED else "unfinished receives"
                phase = state.phase.name.lower()
                found[kind].append(f"{receive_id[:8]} of run {state.receive.run_id[:8]} ({phase})")
        except ReceiveError as error:
            found["unreadable receives"].append(str(error))
    unreadable = found.pop("unreadable receives")
    rows: _Rows = {kind: ", ".join(receives) or "none" for kind, receives in found.items()}
    if found["unfinished receives"]:
        why = "the next run finishes this; see the check `acknowledged`"
        rows["unfinished receives"] = f"{', '.join(found['unfinished receives'])}; {why}"
    if unreadable:
        rows["unreadable receives"] = Text("\n".join(unreadable), style="red")
    return rows


def _failures(lake: Lake, pipeline: type[Pipeline]) -> _Rows:
    waiting = FailedMessages(name=pipeline.name, lake=lake, pipeline=pipeline.name).by_window()
    if not waiting:
        return {"open failures": "none"}
    windows = {f"  window {window}": _counted(counts.open, counts.dead) for window, counts in waiting.items()}
    total = _counted(sum(counts.open for counts in waiting.values()), sum(counts.dead for counts in waiting.values()))
    return {"open failures": Text(total, style="yellow"), **windows}


def _columns(lake: Lake, pipeline: type[Pipeline]) -> _Rows:
    """Return models that do not fit their table, for which runs are refused."""
    from pipeline_platform.lake.tables import Tables

    refused = Tables(lake, pipeline).refusals()
    return {"changed types": Text("\n".join(refused.values()), style="red")} if refused else {}


def _coming_back(lake: Lake, pipeline: type[Pipeline]) -> _Rows:
    from pipeline_platform.lake.inspection import coming_back
    from pipeline_platform.lake.tables import Tables

    found = coming_back(Tables(lake, pipeline)["outcomes"])
    if found is None:
        return {}
    text = f"{loading.counted(found.messages, 'message')}, returned up to {found.deliveries:,} times without a decision"
    return {"redelivered": Text(f"{text}, the oldest since window {found.oldest}", style="yellow")}


def _counted(open_: int, dead: int) -> str:
    return f"{open_:,}, {dead:,} of them dead" if dead else f"{open_:,}"
