"""`pipeline-platform pause`, `resume`, `drain`, `limit` and `scale`: what a pipeline may do, changed while it runs."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Annotated

import typer

from pipeline_platform.cli import loading
from pipeline_platform.cli.dagster_instance import Instance, asking, dagster_instance
from pipeline_platform.cli.failure_commands import Json, Name
from pipeline_platform.cli.loading import counted
from pipeline_platform.cli.terminal import say
from pipeline_platform.control.drain import drain as drain_and_wait
from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.options import Overrides, Producer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.strict_options import PipelineError
from pipeline_platform.source.contract import SourceError

_SHORTEST_S, _LONGEST_S = 0.001, 366 * 86_400

Reason = Annotated[str, typer.Option(help="Shown while the pipeline is paused.")]
DrainReason = Annotated[
    str | None,
    typer.Option(help="Shown while the pipeline is paused.  [default: that of its pause, if it is paused]"),
]
Of = Annotated[str, typer.Option("--producer", help="This producer only, where the pipeline has several.")]


@contextmanager
def chosen(name: str, producer: str, *, as_json: bool = False) -> Iterator[tuple[loading.Deployment, type[Pipeline]]]:
    """The deployment, and the pipeline of this name, which has the producer."""
    with loading.opened() as opened:
        pipeline = opened.pipeline(name)
        try:
            pipeline.producers_of(producer)
        except PipelineError as error:
            raise typer.BadParameter(str(error), param_hint="--producer") from None
        say(f"Control store: {opened.control}", err=as_json)
        yield opened, pipeline


@contextmanager
def _of(
    name: str, producer: str, *, as_json: bool = False
) -> Iterator[tuple[ControlStore, str, Mapping[str, Producer]]]:
    """The control store, what it knows the producer or the whole pipeline by, and of which producers that is."""
    with chosen(name, producer, as_json=as_json) as (opened, pipeline):
        of_keys = {pipeline.limits_key(one): options for one, options in pipeline.producers_of(producer).items()}
        yield opened.control, pipeline.limits_key(producer), of_keys


def pause(pipeline: Name, reason: Reason = "paused on the command line", producer: Of = "") -> None:
    """Stop all runs from taking on messages; messages that a run has received are finished."""
    with _of(pipeline, producer) as (control, key, _):
        control.pause(key, reason)
        in_flight = control.in_flight(key, of_all=not producer)
    messages = counted(sum(claim.messages for claim in in_flight), "message")
    runs = counted(len(in_flight), "run")
    going_on = f"{messages} in {runs} will still be finished" if in_flight else "No run holds any"
    say(f"{key} is paused: {reason}. {going_on}.")


def resume(pipeline: Name, producer: Of = "") -> None:
    """End a pause; a producer that was paused by its name stays paused until it is named."""
    with dagster_instance() as instance, chosen(pipeline, producer) as (opened, of):
        control, key = opened.control, of.limits_key(producer)
        before = control.paused(key)
        control.resume(key)
        still = {name: why for name in of.producers_of(producer) if (why := control.paused(of.limits_key(name)))}
        if before and not control.paused(key):
            say(f"{key} is resumed.")
        elif not before:
            say(f"{key} was not paused.")
        for name, options in of.producers_of(producer).items():
            paused = still.get(name)
            say(f"{of.limits_key(name)} {_resumed(opened, of, name, options, instance, paused)}")


def _resumed(
    opened: loading.Deployment,
    pipeline: type[Pipeline],
    producer: str,
    options: Producer,
    instance: Instance,
    paused: str | None,
) -> str:
    if paused:
        return f"stays paused: {paused}"
    try:
        opened.sources[options.source].backlog()
    except SourceError as error:
        return f"is not paused, but no runs are asked for: {options.source} {error.summary}: {error}"
    state = asking(pipeline, producer, instance)
    return f"{state}." if state == "asks for runs" else f"is {state}."


def drain(pipeline: Name, reason: DrainReason = None, producer: Of = "") -> None:
    """Pause a pipeline, stop its runs after the messages that they have begun, and wait for them.

    Runs begin messages for the pipeline's `shutdown` more. What was handled by then is delivered, published and
    acknowledged. The pipeline stays paused until `resume`.
    """
    with chosen(pipeline, producer) as (opened, of):
        reason = reason or opened.control.paused(of.limits_key(producer)) or "drained on the command line"
        say(drain_and_wait(opened.control, of, reason, producer, log=say))


def limit(
    pipeline: Name,
    allowed: Annotated[int | None, typer.Option(min=1, max=10**12, help="Messages handled in an interval.")] = None,
    interval: Annotated[float | None, typer.Option(help="Length of an interval, seconds.")] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Back to the pipeline's own option.")] = False,
    producer: Of = "",
    as_json: Json = False,
) -> None:
    """Change the rate limit, from the next permits on; without options, print the present one."""
    if reset and (allowed is not None or interval is not None):
        raise typer.BadParameter("--reset goes back to the pipeline's own limit; give it alone")
    if interval is not None and not _SHORTEST_S <= interval <= _LONGEST_S:
        raise typer.BadParameter(f"--interval is {interval}; give seconds, from {_SHORTEST_S} to {_LONGEST_S}")
    span = None if interval is None else timedelta(seconds=interval)
    with _of(pipeline, producer, as_json=as_json) as (control, key, producers):
        if key not in producers:
            names = ", ".join(each.partition("/")[2] for each in producers)
            several = f"each producer of {pipeline} has a limit of its own: choose one of {names}"
            raise typer.BadParameter(several, param_hint="--producer")
        own = producers[key].rate_limiting
        if reset:
            control.set_rate_limiting(key, None)
        elif allowed is not None or span is not None:
            try:
                control.update_rate_limiting(key, own, allowed_messages=allowed, interval=span)
            except ValueError:
                raise typer.BadParameter(
                    f"{key} has no rate limit to change a part of; give both --allowed and --interval"
                ) from None
        holds = control.rate_limiting(key, own)
    if as_json:
        rate = holds and {"allowed_messages": holds.allowed_messages, "interval_s": holds.interval.total_seconds()}
        typer.echo(json.dumps({key: rate}))
    elif holds is None:
        say(f"{key} has no rate limit.")
    else:
        say(f"{key} handles at most {holds.allowed_messages:,} messages in {holds.interval}.")


def scale(
    pipeline: Name,
    concurrency: Annotated[int | None, typer.Option(help="Tasks that handle messages at once.")] = None,
    max_demand: Annotated[int | None, typer.Option(help="Messages that one task takes on in a run.")] = None,
    max_runs: Annotated[int | None, typer.Option(help="Runs that may be under way at once.")] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Back to the pipeline's own options.")] = False,
    producer: Of = "",
    as_json: Json = False,
) -> None:
    """Change options from the next run on, in place of the class's own; without options, print the changed ones."""
    given = {"concurrency": concurrency, "max_demand": max_demand, "max_runs": max_runs}
    try:
        changes = Overrides(**given)
        if reset and any(value is not None for value in given.values()):
            raise PipelineError("--reset goes back to the pipeline's own options; give it alone")
        with chosen(pipeline, producer, as_json=as_json) as (opened, of):
            if reset:
                opened.control.reset_overrides(of, producer)
            now, key = opened.control.override(of, changes, producer), of.limits_key(producer)
    except PipelineError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps({key: now.model_dump()}))
        return
    say(f"{key}: {str(now) or 'nothing is changed; its own options hold'}.")
