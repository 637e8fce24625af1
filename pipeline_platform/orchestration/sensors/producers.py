"""The producer sensor: looks at a source, and asks for runs sized by demand and rate limit, or says why not."""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import dagster as dg

from pipeline_platform.control import demand
from pipeline_platform.control.store import Claim, ControlStore, ControlStoreError
from pipeline_platform.launcher.run_process import end_claims
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.asset_windows import NoWindowError, window_now
from pipeline_platform.orchestration.backlog_check import evaluation_of
from pipeline_platform.orchestration.jobs import named, refuse_changed_models, run_request
from pipeline_platform.orchestration.resources.source_resources import source_of
from pipeline_platform.orchestration.sensors.producer_state import state_of
from pipeline_platform.orchestration.sensors.runs_under_way import (
    empty_in_a_row,
    ended_early,
    failed_in_a_row,
    in_flight,
    limits,
    was_filled,
)
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.contract import SourceError
from pipeline_platform.telemetry.configuration import export
from pipeline_platform.telemetry.spans import Span, span


def producer_sensor(pipeline: type[Pipeline], producer: str = "") -> dg.SensorDefinition:
    """Build the sensor that pulls for a producer; one without a name is its pipeline's only one.

    It leases nothing and starts no Spark: a tick is one look at the backlog, the runs under way and the limits. It is
    on by itself unless `producer.schedule` has the clock pull.
    """
    options = pipeline.producers_of(producer)[producer]
    by_clock = options.schedule is not None

    @dg.sensor(
        name=f"{named(pipeline, producer)}_producer",
        job_name=f"{pipeline.name}_pull",
        # Dagster passes each 5 s, give or take milliseconds: a look that is not quite due waits for the next pass.
        minimum_interval_seconds=max(1, round(options.interval.total_seconds()) - 1),
        default_status=dg.DefaultSensorStatus.STOPPED if by_clock else dg.DefaultSensorStatus.RUNNING,
        description=f"Looks at {options.source} and asks for runs by demand and rate limit.",
        required_resource_keys={options.source, "control"},
    )
    def look(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        export()
        refuse_changed_models(pipeline)
        with span("ask", pipeline, producer=producer, source=options.source) as event:
            return _ask(context, event, pipeline, producer)

    return look


def _ask(
    context: dg.SensorEvaluationContext, event: Span, pipeline: type[Pipeline], producer: str
) -> dg.SensorResult | dg.SkipReason:
    options = pipeline.producers_of(producer)[producer]
    source = source_of(context.resources, options.source)
    control: ControlStore = context.resources.control
    now, waiting = datetime.now(UTC), demand.Waiting.from_json(context.cursor)
    if held_back := waiting.held_back(now):
        return dg.SkipReason(f"{options.source} {held_back}")
    is_to_report = waiting.is_to_report(now)
    try:
        window = window_now(pipeline)
        end_claims(context.instance, control, pipeline.name)
        now = datetime.now(UTC)
        under_way = in_flight(pipeline, context.instance, control, producer)
        bounds = limits(pipeline, control, now, producer)
        # The check and its plot show the whole backlog, the tick that reports it too.
        most = None if is_to_report else demand.of_use(bounds, under_way)
        looked = (pipeline, producer, source, control, context.instance)
        state = state_of(*looked, seen=(under_way, bounds), most=most)
        left = _left(pipeline, control, producer)
        alone = pipeline.takes_turns(leases_partitions=source.leases_partitions)
        turn = _awaits_turn(pipeline, control, alone=alone)
    except (ControlStoreError, NoWindowError) as error:
        return dg.SkipReason(str(error))
    shown = evaluation_of(pipeline, producer, state) if is_to_report else None
    noted: dict[str, Any] = (
        {} if shown is None else {"reported": now, "shown": zlib.crc32(str(shown.description).encode())}
    )
    events = [shown] if shown and noted["shown"] != waiting.shown else []
    backlog = state.backlog
    if isinstance(backlog, SourceError):
        event.fail(backlog)
        cursor = waiting.without_answer(now, options.interval).model_copy(update=noted).to_json()
        reason = f"{options.source} {backlog.summary}: {backlog}"
        return dg.SensorResult(skip_reason=reason, cursor=cursor, asset_events=events)
    bounds = _with_earlier_runs(bounds, pipeline, context.instance, producer, backlog, left, waiting.asked)
    # A receive that is decided holds no messages, and has to be finished all the same: it counts for one.
    held, waits = sum(max(1, claim.messages) for claim in left), backlog.counted
    backlog = demand.with_left(backlog, held)
    asks = demand.decide_all(backlog, bounds, under_way, waiting.waited(now))
    if asks[0].demand and turn:
        asks = [demand.Ask(0, turn)]
    elif alone:
        del asks[1:]
    if asks[0].demand:
        failed = failed_in_a_row(pipeline, context.instance, now, producer)
        held_back = demand.hold_back(failed, options.interval, now)
        asks = [demand.Ask(0, held_back)] if held_back else asks
    noted = {"reported": waiting.reported, "shown": waiting.shown, **noted, "lost": zlib.crc32(backlog.lost.encode())}
    cursor = waiting.after(backlog, asks, now, under_way).model_copy(update=noted).to_json()
    demanded = [ask.demand for ask in asks if ask.demand]
    event.add(demand=sum(demanded), runs=len(demanded), backlog=waits, in_flight=under_way.messages)
    runs = "1 run" if len(left) == 1 else f"{len(left)} runs"
    dead = f"; {runs} died and left {demand.count(held)}" if left else ""
    dead += f"; {options.source}: {backlog.lost}" if backlog.lost and noted["lost"] != waiting.lost else ""
    if not asks[0].demand:
        reason = f"{asks[0].because}{dead}. Now: {state.sentence}"
        return dg.SensorResult(skip_reason=reason, cursor=cursor, asset_events=events)
    for ask in asks:
        context.log.info("asking for %s messages: %s%s. Now: %s", ask.demand, ask.because, dead, state.sentence)
    requests = [
        run_request(pipeline, "source", [window], expected=ask.demand, demand=ask.demand, producer=producer)
        for ask in asks
    ]
    return dg.SensorResult(run_requests=requests, cursor=cursor, asset_events=events)


def _with_earlier_runs(
    bounds: demand.Limits,
    pipeline: type[Pipeline],
    instance: dg.DagsterInstance,
    producer: str,
    backlog: Backlog,
    left: Sequence[Claim],
    asked: datetime | None,
) -> demand.Limits:
    """Add what earlier runs show: what they left since a run was last asked for; and what a mute source gave them."""
    if asked is None or any(claim.expires_at > asked for claim in left):
        bounds = replace(bounds, left=bool(left))
    elif backlog.messages != 0:
        bounds = replace(bounds, left=ended_early(pipeline, instance, producer, asked))
    if backlog.messages is None:
        filled, empty = was_filled(pipeline, instance, producer), empty_in_a_row(pipeline, instance, producer)
        bounds = replace(bounds, filled=filled, empty_runs=empty)
    return bounds


def _awaits_turn(pipeline: type[Pipeline], control: ControlStore, *, alone: bool) -> str | None:
    """Why a run asked for now would get nothing, where messages keep their order over runs; or None."""
    if not pipeline.takes_turns():
        return None
    others = [claim for claim in control.in_flight(pipeline.name, of_all=True) if alone or claim.alone]
    return f"run {others[0].run_id} is under way, and runs take turns: messages keep their order" if others else None


def _left(pipeline: type[Pipeline], control: ControlStore, producer: str) -> list[Claim]:
    """What dead runs of a producer left. Of several, the first asks for the run that finishes a backfill or replay."""
    is_first = producer == next(iter(pipeline.producers_of()))
    return control.over(pipeline.limits_key(producer), *([pipeline.name] if is_first else []))
