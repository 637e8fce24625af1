"""The producer sensor: reads a source's backlog and requests runs by demand and rate limit, or reports why not."""

import zlib
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import dagster as dg

from pipeline_platform.control import demand
from pipeline_platform.control.claims import count_runs
from pipeline_platform.control.store import ControlStore, ControlStoreError
from pipeline_platform.launcher.run_process import end_claims
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.asset_windows import NoWindowError, window_now
from pipeline_platform.orchestration.jobs import refuse_changed_models, run_request
from pipeline_platform.orchestration.resources.source_resources import source_of
from pipeline_platform.orchestration.sensors.asking import last_active
from pipeline_platform.orchestration.sensors.producer_state import state_of
from pipeline_platform.orchestration.sensors.runs_under_way import left_claims, limits, reason_to_wait, with_other_runs
from pipeline_platform.orchestration.sensors.timely_calls import WITHIN_S, is_late, timely
from pipeline_platform.source.contract import Source, SourceError
from pipeline_platform.telemetry.configuration import export
from pipeline_platform.telemetry.spans import Span, span

_SENSOR = "_producer"
"""End of the names of producer sensors."""
_TICKED_WITHIN = timedelta(minutes=5)
"""Sensors without a tick for this time are not evaluated: their code location was removed or renamed."""
_TICK_WAITS_S = 4.0
"""Longest wait of a tick for a first message; Dagster evaluates sensors every 5 s."""


def producer_sensor(pipeline: type[Pipeline], producer: str = "") -> dg.SensorDefinition:
    """Build the sensor that requests pulls of a producer. The name is empty for a pipeline's only producer.

    A tick reads the backlog, the active runs and the limits. It leases no messages and uses no Spark. The sensor is on
    by default, unless the producer has a `schedule`.
    """
    bound = BoundProducer(pipeline, producer)
    options = bound.options
    by_clock = options.schedule is not None

    @dg.sensor(
        name=f"{bound.prefix}{_SENSOR}",
        job_name=f"{pipeline.name}_pull",
        # Dagster's loop takes 5 s, more or less: a tick that is due milliseconds later would wait for the next loop.
        minimum_interval_seconds=max(1, round(options.interval.total_seconds()) - 1),
        default_status=dg.DefaultSensorStatus.STOPPED if by_clock else dg.DefaultSensorStatus.RUNNING,
        description=f"Requests runs by the backlog of {options.source}, the demand and the rate limit.",
        required_resource_keys={options.source, "control"},
    )
    def look(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        export()
        refuse_changed_models(pipeline)
        with span("ask", pipeline, producer=producer, source=options.source) as event:
            try:
                return _ask(context, event, bound)
            except (ControlStoreError, NoWindowError) as error:
                return dg.SkipReason(str(error))

    return look


def _ask(context: dg.SensorEvaluationContext, event: Span, producer: BoundProducer) -> dg.SensorResult | dg.SkipReason:
    pipeline, options = producer.pipeline, producer.options
    source = source_of(context.resources, options.source)
    control: ControlStore = context.resources.control
    now, waiting = datetime.now(UTC), demand.Waiting.from_json(context.cursor)
    if held_back := waiting.held_back(now):
        return dg.SkipReason(f"{options.source} {held_back}")
    _wait(context, source, producer)
    is_to_report = waiting.is_to_report(now)
    window = window_now(pipeline)
    end_claims(context.instance, control, pipeline.name)
    now = datetime.now(UTC)
    # A tick that reports the check counts the whole backlog, for the check and its plot.
    state = state_of(producer, source, control, context.instance, is_tick=True, counts_all=is_to_report)
    noted: dict[str, Any] = {"reported": waiting.reported, "shown": waiting.shown}
    events = []
    if is_to_report:
        shown = state.evaluation(producer)
        noted = {"reported": now, "shown": zlib.crc32(str(shown.description).encode())}
        events = [shown] if noted["shown"] != waiting.shown else []
    backlog, under_way = state.backlog, state.in_flight
    if isinstance(backlog, SourceError):
        event.fail(backlog)
        cursor = waiting.without_answer(now, options.interval).model_copy(update=noted).to_json()
        reason = f"{options.source} {backlog.summary}: {backlog}"
        return dg.SensorResult(skip_reason=reason, cursor=cursor, asset_events=events)
    left, alone = left_claims(producer, control), pipeline.takes_turns(leases_partitions=source.leases_partitions)
    bounds = with_other_runs(state.limits, producer, context.instance, backlog, left, waiting.asked, alone=alone)
    # A decided receive has no leased messages but must be finished: it counts as one message.
    due = [claim for claim in left if waiting.is_due(claim.expires_at, now)]
    held, waits, age = sum(max(1, claim.messages) for claim in due), backlog.counted, backlog.age(now)
    backlog = demand.with_left(backlog, held)
    asks = demand.next_asks(backlog, bounds, under_way, waiting.waited(now))
    if asks[0].demand and (later := reason_to_wait(producer, context.instance, control, now, alone=alone)):
        asks = [demand.Ask(0, later)]
    noted["lost"] = zlib.crc32(backlog.lost.encode())
    cursor = waiting.after(backlog, asks, now, under_way).model_copy(update=noted).to_json()
    demanded = [ask.demand for ask in asks if ask.demand]
    event.add(demand=sum(demanded), runs=len(demanded), backlog=waits, oldest=age, in_flight=under_way.messages)
    crashed = "1 crashed run" if (runs := count_runs(due)) == 1 else f"{runs:,} crashed runs"
    news = f"; {crashed} left {demand.count(held)}" if due else ""
    if backlog.lost and noted["lost"] != waiting.lost:
        news += f"; {options.source}: {backlog.lost}"
    if not asks[0].demand:
        reason = state.after(asks[0].because, news)
        return dg.SensorResult(skip_reason=reason, cursor=cursor, asset_events=events)
    for ask in asks:
        context.log.info(
            "Requested a run of %s: %s%s. Before: %s", demand.count(ask.demand), ask.because, news, state.sentence
        )
    rounds = options.idle_timeout is not None
    requests = [
        run_request(producer, "source", [window], expected=ask.demand, demand=ask.demand, rounds=rounds) for ask in asks
    ]
    return dg.SensorResult(run_requests=requests, cursor=cursor, asset_events=events)


def _wait(context: dg.SensorEvaluationContext, source: Source, producer: BoundProducer) -> None:
    """Wait for a first message, if a single one is worth a run, so that this tick requests the run, not the next one.

    A tick waits only if the daemon has more threads than producers, so that one thread always serves other sensors.
    """
    control: ControlStore = context.resources.control
    with suppress(SourceError, ControlStoreError):  # reported by the tick, which asks again
        bounds = limits(producer, control, datetime.now(UTC))
        is_idle = bounds.paused is None and not control.in_flight(producer.key)
        is_asked = is_late(source, "backlog", "backlog_up_to")  # its result is read first
        if is_idle and not is_asked and bounds.patience < bounds.next_look and _is_thread_left(context.instance):
            timely(source, "wait", partial(source.wait, _TICK_WAITS_S), _TICK_WAITS_S + WITHIN_S / 2)


def _is_thread_left(instance: dg.DagsterInstance) -> bool:
    """Whether the daemon has more threads for sensors than there are producers, in all code locations."""
    sensors = instance.get_settings("sensors") or {}
    if not sensors.get("use_threads"):
        return False
    since = datetime.now(UTC) - _TICKED_WITHIN
    producers = sum(
        state.is_running and state.instigator_name.endswith(_SENSOR) and last_active(state) >= since
        for state in instance.all_instigator_state()
    )
    return producers < (sensors.get("num_workers") or 1)
