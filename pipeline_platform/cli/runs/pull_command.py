"""`pipeline-platform pull`: one run that pulls from a source, launched manually."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline_platform.cli import loading
from pipeline_platform.cli.dagster_instance import dagster_instance, known
from pipeline_platform.cli.limit_commands import chosen_producer
from pipeline_platform.cli.loading import counted
from pipeline_platform.cli.options import Json, Name
from pipeline_platform.cli.runs.planned_runs import DryRun, IgnorePause, Launch, PlannedRun, Wait, refuse_paused
from pipeline_platform.cli.terminal import say
from pipeline_platform.control.demand import no_room
from pipeline_platform.control.quota import Quota
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.source.contract import SourceError

if TYPE_CHECKING:
    from pipeline_platform.orchestration.sensors.producer_state import ProducerState

_Of = Annotated[
    str,
    typer.Option(
        "--producer",
        help="Producer to pull from, if the pipeline has several. Default: the producer with the largest backlog.",
    ),
]
Demand = Annotated[int | None, typer.Option(min=1, help="Most messages to pull. Default: as many as a run may handle.")]


def pull(
    pipeline: Name,
    producer: _Of = "",
    demand: Demand = None,
    ignore_pause: IgnorePause = False,
    dry_run: DryRun = False,
    wait: Wait = False,
    as_json: Json = False,
) -> None:
    """Launch one run that pulls from the source, on the instance in DAGSTER_HOME.

    The run pulls into the current window. It stays within the capacity and the rate limit, like runs of the sensor.
    """
    from pipeline_platform.orchestration.asset_windows import NoWindowError, window_now
    from pipeline_platform.orchestration.jobs import run_request

    with chosen_producer(pipeline, producer, as_json=as_json) as (opened, named):
        of = _largest(opened, named.pipeline) if named.is_whole_pipeline else named
        refuse_paused(opened.control, of, ignore_pause=ignore_pause, pulls=True)
        messages = _room(opened, of, demand, explain=dry_run, err=as_json)
        try:
            window = window_now(of.pipeline)
        except NoWindowError as error:
            raise loading.SetUpError(str(error)) from None
        request = run_request(of, "source", [window], expected=messages, demand=demand, ignore_pause=ignore_pause)
        launch = Launch(of.pipeline, f"{pipeline}_pull", dry_run=dry_run, wait=wait, as_json=as_json)
        pulls = f"pulls up to {counted(messages, 'message')} from {of.source} into window {window}"
        runs = launch.carry_out([PlannedRun([window], messages, request)], lambda _: pulls, "message")
    launch.report(runs)


def _largest(opened: loading.Deployment, pipeline: type[Pipeline]) -> BoundProducer:
    from pipeline_platform.orchestration.runs.run_receive import with_most_waiting

    resources = SimpleNamespace(**opened.sources, control=opened.control)
    producer = with_most_waiting(pipeline, resources, lambda _: None)
    say(f"Pulling from producer {producer.name}, which has the largest backlog. Use --producer to choose.", err=True)
    return producer


def _room(opened: loading.Deployment, producer: BoundProducer, demand: int | None, *, explain: bool, err: bool) -> int:
    """Return the most messages that a run could lease now, whatever its source has; with `explain`, print why."""
    from pipeline_platform.orchestration.sensors.producer_state import state_of

    quota, source = Quota(producer, opened.control), opened.sources[producer.source]
    with dagster_instance() as instance:
        state = state_of(producer, source, opened.control, known(instance))
    used = state.in_flight.of_capacity
    free = max(0, quota.capacity - used)
    asked = quota.for_a_pull() if demand is None else demand
    if explain:
        say(f"backlog: {_backlog(state)}", err=err)
        say(f"capacity: {counted(quota.capacity, 'message')}, {used:,} in flight, {free:,} free", err=err)
        if state.limits.permits is not None:
            say(f"rate limit: {counted(state.limits.permits, 'permit')} until the run would end", err=err)
        say(f"demand: {counted(asked, 'message')}, at most {quota.per_run:,} in a run", err=err)
    if not free:
        reason = no_room(state.limits, state.in_flight)
        say(f"The run leases no messages unless capacity is released before it starts: {reason}.", err=True)
    return min(asked, quota.per_run, free)


def _backlog(state: "ProducerState") -> str:
    if isinstance(state.backlog, SourceError):
        return f"unknown, the source {state.backlog.summary}: {state.backlog}"
    return str(state.backlog._replace(messages=state.at_source))
