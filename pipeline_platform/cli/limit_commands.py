"""`pipeline-platform pause`, `resume`, `drain`, `limit` and `scale`: changes of a pipeline at run time."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Annotated, Any, Literal

import typer
from pydantic import Field

from pipeline_platform.cli import loading
from pipeline_platform.cli.dagster_instance import Instance, dagster_instance
from pipeline_platform.cli.history_command import Why, record
from pipeline_platform.cli.loading import counted
from pipeline_platform.cli.options import Json, Name
from pipeline_platform.cli.output import Output, print_json
from pipeline_platform.cli.status.status_data import RateLimit
from pipeline_platform.cli.status.status_gathering import requests_of
from pipeline_platform.cli.terminal import duration, say
from pipeline_platform.control.claims import count_runs
from pipeline_platform.control.drain import DrainCancelledError, under_way
from pipeline_platform.control.drain import drain as drain_and_wait
from pipeline_platform.control.quota import Quota
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.options import Overrides
from pipeline_platform.model.strict_options import PipelineError
from pipeline_platform.source.contract import SourceError

_SHORTEST_S, _LONGEST_S = 0.001, 366 * 86_400

PauseReason = Annotated[str, typer.Option(help="Shown while the pipeline is paused.")]
DrainReason = Annotated[
    str | None,
    typer.Option(help="Shown while the pipeline is paused.  [default: the reason of its pause, if it is paused]"),
]
_Of = Annotated[str, typer.Option("--producer", help="Only this producer of the pipeline.")]


class PauseOutput(Output):
    """Output of `pause` and `resume`."""

    key: str = Field(description="The pipeline, or `<pipeline>/<producer>`.")
    state: Literal["active", "paused"] = Field(description="Whether runs receive messages.")
    reason: str | None = Field(description="Reason of the pause. Null if it is not paused.")


class DrainOutput(PauseOutput):
    """Output of `drain`."""

    active_runs: int = Field(description="Runs that are still active, for example because a `resume` ended the drain.")
    crashed_runs: int = Field(description="Crashed runs. The first run after `resume` finishes their receives.")


class LimitOutput(Output):
    """Output of `limit`."""

    key: str = Field(description="The pipeline, or `<pipeline>/<producer>`.")
    rate_limit: RateLimit | None = Field(description="The current rate limit. Null without a limit.")


class ScaleOutput(Output):
    """Output of `scale`."""

    key: str = Field(description="The pipeline, or `<pipeline>/<producer>`.")
    overrides: dict[str, int] = Field(description="Options that were changed at run time.")


@contextmanager
def chosen_producer(
    name: str, producer: str, *, as_json: bool = False, several: str = ""
) -> Iterator[tuple[loading.Deployment, BoundProducer]]:
    """Open the deployment, and yield it with a producer; without a name, the only producer or the whole pipeline.

    `several` is what a pipeline with several producers has, if the command needs one of them.
    """
    with loading.opened() as opened:
        pipeline = opened.pipeline(name)
        try:
            of = BoundProducer(pipeline, producer)
        except PipelineError as error:
            raise typer.BadParameter(str(error), param_hint="--producer") from None
        if several and of.is_whole_pipeline:
            choice = f"{name} has {several}. Choose one of {', '.join(pipeline.producers)}."
            raise typer.BadParameter(choice, param_hint="--producer")
        say(f"Control store: {opened.control}", err=as_json)
        yield opened, of


def pause(
    pipeline: Name, reason: PauseReason = "paused on the command line", producer: _Of = "", as_json: Json = False
) -> None:
    """Pause a pipeline: runs receive no more messages. Messages that a run has received are still handled."""
    with chosen_producer(pipeline, producer, as_json=as_json) as (opened, of):
        opened.control.pause(of.key, reason)
        record(opened, of.key, "pause", reason)
        claims = [claim for claim in under_way(opened.control, of.key) if not claim.is_stand_by]
    if as_json:
        print_json(PauseOutput(key=of.key, state="paused", reason=reason))
        return
    messages = counted(sum(claim.messages for claim in claims), "message")
    runs = counted(count_runs(claims), "run")
    rest = f"{messages} in {runs} will still be handled" if claims else "No messages are in flight"
    say(f"Paused {of.key}: {reason}. {rest}.")


def resume(pipeline: Name, reason: Why = "", producer: _Of = "", as_json: Json = False) -> None:
    """Resume a paused pipeline. A producer that was paused with --producer stays paused until resumed with it."""
    with dagster_instance() as instance, chosen_producer(pipeline, producer, as_json=as_json) as (opened, of):
        control, key = opened.control, of.key
        before = control.paused(key) or any(Quota(each, control).breaker_pause for each in of.each)
        control.resume(key)
        record(opened, key, "resume", reason)
        if as_json:
            still = control.paused(key)
            print_json(PauseOutput(key=key, state="active" if still is None else "paused", reason=still))
            return
        if before and not control.paused(key):
            say(f"Resumed {key}.")
        elif not before:
            say(f"{key} was not paused.")
        for each in of.each:
            say(f"{each.key} {_resumed(opened, each, instance)}")


def _resumed(opened: loading.Deployment, producer: BoundProducer, instance: Instance) -> str:
    if paused := opened.control.paused(producer.key):
        return f"is still paused: {paused}"
    try:
        opened.sources[producer.source].backlog()
    except SourceError as error:
        return f"is not paused, but no runs are requested: {producer.source} {error.summary}: {error}"
    return f"is {requests_of(producer, instance)}."


def drain(pipeline: Name, reason: DrainReason = None, producer: _Of = "", as_json: Json = False) -> None:
    """Pause a pipeline, stop its active runs, and wait until they have ended.

    Runs start messages for another `shutdown` (an option of the pipeline). Handled messages are batched, published and
    acknowledged. Other messages are released to the source. The pipeline stays paused until `resume`. Exits with 1 if
    the pipeline is resumed or paused during the drain.
    """
    with chosen_producer(pipeline, producer, as_json=as_json) as (opened, of):
        control, key = opened.control, of.key
        reason = reason or control.paused(key) or "drained on the command line"
        record(opened, key, "drain", reason)  # before, because the command waits, and may be interrupted
        cancelled = None
        try:
            say(drain_and_wait(control, of, reason, log=lambda text: say(text, err=as_json)), err=as_json)
        except DrainCancelledError as error:
            cancelled = error
        if as_json:
            paused, crashed = control.paused(key), control.over(key, of_all="/" not in key)
            state: Literal["active", "paused"] = "active" if paused is None else "paused"
            runs = {"active_runs": count_runs(under_way(control, key)), "crashed_runs": count_runs(crashed)}
            print_json(DrainOutput(key=key, state=state, reason=paused, **runs))
        if cancelled is not None:
            raise cancelled


def limit(
    pipeline: Name,
    allowed: Annotated[int | None, typer.Option(min=1, max=10**12, help="Messages per interval.")] = None,
    interval: Annotated[float | None, typer.Option(help="Length of an interval in seconds.")] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Reset the rate limit to that of the class.")] = False,
    reason: Why = "",
    producer: _Of = "",
    as_json: Json = False,
) -> None:
    """Change the rate limit. The change applies from the next permits. Without options, print the current limit."""
    if reset and (allowed is not None or interval is not None):
        raise typer.BadParameter("--reset cannot be combined with --allowed or --interval.")
    if interval is not None and not _SHORTEST_S <= interval <= _LONGEST_S:
        raise typer.BadParameter(f"--interval must be {_SHORTEST_S} to {_LONGEST_S} seconds, got {interval}.")
    span = None if interval is None else timedelta(seconds=interval)
    with chosen_producer(pipeline, producer, as_json=as_json, several="a rate limit per producer") as (opened, of):
        control, key, own = opened.control, of.key, of.options.rate_limiting
        if reset:
            control.set_rate_limiting(key, None)
        elif allowed is not None or span is not None:
            try:
                control.update_rate_limiting(key, own, allowed_messages=allowed, interval=span)
            except ValueError:
                raise typer.BadParameter(f"{key} has no rate limit. Give both --allowed and --interval.") from None
        if reset or allowed is not None or span is not None:
            record(opened, key, "limit", reason, allowed=allowed, interval=interval, reset=reset)
        now = control.rate_limiting(key, own)
    if as_json:
        rate = now and RateLimit(allowed_messages=now.allowed_messages, interval_s=now.interval.total_seconds())
        print_json(LimitOutput(key=key, rate_limit=rate))
    elif now is None:
        say(f"{key} has no rate limit.")
    else:
        every = duration(now.interval.total_seconds())
        say(f"Rate limit of {key}: {counted(now.allowed_messages, 'message')} every {every}.")


def scale(
    pipeline: Name,
    concurrency: Annotated[int | None, typer.Option(help="Number of tasks that handle messages in parallel.")] = None,
    max_demand: Annotated[int | None, typer.Option(help="Maximum number of messages per task and run.")] = None,
    max_runs: Annotated[int | None, typer.Option(help="Maximum number of active runs.")] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Reset the options to those of the class.")] = False,
    reason: Why = "",
    producer: _Of = "",
    as_json: Json = False,
) -> None:
    """Override options of the class. The change applies from the next run. Without options, print the overrides."""
    given: dict[str, Any] = {"concurrency": concurrency, "max_demand": max_demand, "max_runs": max_runs}
    try:
        changes = Overrides(**given)
        if reset and any(value is not None for value in given.values()):
            raise PipelineError("--reset cannot be combined with other options.")
        with chosen_producer(pipeline, producer, as_json=as_json) as (opened, of):
            if reset:
                opened.control.reset_overrides(of.pipeline, producer)
            now, key = opened.control.override(of.pipeline, changes, producer), of.key
            if reset or any(value is not None for value in given.values()):
                record(opened, key, "scale", reason, reset=reset, **given)
    except PipelineError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        print_json(ScaleOutput(key=key, overrides=now.model_dump(exclude_none=True)))
        return
    say(f"Overrides of {key}: {str(now) or 'none'}.")
