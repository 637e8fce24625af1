"""`pipeline-platform status`: state of pipelines, also without a running Dagster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline_platform.cli import loading
from pipeline_platform.cli.dagster_instance import dagster_instance, known
from pipeline_platform.cli.failure_commands import Json
from pipeline_platform.cli.loading import counted
from pipeline_platform.cli.output import print_json
from pipeline_platform.cli.status_data import (
    DagsterRuns,
    FailuresStatus,
    InFlightStatus,
    PipelineStatus,
    ProducerStatus,
    ReceivesStatus,
    RunStatus,
    Shared,
    StatusOutput,
)
from pipeline_platform.cli.status_gathering import gather
from pipeline_platform.cli.terminal import duration, plain, say

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
    with dagster_instance() as instance, loading.opened(None, known(instance)) as opened:
        found = gather(opened, instance, [opened.pipeline(pipeline)] if pipeline else None)
    if as_json:
        print_json(found)
        return
    say(f"Control store: {found.control_store}\nLake: {found.lake}")
    for table in tables(found):
        Console().print(table)


def tables(found: StatusOutput) -> Iterator[Table]:
    """Yield a table for each pipeline."""
    for name, pipeline in found.pipelines.items():
        table = Table(title=name, title_justify="left", title_style="bold", box=None, show_header=False)
        table.add_column(style="dim")
        table.add_column()
        for label, value in _rows(pipeline, found.at).items():
            table.add_row(label, Text(plain(str(value)), value.style if isinstance(value, Text) else ""))
        yield table


def _rows(pipeline: PipelineStatus, at: datetime) -> _Rows:
    rows: _Rows = {}
    for name, producer in pipeline.producers.items():
        rows |= {f"{name}: {label}" if name else label: value for label, value in _producer(producer, at).items()}
    if retries := pipeline.retries:
        if retries.overrides:
            rows["set at run time"] = _overrides(retries)
        common_rows = {"state": _state(retries, "not paused"), **_in_flight(retries.in_flight, at)}
        rows |= {f"retries, replays: {label}": value for label, value in common_rows.items()}
    rows |= {**_runs(pipeline.runs), **_receives(pipeline.receives), **_failures(pipeline.failures)}
    if pipeline.changed_types:
        rows["changed types"] = Text("\n".join(pipeline.changed_types.values()), style="red")
    if found := pipeline.redelivered:
        times = f"returned up to {found.deliveries:,} times without a decision"
        text = f"{counted(found.messages, 'message')}, {times}, the oldest since window {found.first_window}"
        rows["redelivered"] = Text(text, style="yellow")
    return rows


def _producer(producer: ProducerStatus, at: datetime) -> _Rows:
    rows: _Rows = {"now": producer.summary, **_backlog(producer, at)}
    rows["state"] = _state(producer, str(producer.requests))
    if producer.overrides:
        rows["set at run time"] = _overrides(producer)
    if limit := producer.rate_limit:
        origin = ", set at run time" if limit.is_set_at_run_time else ""
        rows["rate limit"] = f"{counted(limit.allowed_messages, 'message')} every {duration(limit.interval_s)}{origin}"
        rows["permits"] = f"{limit.permits_left:,} left in the current interval"
    else:
        rows["rate limit"] = "none"
    return rows | _in_flight(producer.in_flight, at)


def _backlog(producer: ProducerStatus, at: datetime) -> _Rows:
    backlog = producer.backlog
    if backlog.error is not None:
        return {"backlog": Text(backlog.error, style="red")}
    oldest: str | Text = "none waiting" if backlog.messages == 0 else "unknown: the source does not report it"
    if backlog.oldest_at is not None:
        age_s, allowed_s = (at - backlog.oldest_at).total_seconds(), backlog.oldest_allowed_s
        oldest = f"{duration(age_s)} ago"
        if allowed_s is not None and age_s > allowed_s:
            oldest = Text(f"{oldest}, longer than oldest_allowed ({duration(allowed_s)})", style="yellow")
    is_unknown = backlog.messages is None and not backlog.is_endless
    count = f"unknown: {producer.source} does not report it" if is_unknown else f"{backlog.text} in {producer.source}"
    lost: _Rows = {"lost": Text(backlog.lost, style="red")} if backlog.lost else {}
    return {"backlog": count, "oldest": oldest, **lost}


def _state(shared: Shared, otherwise: str) -> str | Text:
    return Text(str(shared.pause), style="yellow") if shared.pause else otherwise


def _overrides(shared: Shared) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in shared.overrides.items())


def _in_flight(in_flight: InFlightStatus, at: datetime) -> _Rows:
    leased = [run for run in in_flight.runs if run.state == "leased"]
    rows: _Rows = {"in flight": f"{in_flight.messages:,} messages in {counted(len(leased), 'run')}"}
    for run in in_flight.runs:
        rows[f"  run {run.run_id[:8]}"] = _run(run, at)
        if run.slow_tasks:
            rows[f"  slow in {run.run_id[:8]}"] = Text(run.slow_tasks, style="yellow")
    return rows


def _run(run: RunStatus, at: datetime) -> str | Text:
    count = counted(run.messages, "message")
    if run.started_at is None or run.claim_expires_at is None:
        return f"will lease up to {count}"
    left_s = (run.claim_expires_at - at).total_seconds()
    if run.state == "expired":
        return Text(f"{count}, crashed or stalled: claim expired {duration(-left_s)} ago", style="yellow")
    began = duration((at - run.started_at).total_seconds())
    return f"{count}, started {began} ago, claim expires in {duration(left_s)}"


def _runs(runs: DagsterRuns) -> _Rows:
    if runs.error is not None:
        return {"runs in Dagster": Text(runs.error, style="yellow")}
    live = ", ".join(f"{count:,} {state.replace('_', ' ')}" for state, count in runs.by_state.items())
    rows: _Rows = {"runs in Dagster": live or "none under way"}
    if runs.crashed:
        text = f"{_ids(runs.crashed)}: leased no messages; Dagster will mark the "
        rows["  crashed"] = Text(f"{text}{'run' if len(runs.crashed) == 1 else 'runs'} as failed", style="yellow")
    return rows


def _receives(receives: ReceivesStatus) -> _Rows:
    rows: _Rows = {}
    for name, found in (("undecided", receives.undecided), ("unfinished", receives.unfinished)):
        texts = [f"{each.receive_id[:8]} of run {each.run_id[:8]} ({each.phase})" for each in found]
        rows[f"{name} receives"] = ", ".join(texts) or "none"
    if receives.unfinished:
        why = "the next run finishes this; see the check `acknowledged`"
        rows["unfinished receives"] = f"{rows['unfinished receives']}; {why}"
    if receives.unreadable:
        rows["unreadable receives"] = Text("\n".join(receives.unreadable), style="red")
    return rows


def _failures(failures: FailuresStatus) -> _Rows:
    if not failures.open:
        return {"open failures": "none"}
    rows: _Rows = {"open failures": Text(_counted(failures.open, failures.dead), style="yellow")}
    rows |= {f"  window {each.window}": _counted(each.open, each.dead) for each in failures.largest}
    if others := failures.windows - len(failures.largest):
        rows["  other windows"] = f"{others:,}, from {failures.first_window} to {failures.last_window}"
    return rows


def _counted(open_: int, dead: int) -> str:
    return f"{open_:,}, {dead:,} of them dead" if dead else f"{open_:,}"


def _ids(run_ids: Iterable[str]) -> str:
    return ", ".join(run_id[:8] for run_id in run_ids)
