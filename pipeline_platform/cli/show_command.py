"""`pipeline-platform show`: the current options of pipelines, including changes at run time."""

import inspect
import json
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from pydantic import BaseModel, Field

from pipeline_platform.cli import loading
from pipeline_platform.cli.options import Json, OptionalName
from pipeline_platform.cli.output import Output, print_json
from pipeline_platform.cli.terminal import duration, say
from pipeline_platform.control.quota import Quota
from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.blocks import name_of
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.strict_options import Options

_ELSEWHERE = ("name", "producer", "producers", "processors", "batchers", "context")
"""Options of the class that are shown separately; the context is not shown, because it may contain secrets."""


class PipelineOptions(Output):
    """The current options of a pipeline. Times are in seconds; functions and classes are shown by their names."""

    producers: dict[str, dict[str, Any]] = Field(
        description="Options of [`Producer`](options.md#producer) by name; a single producer has an empty name. In "
        "addition `paused` (the reason, or null) and `set_at_run_time` (options that were changed)."
    )
    processors: dict[str, Any] = Field(description="Options of [`Processors`](options.md#processors).")
    batchers: dict[str, dict[str, Any]] = Field(
        description="Batchers by name: `class`, and the options of [`TableBatcher`](options.md#tablebatcher) or "
        "[`Batcher`](options.md#batcher)."
    )
    options: dict[str, Any] = Field(
        description="[Other options of the class](options.md#pipeline), without `context`, which may contain secrets."
    )


class ShowOutput(Output):
    """Output of `show`."""

    control_store: str = Field(description="URL of the control store, without the password.")
    lake: str = Field(description="Root of the lake.")
    pipelines: dict[str, PipelineOptions] = Field(description="Pipelines by name.")


def show(
    pipeline: OptionalName = None,
    as_json: Json = False,
) -> None:
    """Show the sources, processors, batchers, tables and current limits of pipelines."""
    with loading.opened() as opened:
        chosen = [opened.pipeline(pipeline)] if pipeline else list(opened.pipelines.values())
        if as_json:
            found = {each.name: _data(opened.control, each) for each in chosen}
            print_json(ShowOutput(control_store=str(opened.control), lake=opened.lake.root, pipelines=found))
            return
        say(f"Control store: {opened.control}", f"Lake: {opened.lake.root}")
        for each in chosen:
            say("", each.name, *(f"  {line}" for line in _lines(opened, each)))


def _data(control: ControlStore, pipeline: type[Pipeline]) -> PipelineOptions:
    producers = {}
    for producer in BoundProducer.all_of(pipeline):
        key = producer.key
        limit, paused = control.rate_limiting(key, producer.options.rate_limiting), Quota(producer, control).paused
        now = {"rate_limiting": limit, "paused": paused, "set_at_run_time": control.overrides(key)}
        producers[producer.name] = dict(control.options_of(producer)) | now
    batchers = {name: {"class": type(batcher).__name__, **dict(batcher)} for name, batcher in pipeline.batchers.items()}
    items = {"producers": producers, "processors": control.processors_of(pipeline), "batchers": batchers}
    return PipelineOptions(**json.loads(json.dumps({**items, "options": _own(pipeline)}, default=_plain)))


def _plain(value: object) -> object:
    """Return an option's value for JSON: times in seconds, functions and classes by their names."""
    if isinstance(value, BaseModel):
        return dict(value)
    return value.total_seconds() if isinstance(value, timedelta) else _spelt(value)


def _lines(opened: loading.Deployment, pipeline: type[Pipeline]) -> list[str]:
    control, lines = opened.control, []
    for producer in BoundProducer.all_of(pipeline):
        kind = type(opened.sources[producer.source]).__name__
        options = _options(control.options_of(producer), "source", "rate_limiting")
        lines.append(f"producer {producer.name}: " if producer.name else "producer: ")
        lines[-1] += f"{producer.source} ({kind}), {options}"
        lines += [f"  {line}" for line in _limits(control, producer)]
    lane = "handle_messages in Spark" if pipeline.uses_columns() else "handle_message by row"
    if kind := pipeline.block_type():
        lane = f"handle_messages by block ({name_of(kind)})"
    lines.append(f"processors: {lane}; {_options(control.processors_of(pipeline))}")
    if at_run_time := str(control.overrides(pipeline.name)):
        lines.append(f"  set at run time: {at_run_time}")
    for name, batcher in pipeline.batchers.items():
        model = batcher.table_schema.__name__ if batcher.table_schema else "JSON"
        lines.append(f"batcher {name}: {type(batcher).__name__} of {model}, {_options(batcher, 'table_schema')}")
    own_options = _own(pipeline)
    windows, shutdown = own_options.pop("window_cron"), own_options.pop("shutdown")
    if given := _named((name, value) for name, value in own_options.items() if value != getattr(Pipeline, name)):
        lines.append(f"options: {given}")
    tables = ["messages", "outcomes", *pipeline.batchers_with_tables(), "failed"]
    lines.append(f"tables: {', '.join(f'{pipeline.name}/{table}' for table in tables)}")
    return [*lines, f"windows: {windows} (cron, UTC)", f"shutdown: {_spelt(shutdown)}"]


def _limits(control: ControlStore, producer: BoundProducer) -> list[str]:
    key, own = producer.key, producer.options.rate_limiting
    limit, lines = control.rate_limiting(key, own), []
    if limit:
        origin = "" if limit == own else ", set at run time"
        every = duration(limit.interval.total_seconds())
        lines.append(f"rate limit: {loading.counted(limit.allowed_messages, 'message')} every {every}{origin}")
    if producer.name and (at_run_time := str(control.overrides(key))):
        lines.append(f"set at run time: {at_run_time}")
    if paused := Quota(producer, control).paused:
        lines.append(f"paused: {paused}")
    return lines


def _own(pipeline: type[Pipeline]) -> dict[str, Any]:
    """Return the options of the class, without those that are shown separately."""
    names = inspect.get_annotations(Pipeline)
    return {name: getattr(pipeline, name) for name in names if name not in _ELSEWHERE}


def _options(options: BaseModel, *but: str) -> str:
    return _named((name, value) for name, value in options if value is not None and name not in but)


def _named(options: Iterable[tuple[str, object]]) -> str:
    return ", ".join(f"{name} {_spelt(value)}" for name, value in options)


def _spelt(value: object) -> str:
    """Return an option's value as text: a function by its name, nested options in brackets, times with units."""
    if type(value) is int:
        return f"{value:,}"
    if isinstance(value, timedelta):
        return duration(value.total_seconds())
    if isinstance(value, Options):
        return f"{type(value).__name__}({_options(value)})"
    if isinstance(value, Mapping):
        return f"({_named(value.items())})"
    if isinstance(value, list | tuple):
        return " ".join(map(_spelt, value))
    return getattr(value, "__qualname__", None) or str(value)
