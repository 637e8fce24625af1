"""Drawing of one pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from pipeline_platform.cli.dashboard.bars import gauge, sparkline, time_line
from pipeline_platform.cli.dashboard.figures import SIGNS, count, line, oldest, rate, seconds, state_of, waiting
from pipeline_platform.cli.dashboard.picture import TIME_LINE, Minute, Picture, PipelinePicture, RunLine, Stage
from pipeline_platform.cli.status.status_data import ProducerStatus
from pipeline_platform.cli.terminal import duration, plain

WIDE = 130
"""Width from which a pipeline has its stages beside its history."""
_LABEL = 9
_RUN_STYLES = {"crashed": "bold red", "failed": "red", "working": "green", "succeeded": "green"}
_ORIGINS = {"failed": "retry, ", "messages": "replay, "}


def draw_pipeline(pipeline: PipelinePicture, picture: Picture, width: int) -> list[RenderableType]:
    """Return a pipeline: its problems, stages and latency; and below or beside them its last hour, runs and causes."""
    title = Text.assemble((plain(pipeline.name), "bold"), "  ", state_of(pipeline))
    rule = Rule(title, align="left", style="dim")
    now: list[RenderableType] = [*_notes(pipeline, picture), _stages(pipeline), *_latency(pipeline)]
    is_wide = width >= WIDE
    room = width // 2 - 2 if is_wide else width
    history: list[RenderableType] = [
        *_history(pipeline.minutes, room),
        *_runs(pipeline, picture, room),
        *_causes(pipeline),
    ]
    if not is_wide:
        return [rule, *now, *history, Text("")]
    beside = Table.grid(padding=(0, 2, 0, 0), expand=True)
    beside.add_column(ratio=1)
    beside.add_column(ratio=1)
    beside.add_row(Group(*now), Group(*history))
    return [rule, beside, Text("")]


def _notes(pipeline: PipelinePicture, picture: Picture) -> Iterator[Text]:
    """Yield a line for each problem, and for each part that is unknown or old."""
    look = pipeline.look
    if look.waits_for:
        known = f"; the state below is {duration((picture.at - look.at).total_seconds())} old" if look.at else ""
        yield line(f"? waiting for {look.waits_for} for {duration(look.waits_s)}{known}", "yellow")
    if look.error:
        yield line(f"? state unknown: {look.error}", "yellow")
    for part, why in pipeline.unknown.items():
        yield line(f"? {part} unknown: {why}", "yellow")
    if look.status is None:
        return
    for name, producer in look.status.producers.items():
        if producer.pause and not producer.pause.by_breaker:  # that is a problem
            yield line(f"‖ {name} {producer.pause}", "yellow")
    for problem in look.status.problems:
        sign, style = SIGNS[problem.health]
        of = f"{problem.producer}: " if problem.producer else ""
        yield line(f"{sign} {of}{problem.text}", style)


def _stages(pipeline: PipelinePicture) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", expand=False)
    table.add_column("stage", no_wrap=True, max_width=24, overflow="ellipsis")
    table.add_column("rate", justify="right", no_wrap=True)
    table.add_column("fill", no_wrap=True)
    table.add_column("s", justify="right", no_wrap=True)
    table.add_column("")  # the only column that may wrap
    status, stages, look = pipeline.look.status, pipeline.stages, pipeline.look
    producers = status.producers if status else {}
    for name, producer in producers.items():
        in_flight, capacity = producer.in_flight.messages, pipeline.capacity.get(name, 0)
        table.add_row(
            Text(plain(producer.source), "bold"),
            rate(producer.messages_per_s),
            _fill(in_flight / capacity if capacity else None),
            seconds(stages.get("receive", Stage())),
            Text.assemble(*_of_source(producer, look.at)),
        )
    batchers = {name: stage for name, stage in stages.items() if name not in ("receive", "handle")}
    handle = stages.get("handle", Stage())
    table.add_row("└─ handle", rate(handle.rate), _fill(handle.busy), seconds(handle), "")
    for name, stage in batchers.items():
        size = f" of {stage.batch_size:,}" if stage.batch_size else ""
        batches = f"batches of {stage.batch:,.0f}{size}, " if stage.batch is not None else ""
        row = f"   ├─ {plain(name)}", rate(stage.rate), _fill(stage.busy), seconds(stage)
        table.add_row(*row, f"{batches}→ {stage.stored_in}")
    table.add_row("   └─ failures", *_of_failures(pipeline))
    return table


def _of_source(producer: ProducerStatus, at: datetime | None) -> Iterator[str | tuple[str, str]]:
    backlog = producer.backlog
    if backlog.error is not None:
        yield "backlog unknown", "red"
    elif backlog.is_endless:
        yield "endless"
    elif backlog.messages is None:
        yield "backlog unknown"
    else:
        yield f"{waiting([producer])} waiting"
    if age := oldest([producer], at):
        yield f", {age} old"
    yield f", {count(producer.in_flight.messages)} in flight"
    if limit := producer.rate_limit:
        yield f", limit {count(limit.allowed_messages)} per {duration(limit.interval_s)}"


def _of_failures(pipeline: PipelinePicture) -> Iterator[RenderableType]:
    """Yield the cells of the last row of the stages."""
    failed = [minute.failed for minute in pipeline.minutes[-5:]]
    yield "" if not failed or None in failed else rate(sum(filter(None, failed)) / 300)
    yield ""
    yield ""
    status, look = pipeline.look.status, pipeline.look
    if status is None:
        yield "unknown"
        return
    failures, retries = status.failures, ""
    if failures.scheduled:
        retries = f", {failures.scheduled:,} to retry"
        if failures.due_at and look.at:
            due_s = (failures.due_at - look.at).total_seconds()
            retries += f" {f'in {duration(due_s)}' if due_s > 0 else f'since {duration(-due_s)}'}"
    windows = f" in {failures.windows:,} windows" if failures.windows > 1 else ""
    style = "red" if failures.dead else "yellow" if failures.open else "green"
    yield Text(f"{count(failures.open)} open{windows}, {count(failures.dead)} dead{retries}", style)


def _fill(share: float | None) -> Text:
    if share is None:
        return Text("")
    style = "red" if share >= 0.95 else "yellow" if share >= 0.8 else "green"
    return Text(f"{gauge(min(1.0, share), 8)} {share:4.0%}", style)


def _latency(pipeline: PipelinePicture) -> Iterator[Text]:
    if pipeline.latency:
        p50, p95, p99 = (duration(each) for each in pipeline.latency)
        yield Text.assemble(("latency  ", "dim"), f"p50 {p50}, p95 {p95}, p99 {p99}")


def _history(minutes: Iterable[Minute], width: int) -> Iterator[Text]:
    minutes = list(minutes)
    if not minutes:
        return
    room = max(10, min(60, width - _LABEL - 11))
    plots: dict[str, tuple[list[float | None], str, str]] = {
        "messages": ([minute.messages for minute in minutes], "cyan", "{:,.0f}/min"),
        "failed": ([minute.failed for minute in minutes], "red", "{:,.0f}/min"),
        "p95": ([minute.latency_s for minute in minutes], "magenta", ""),
    }
    yield Text("last hour, and its highest minute", "dim")
    for name, (values, style, form) in plots.items():
        most = max((value for value in values if value is not None), default=0.0)
        if name == "messages" or most:
            label = form.format(most) if form else duration(most)
            yield Text.assemble((f"{name:<{_LABEL}}", "dim"), (sparkline(values, room), style), f" {label}")


def _runs(pipeline: PipelinePicture, picture: Picture, width: int) -> Iterator[Text]:
    if not pipeline.runs:
        yield Text(f"no runs in the last {duration(TIME_LINE.total_seconds())}", "dim")
        return
    yield Text(f"runs of the last {duration(TIME_LINE.total_seconds())}", "dim")
    room = max(10, min(60, width - _LABEL - 30))
    for run in pipeline.runs:
        style = _RUN_STYLES.get(run.state, "yellow" if run.state == "queued" else "")
        bars = time_line(run, picture.at - TIME_LINE, picture.at, room)
        text = Text(no_wrap=True, overflow="ellipsis")
        yield text.append(f"{run.run_id[:8]:<{_LABEL}}", "dim").append(bars, style).append(f" {_of_run(run)}")


def _of_run(run: RunLine) -> str:
    rounds = f", round {run.rounds:,}" if run.rounds else ""
    messages = f", {count(run.messages)}" if run.messages else ""
    return f"{_ORIGINS.get(run.origin, '')}{run.state}{rounds}{messages}"


def _causes(pipeline: PipelinePicture) -> Iterator[Text]:
    causes, of, _ = pipeline.look.causes
    if not causes:
        return
    status = pipeline.look.status
    is_part = status is not None and of < status.failures.open
    yield Text(f"causes of the {of:,} newest failures" if is_part else "causes of open failures", "dim")
    for each in causes:
        kind = f"{each.kind}: " if each.kind else ""
        yield Text(f"{each.messages:>{_LABEL - 2},}  ", no_wrap=True, overflow="ellipsis").append(
            line(f"{kind}{each.cause}")
        )
