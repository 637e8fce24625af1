"""`pipeline-platform status`: state of pipelines, also without a running Dagster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime
from typing import Annotated, NoReturn

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipeline_platform.cli import loading
from pipeline_platform.cli.dagster_instance import dagster_instance, known
from pipeline_platform.cli.dashboard import figures
from pipeline_platform.cli.errors import BROKEN, exiting_with, line_of
from pipeline_platform.cli.loading import counted
from pipeline_platform.cli.options import Json, OptionalName
from pipeline_platform.cli.output import print_json
from pipeline_platform.cli.status.status_data import (
    DagsterRuns,
    FailuresStatus,
    Health,
    InFlightStatus,
    PipelineStatus,
    Problem,
    ProducerStatus,
    ReceivesStatus,
    RunStatus,
    Shared,
    StatusOutput,
)
from pipeline_platform.cli.status.status_gathering import gather
from pipeline_platform.cli.terminal import duration, plain, say
from pipeline_platform.cli.waiting import waiting

_Rows = dict[str, str | Text]

_EVERY_S = 5.0
"""Time between two looks of `--watch`."""
_NAMED = 5
"""Maximum number of receives that are named."""
_STYLES = {Health.HEALTHY: "green", Health.BEHIND: "yellow", Health.FAILING: "yellow", Health.BROKEN: "red"}


def status(
    pipeline: OptionalName = None,
    details: Annotated[
        bool, typer.Option("--details", help="Show the details of each pipeline, also if there are several.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help=f"Repeat every {_EVERY_S:.0f} s until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """Show whether pipelines are healthy: backlog, limits, active runs, unfinished receives and open failures.

    `in flight` counts messages that runs have leased, by their claims in the control store. Runs that have leased no
    messages yet are listed with their demand, as reported by the instance in DAGSTER_HOME. `runs in Dagster` counts its
    queued and started runs. Exits with 1 if a pipeline is behind or failing, and with 2 if it is broken.
    """
    with exiting_with(BROKEN), ExitStack() as stack:
        with waiting("the code of the deployment") as wait:
            instance = stack.enter_context(dagster_instance())
            opened = stack.enter_context(loading.opened(None, known(instance)))
            chosen = [opened.pipeline(pipeline)] if pipeline else list(opened.pipelines.values())
            found = gather(opened, instance, chosen, looking_at=wait.look)

        def look() -> StatusOutput:
            nonlocal instance
            if isinstance(instance, str):  # Dagster may answer by now
                instance = stack.enter_context(dagster_instance())
            return gather(opened, instance, chosen)

        if watch and as_json:
            _each(found, look, print_json, lambda line: say(line, err=True))
        elif watch:
            say(*_places(found))
            with Live(console=Console(), auto_refresh=False) as live:
                _each(
                    found,
                    look,
                    lambda each: live.update(_page(each, details=details), refresh=True),
                    lambda line: live.update(Text(plain(line), style="red"), refresh=True),
                )
        elif as_json:
            print_json(found)
        else:
            say(*_places(found))
            Console().print(_page(found, details=details))
    raise typer.Exit(found.state.exit_code)


def _each(
    found: StatusOutput,
    look: Callable[[], StatusOutput],
    show: Callable[[StatusOutput], object],
    show_error: Callable[[str], object],
) -> NoReturn:
    """Show the state, or why it is unknown, and look again, until Ctrl-C."""
    code = found.state.exit_code
    try:
        show(found)
        while True:
            time.sleep(_EVERY_S)
            try:
                found = look()
            except Exception as error:
                if (line := line_of(error)) is None:
                    raise
                code = BROKEN
                show_error(line)
            else:
                code = found.state.exit_code
                show(found)
    except KeyboardInterrupt:
        raise typer.Exit(code) from None


def _places(found: StatusOutput) -> tuple[str, str]:
    return f"Control store: {found.control_store}", f"Lake: {found.lake}"


def _page(found: StatusOutput, *, details: bool) -> Group:
    """Return the details of a single pipeline, or a line for each pipeline; and the command that finds the cause."""
    parts: list[RenderableType] = []
    if details or len(found.pipelines) == 1:
        parts += _details(found)
    else:
        parts.append(_overview(found))
        parts += [_problem(name, problem) for name, each in found.pipelines.items() for problem in each.problems]
        parts.append(Text("Details of a pipeline: pipeline-platform status NAME", style="dim"))
    if found.state is Health.BROKEN:
        parts.append(Text("Find the cause: pipeline-platform doctor", style="bold"))
    return Group(*parts)


def _overview(found: StatusOutput) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("pipeline", "state", "waiting", "oldest", "in flight", "failures"):
        table.add_column(title, justify="left" if title in ("pipeline", "state") else "right", overflow="fold")
    for name, pipeline in found.pipelines.items():
        producers = list(pipeline.producers.values())
        parts = [*producers, *filter(None, [pipeline.retries])]
        table.add_row(
            Text(plain(name)),
            Text("paused" if _is_paused(pipeline) else pipeline.state, style=_STYLES[pipeline.state]),
            figures.waiting(producers),
            figures.oldest(producers, found.at),
            f"{sum(part.in_flight.messages for part in parts):,}",
            f"{pipeline.failures.open:,}",
        )
    return table


def _is_paused(pipeline: PipelineStatus) -> bool:
    """Whether a healthy pipeline has a paused producer."""
    return pipeline.state is Health.HEALTHY and any(producer.pause for producer in pipeline.producers.values())


def _problem(name: str, problem: Problem) -> Text:
    key = f"{name}/{problem.producer}" if problem.producer else name
    return Text(plain(f"{key}: {problem.text}"), style=_STYLES[problem.health])


def _details(found: StatusOutput) -> Iterator[Table]:
    for name, pipeline in found.pipelines.items():
        table = Table(title=name, title_justify="left", title_style="bold", box=None, show_header=False)
        table.add_column(style="dim")
        table.add_column(overflow="fold")
        for label, value in _rows(pipeline, found.at).items():
            table.add_row(label, Text(plain(str(value)), value.style if isinstance(value, Text) else ""))
        yield table


def _health(pipeline: PipelineStatus) -> Text:
    texts = [f"{each.producer}: {each.text}" if each.producer else each.text for each in pipeline.problems]
    return Text("\n".join([f"{pipeline.state}{':' if texts else ''}", *texts]), style=_STYLES[pipeline.state])


def _rows(pipeline: PipelineStatus, at: datetime) -> _Rows:
    rows: _Rows = {"health": _health(pipeline)}
    for name, producer in pipeline.producers.items():
        rows |= {f"{name}: {label}" if name else label: value for label, value in _producer(producer, at).items()}
    if retries := pipeline.retries:
        if retries.overrides:
            rows["set at run time"] = _overrides(retries)
        common_rows = {"state": _state(retries, "not paused"), **_in_flight(retries.in_flight, at)}
        rows |= {f"retries, replays: {label}": value for label, value in common_rows.items()}
    return rows | _runs(pipeline.runs) | _receives(pipeline.receives) | _failures(pipeline.failures)


def _producer(producer: ProducerStatus, at: datetime) -> _Rows:
    is_known = producer.backlog.error is None  # `health` contains the error
    rows: _Rows = {"now": producer.summary, **_backlog(producer, at)} if is_known else {}
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
        text = f"{', '.join(run_id[:8] for run_id in runs.crashed)}: leased no messages; Dagster will mark the "
        rows["  crashed"] = Text(f"{text}{'run' if len(runs.crashed) == 1 else 'runs'} as failed", style="yellow")
    return rows


def _receives(receives: ReceivesStatus) -> _Rows:
    rows: _Rows = {}
    for name, found in (("undecided", receives.undecided), ("unfinished", receives.unfinished)):
        texts = [f"{each.receive_id[:8]} of run {each.run_id[:8]} ({each.phase})" for each in found[:_NAMED]]
        others = [f"{len(found) - _NAMED:,} others (pipeline-platform receives)"] if len(found) > _NAMED else []
        rows[f"{name} receives"] = ", ".join([*texts, *others]) or "none"
    if receives.unfinished:
        why = "the next run finishes this; see the check `acknowledged`"
        rows["unfinished receives"] = f"{rows['unfinished receives']}; {why}"
    if receives.unreadable:
        rows["unreadable receives"] = Text("\n".join(receives.unreadable[:_NAMED]), style="red")
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
