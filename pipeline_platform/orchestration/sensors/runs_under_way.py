"""Active and recent runs of a producer: messages in flight, results, and limits of the next run.

Queries read few rows, independent of the number of runs. All runs of a pipeline have its tags. SQLite searches a filter
with tags by the index of tags, and so reads every run of the pipeline. Therefore the database selects by status, time
or job, and tags are compared here.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import NamedTuple

import dagster as dg

from pipeline_platform.control import demand
from pipeline_platform.control.quota import Quota
from pipeline_platform.control.store import Claim, ControlStore, interval_end
from pipeline_platform.lake.decisions.ledger import Origin
from pipeline_platform.launcher.run_process import never_begins
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.retry import Backoff
from pipeline_platform.orchestration.jobs import RunTags, job_of, producer_tag, tags_of
from pipeline_platform.source.backlog import Backlog

UNDER_WAY = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
_ENDED = 100
"""Maximum number of runs to read that ended since a time."""
_PAGES = 10
"""Maximum number of queries for the runs of one of several producers, which have a job in common."""

Tags = Mapping[str, str | Sequence[str]]
"""Tags of runs. If a tag has several values, each of them matches."""


def limits(producer: BoundProducer, control: ControlStore, now: datetime, *, of_round: bool = False) -> demand.Limits:
    """Return the current limits of a run or a round, from the producer's options and the control store."""
    options, key, quota = control.options_of(producer), producer.key, Quota(producer, control)
    limit = control.rate_limiting(key, options.rate_limiting)
    # The next round can start before the next interval ends.
    ahead = demand.permits_ahead(limit, options.interval) if limit and not of_round else timedelta(0)
    permits = control.spare(key, limit, ahead)
    return demand.Limits(
        options,
        control.processors_of(producer.pipeline),
        permits=permits,
        permits_soon=None if permits is None else control.spare(key, limit, min(ahead, options.interval)),
        permits_at=interval_end(limit, now) if limit else None,
        paused=quota.paused,
        batch_timeout=producer.pipeline.batch_timeout(),
        size=quota.per_pull,
        round_size=producer.pipeline.batch_size() if of_round else None,
    )


def in_flight(
    producer: BoundProducer, instance: dg.DagsterInstance | None, control: ControlStore, *, but: str = ""
) -> demand.InFlight:
    """Return the messages of a producer in flight, and the capacity that other runs take from it.

    Retries and replays use the free capacity of the other producers first, then of this one.

    Args:
        producer: The producer.
        instance: The Dagster instance; None if it is unavailable: then only runs with a claim are known.
        control: The control store.
        but: Id of a run that does not count.
    """
    mine, whole = _in_flight(producer, instance, control, but), BoundProducer(producer.pipeline)
    if producer == whole or not (common := _in_flight(whole, instance, control).messages):
        return mine
    others = sum(_in_flight(other, instance, control).messages for other in whole.each if other != producer)
    free = Quota(whole, control).capacity - Quota(producer, control).capacity
    return replace(mine, of_others=max(0, others + common - free))


def _in_flight(
    producer: BoundProducer, instance: dg.DagsterInstance | None, control: ControlStore, but: str = ""
) -> demand.InFlight:
    """Count the messages of active claims, and the demand of runs without a claim yet.

    A crashed run counts until its claim expires. A run without a claim counts until its process is known to have ended;
    a queued run counts until it ends.
    """
    live = [claim for claim in control.in_flight(producer.key) if claim.run_id != but]
    claims: Counter[str] = Counter()
    for claim in live:  # a continuous run has two: one to stand by, and one of its receive
        claims[claim.run_id] += claim.messages
    is_limited = live and not producer.is_whole_pipeline
    limit = control.rate_limiting(producer.key, producer.options.rate_limiting) if is_limited else None
    asked = runs_to_lease(producer, instance, control)
    tags = RunTags.of(producer.pipeline)
    claiming = instance.get_runs(dg.RunsFilter(run_ids=sorted(claims))) if instance and claims else []
    receiving = {run.run_id: claims[run.run_id] for run in claiming if tags.received not in run.tags}
    # The next round of a run leases as much as another run would.
    per_round = Quota(producer, control).per_pull if any(tags.rounds in run.tags for run in claiming) else 0
    further = {run.run_id: max(0, per_round - claims[run.run_id]) for run in claiming if tags.rounds in run.tags}
    of_retries = {run.run_id for run in claiming if run.tags.get(tags.origin, "source") != "source"}
    to_lease = Counter({run_id: wanted for run_id, _, wanted in asked}) + Counter(receiving) + Counter(further)
    of_retries |= {run_id for run_id, origin, _ in asked if origin != "source"}
    return demand.InFlight(
        messages=sum(claims.values()) + sum(wanted for _, _, wanted in asked) + sum(further.values()),
        runs=len(claims) + len(asked),
        run_ids=(*claims, *(run_id for run_id, _, _ in asked)),
        leased=dict(claims - Counter(receiving)),
        to_lease=dict(to_lease),
        unleased=sum(
            per_round if run_id in further else wanted
            for run_id, wanted in to_lease.items()
            if run_id not in of_retries
        ),
        permitted=demand.had_permits([(c.messages, c.started_at) for c in live], limit, datetime.now(UTC))
        if limit
        else 0,
    )


def runs_to_lease(
    producer: BoundProducer, instance: dg.DagsterInstance | None, control: ControlStore
) -> list[tuple[str, str, int]]:
    """Return the active runs that will make a claim: id, origin and demand. Empty without a Dagster instance."""
    if instance is None:
        return []
    pipeline, tags = producer.pipeline, RunTags.of(producer.pipeline)
    known = {claim.run_id for claim in (*control.in_flight(producer.key), *control.over(producer.key))}
    return [
        (run.run_id, run.tags[tags.origin], int(run.tags[tags.demand]))
        for record in runs_with(instance, UNDER_WAY, _tags_of_claims(producer))
        if (run := record.dagster_run).run_id not in known and is_under_way(record, pipeline, instance)
    ]


def _tags_of_claims(producer: BoundProducer) -> Tags:
    """Return the tags of runs with a claim of a producer. Retries and replays count for an only producer, too."""
    if producer.name:
        return _tags(producer, "source")
    return tags_of(producer.pipeline, *(("failed", "messages") if producer.is_whole_pipeline else ()))


def is_under_way(record: dg.RunRecord, pipeline: type[Pipeline], instance: dg.DagsterInstance) -> bool:
    """Whether a run without a claim will make one: it had no claim before, and does not continue another run."""
    run, tags = record.dagster_run, RunTags.of(pipeline)
    steps = run.step_keys_to_execute
    if tags.demand not in run.tags or never_begins(record, instance, datetime.now(UTC)):
        return False
    if steps is not None and f"{pipeline.name}.receive_messages" not in steps:
        return False  # re-executes later steps, with the claim of its parent's receive
    received = run.tags.get(tags.receive_id)
    if received is None:
        return True
    # A re-execution starts with a copy of its parent's tags.
    parent = instance.get_run_by_id(run.parent_run_id) if run.parent_run_id else None
    return parent is not None and parent.tags.get(tags.receive_id) == received


class FailedRuns(NamedTuple):
    """Consecutive failures of a pipeline's newest runs: their number, and the end and id of the latest."""

    runs: int
    ended: datetime
    run_id: str


def failed_in_a_row(
    producer: BoundProducer, instance: dg.DagsterInstance, now: datetime, origin: Origin = "source"
) -> FailedRuns:
    """Count the consecutive failures of the newest runs of an origin. A failed run that published all does not count.

    Runs that were active at the same time count once: they often have a common cause, such as a crash of Spark.
    """
    tags, newest = RunTags.of(producer.pipeline), _newest(producer, instance, origin)

    def has_failed(record: dg.RunRecord) -> bool:
        run = record.dagster_run
        return run.status is dg.DagsterRunStatus.FAILURE and run.tags.get(tags.published) != run.run_id

    failed = list(takewhile(has_failed, newest))
    if not failed:
        return FailedRuns(0, now, "")
    count, began = 0, math.inf
    for record in failed:
        if (record.end_time or record.update_timestamp.timestamp()) <= began:
            count, began = count + 1, record.start_time or record.create_timestamp.timestamp()
    return FailedRuns(count, failed[0].update_timestamp.astimezone(UTC), failed[0].dagster_run.run_id)


def hold_back(failed: FailedRuns, interval: timedelta, now: datetime) -> str | None:
    """Return the reason to delay a run after repeated failures, or None.

    The pause is the sensor's interval after two failures in a row, and doubles with each further failure.
    """
    if failed.runs < 2:
        return None
    longest = demand.LONGEST_PAUSE
    until = failed.ended + Backoff(first=min(interval, longest), most=longest).before(failed.runs)
    # A clock that was ahead when they failed must not prolong the pause.
    if now >= until or until > now + 2 * longest:
        return None
    next_at = f"{until.astimezone(UTC):%H:%M:%S} UTC"
    return f"the last {failed.runs} runs failed; next run at {next_at}; see run {failed.run_id}"


def empty_in_a_row(producer: BoundProducer, instance: dg.DagsterInstance) -> int:
    """Return the number of newest pulls in a row that received no messages."""
    tag, newest = RunTags.of(producer.pipeline).received, _newest(producer, instance)
    return len(list(takewhile(lambda run: run.dagster_run.tags.get(tag) == "0", newest)))


def ended_early(producer: BoundProducer, instance: dg.DagsterInstance, since: datetime) -> bool:
    """Whether a pull failed or was canceled since a time: its unacknowledged messages will be redelivered."""
    red, tags = [dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED], RunTags.of(producer.pipeline)
    runs = [record.dagster_run for record in runs_with(instance, red, _tags(producer, "source"), since)]
    return any(run.tags.get(tags.published) != run.run_id for run in runs)


def was_filled(producer: BoundProducer, instance: dg.DagsterInstance) -> bool:
    """Whether the newest pull received as many messages as it demanded. Active runs count once they have received.

    Re-executions do not count: they have a copy of their parent's tags.
    """
    tags, newest = RunTags.of(producer.pipeline), _newest(producer, instance, "source", dg.DagsterRunStatus)
    run = next((run for record in newest if (run := record.dagster_run).parent_run_id is None), None)
    return run is not None and 0 < int(run.tags.get(tags.demand, 0)) <= int(run.tags.get(tags.received, 0))


def _newest(
    producer: BoundProducer,
    instance: dg.DagsterInstance,
    origin: Origin = "source",
    statuses: Iterable[dg.DagsterRunStatus] = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE),
) -> Sequence[dg.RunRecord]:
    """Return the newest runs of an origin with one of the statuses: completed runs by default."""
    job, tags = job_of(producer.pipeline, origin), _tags(producer, origin)
    return newest_runs(instance, job, list(statuses), tags, demand.LOOK_BACK)


def _tags(producer: BoundProducer, origin: Origin) -> dict[str, str]:
    return {RunTags.of(producer.pipeline).origin: origin, **producer_tag(producer)}


def with_other_runs(
    bounds: demand.Limits,
    producer: BoundProducer,
    instance: dg.DagsterInstance,
    backlog: Backlog,
    left: Sequence[Claim],
    asked: datetime | None,
    *,
    alone: bool,
) -> demand.Limits:
    """Add what other runs left, and their sizes if the source reports no backlog."""
    if asked is None or any(claim.expires_at > asked for claim in left):
        bounds = replace(bounds, left=bool(left))
    elif backlog.messages != 0:
        bounds = replace(bounds, left=ended_early(producer, instance, asked))
    if backlog.messages is None:
        filled, empty = was_filled(producer, instance), empty_in_a_row(producer, instance)
        bounds = replace(bounds, filled=filled, empty_runs=empty)
    return replace(bounds, alone=alone)


def reason_to_wait(
    producer: BoundProducer, instance: dg.DagsterInstance, control: ControlStore, now: datetime, *, alone: bool
) -> str | None:
    """Return why no run should be requested now although the messages are worth a run, or None."""
    turn = _awaited_turn(producer, control, alone=alone)
    return turn or hold_back(failed_in_a_row(producer, instance, now), producer.options.interval, now)


def _awaited_turn(producer: BoundProducer, control: ControlStore, *, alone: bool) -> str | None:
    """Return why a run could not start now because messages keep their order over runs; None if it could.

    A continuous run of another producer that stands by between two rounds ends when it sees a run that waits.
    """
    pipeline = producer.pipeline
    if not pipeline.takes_turns():
        return None
    keys = [other.key for other in BoundProducer.all_of(pipeline) if other.key != producer.key]
    standing_by = {claim.receive_id for key in keys for claim in control.in_flight(key) if claim.is_stand_by}
    others = [
        claim
        for claim in control.in_flight(pipeline.name, of_all=True)
        if (alone or claim.alone) and claim.receive_id not in standing_by
    ]
    return f"run {others[0].run_id} is active, and runs take turns to keep messages in order" if others else None


def left_claims(producer: BoundProducer, control: ControlStore) -> list[Claim]:
    """Return the expired claims of a producer's receives, and for the first producer, also of retries and replays."""
    is_first = producer.name == next(iter(producer.pipeline.producers), "")
    expired = control.over(producer.key, *([producer.pipeline.name] if is_first else []))
    return [claim for claim in expired if not claim.is_stand_by]


def steps_of(instance: dg.DagsterInstance | None, run_ids: Iterable[str], rounds_tag: str = "") -> dict[str, str]:
    """Return the current step (`step handle_messages, 12 s`), round or status (`queued`) of runs that Dagster knows."""
    steps = {}
    for run_id in run_ids if instance else ():
        run = instance.get_run_by_id(run_id) if instance else None
        if run is None:
            continue
        steps[run_id] = run.status.value.lower().replace("_", " ")
        for step in instance.get_run_step_stats(run_id) if instance and run.status is UNDER_WAY[3] else ():
            if step.start_time and not step.end_time:
                name, seconds = step.step_key.rpartition(".")[2], datetime.now(UTC).timestamp() - step.start_time
                rounds = int(run.tags.get(rounds_tag, 0))
                steps[run_id] = f"round {rounds}, {seconds / 60:.0f} min" if rounds else f"step {name}, {seconds:.0f} s"
    return steps


def runs_with(
    instance: dg.DagsterInstance,
    statuses: Sequence[dg.DagsterRunStatus],
    tags: Tags,
    since: datetime | None = None,
) -> list[dg.RunRecord]:
    """Return the runs with one of the statuses, newest first: unfinished runs, or runs updated since a time."""
    found = dg.RunsFilter(statuses=list(statuses), updated_after=since)
    return _tagged(instance.get_run_records(found, limit=None if since is None else _ENDED), tags)


def newest_runs(
    instance: dg.DagsterInstance, job: str, statuses: Collection[dg.DagsterRunStatus], tags: Tags, most: int
) -> list[dg.RunRecord]:
    """Return the newest runs of a job, newest first.

    Runs of other jobs with the tags, such as manual materialisations, are among them if they are among the newest runs
    of all jobs.
    """
    of_all = instance.get_run_records(limit=2 * most) if tags else []
    found = {record.storage_id: record for record in _tagged(of_all, tags) if record.dagster_run.status in statuses}
    of_job, cursor = dg.RunsFilter(job_name=job, statuses=list(statuses)), None
    for _ in range(_PAGES):
        page = instance.get_run_records(of_job, limit=most, cursor=cursor)
        found |= {record.storage_id: record for record in _tagged(page, tags)}
        if len(found) >= most or len(page) < most:
            break
        cursor = page[-1].dagster_run.run_id
    return [found[storage_id] for storage_id in sorted(found, reverse=True)[:most]]


def _tagged(records: Iterable[dg.RunRecord], tags: Tags) -> list[dg.RunRecord]:
    wanted = {key: (value,) if isinstance(value, str) else value for key, value in tags.items()}

    def has_tags(run: dg.DagsterRun) -> bool:
        return all(run.tags.get(key) in values for key, values in wanted.items())

    return [record for record in records if has_tags(record.dagster_run)]
