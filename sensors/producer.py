"""The producer sensor: looks at a source, and asks for runs sized by demand and rate limit, or says why not."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg

from assets.jobs import NO_RETRIES, receive_config
from assets.tags import RunTags, runs_of
from assets.windows import window_now
from pipeline_platform.control import Claim, ControlStore, interval_end
from pipeline_platform.demand import RUN_LASTS, Ask, InFlight, Limits, Waiting, decide_all
from pipeline_platform.pipeline import Pipeline
from pipeline_platform.source import Source, SourceError

UNDER_WAY = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
STARTS_WITHIN = timedelta(minutes=5)
"""A run that started and has claimed nothing after so long is taken for dead."""


def in_flight(pipeline: type[Pipeline], instance: dg.DagsterInstance, control: ControlStore) -> InFlight:
    """Count what is in flight: a live claim counts as what it holds, a run that is to lease as what it was asked for.

    A run that died stops counting when its claim is over; a queued one counts until it ends.
    """
    claims = {claim.run_id: claim.messages for claim in control.in_flight(pipeline.name)}
    dead = {claim.run_id for claim in control.over(pipeline.name)}
    messages, unleased, runs = sum(claims.values()), 0, len(claims)
    now, tags = datetime.now(UTC), RunTags.of(pipeline)
    for record in instance.get_run_records(runs_of(pipeline, UNDER_WAY)):
        run = record.dagster_run
        started = record.start_time and datetime.fromtimestamp(record.start_time, UTC)
        stuck = started and now - started > STARTS_WITHIN
        if run.run_id in claims or run.run_id in dead or stuck or not _is_to_lease(run, pipeline, instance):
            continue
        demand = int(run.tags[tags.demand])
        messages, runs = messages + demand, runs + 1
        if run.tags[tags.origin] == "source":
            unleased += demand
    return InFlight(messages, runs, unleased)


def _is_to_lease(run: dg.DagsterRun, pipeline: type[Pipeline], instance: dg.DagsterInstance) -> bool:
    """Whether a run that holds no claim will ask for one; not so if it has had its own, or goes on with another's."""
    tags = RunTags.of(pipeline)
    if tags.demand not in run.tags:
        return False
    steps = run.step_keys_to_execute
    if steps is not None and f"{pipeline.name}.receive_messages" not in steps:
        return False  # re-executes the later steps: the claim of what its parent received counts
    received = run.tags.get(tags.receive_id)
    if received is None:
        return True
    # A re-execution begins with a copy of its parent's tags.
    parent = instance.get_run_by_id(run.parent_run_id) if run.parent_run_id else None
    return parent is not None and parent.tags.get(tags.receive_id) == received


def clear_up(
    left: Sequence[Claim], under_way: InFlight, limits: Limits, patience: timedelta, now: datetime
) -> Ask | None:
    """Say whether a run is due only to finish what dead runs left: where no message brings one, nobody else would."""
    waiting = [claim for claim in left if now - claim.expires_at > patience]
    if not waiting or limits.paused is not None or under_way.runs:
        return None
    return Ask(1, f"{len(waiting)} {'run' if len(waiting) == 1 else 'runs'} died and left something to finish")


def limits(pipeline: type[Pipeline], control: ControlStore, now: datetime) -> Limits:
    """Take the limits of this moment from the pipeline's options and the control store."""
    producer = pipeline.producer
    limit = control.rate_limiting(pipeline.name, producer.rate_limiting)
    return Limits.of(
        producer,
        pipeline.processors,
        permits=control.spare(pipeline.name, limit, RUN_LASTS),
        permits_soon=control.spare(pipeline.name, limit, producer.interval),
        permits_at=interval_end(limit, now) if limit else None,
        paused=control.paused(pipeline.name),
    )


def run_requests(pipeline: type[Pipeline], asks: Sequence[Ask], job: str | None = None) -> Iterator[dg.RunRequest]:
    """Turn what was decided into runs."""
    window, tags = window_now(pipeline), RunTags.of(pipeline)
    for ask in asks:
        if ask.demand:
            yield dg.RunRequest(
                partition_key=window,
                job_name=job,
                run_config=receive_config(pipeline, "source", ask.demand),
                tags={tags.origin: "source", tags.demand: str(ask.demand), **NO_RETRIES},
            )


def producer_sensor(pipeline: type[Pipeline], job: Any) -> dg.SensorDefinition:
    """Build the sensor that pulls for a pipeline.

    It leases nothing and starts no Spark: a tick is one look at the backlog, the runs under way and the limits. It is
    on by itself unless `producer.schedule` has the clock pull.
    """
    by_clock = pipeline.producer.schedule is not None

    @dg.sensor(
        name=f"{pipeline.name}_producer",
        job=job,
        minimum_interval_seconds=max(1, round(pipeline.producer.interval.total_seconds())),
        default_status=dg.DefaultSensorStatus.STOPPED if by_clock else dg.DefaultSensorStatus.RUNNING,
        description=f"Looks at {pipeline.producer.source} and asks for runs by demand and rate limit.",
        required_resource_keys={pipeline.producer.source, "control"},
    )
    def producer(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        source: Source = getattr(context.resources, pipeline.producer.source)
        control: ControlStore = context.resources.control
        now, waiting = datetime.now(UTC), Waiting.from_json(context.cursor)
        try:
            backlog = source.backlog()
        except SourceError as error:
            return dg.SkipReason(f"{pipeline.producer.source} does not answer: {error}")
        under_way = in_flight(pipeline, context.instance, control)
        bounds = limits(pipeline, control, now)
        asks = decide_all(backlog, bounds, under_way, waiting.waited(now))
        if not asks[0].demand:
            due = clear_up(control.over(pipeline.name), under_way, bounds, pipeline.producer.patience, now)
            asks = [due] if due else asks
        cursor = waiting.after(backlog, asks, now, under_way).to_json()
        requests = list(run_requests(pipeline, asks))
        if not requests:
            return dg.SensorResult(skip_reason=asks[0].because, cursor=cursor)
        for ask in asks:
            context.log.info("asking for %s messages: %s", ask.demand, ask.because)
        return dg.SensorResult(run_requests=requests, cursor=cursor)

    return producer
