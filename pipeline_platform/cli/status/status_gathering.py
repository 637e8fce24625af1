"""The state of a deployment's pipelines, gathered from the control store, the lake, the sources and Dagster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from pipeline_platform.cli import loading
from pipeline_platform.cli.dagster_instance import Instance, known, unavailable
from pipeline_platform.cli.status.failed_runs import failed_runs
from pipeline_platform.cli.status.status_data import (
    BacklogStatus,
    DagsterRuns,
    FailuresStatus,
    Health,
    InFlightStatus,
    PauseStatus,
    PipelineStatus,
    ProducerStatus,
    RateLimitStatus,
    ReceivesStatus,
    ReceiveStatus,
    RedeliveredStatus,
    RequestsStatus,
    RunStatus,
    Shared,
    StatusOutput,
    WindowFailures,
    worst,
)
from pipeline_platform.cli.status.status_problems import problems_of
from pipeline_platform.control.demand import InFlight
from pipeline_platform.control.quota import Quota
from pipeline_platform.control.store import ControlStore, ControlStoreError
from pipeline_platform.lake.decisions.ledger import ReceiveError
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.failures.failure_events import time_of
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.source.contract import SourceError
from pipeline_platform.spark.late_tasks import late_tasks

if TYPE_CHECKING:
    import dagster as dg

    from pipeline_platform.orchestration.sensors.producer_state import ProducerState

T = TypeVar("T")
LookingAt: TypeAlias = Callable[[str, str], object]
"""Called in several threads with the name of a pipeline and the next part to look at; with an empty text at the end."""

LARGEST = 5
"""Number of windows with the most open failures that are named."""
_AT_ONCE = 8
"""Pipelines that are looked at in parallel. The control store has at most ten connections per process."""


def gather(
    opened: loading.Deployment,
    instance: Instance,
    pipelines: Sequence[type[Pipeline]],
    *,
    looking_at: LookingAt = lambda *_: None,
) -> StatusOutput:
    """Return the state of pipelines; `instance` is the Dagster instance, or the reason why it is unavailable.

    Raises:
        ControlStoreError: The control store is unavailable.
    """
    with ThreadPoolExecutor(min(_AT_ONCE, len(pipelines)) or 1) as threads:
        looks = {
            pipeline.name: threads.submit(pipeline_status, opened, pipeline, instance, looking_at)
            for pipeline in pipelines
        }
        found = {name: look.result() for name, look in looks.items()}
    return StatusOutput(
        at=datetime.now(UTC),
        state=worst([status.state for status in found.values()]),
        control_store=str(opened.control),
        lake=opened.lake.root,
        pipelines=found,
    )


def pipeline_status(
    opened: loading.Deployment,
    pipeline: type[Pipeline],
    instance: Instance,
    looking_at: LookingAt = lambda *_: None,
) -> PipelineStatus:
    """Return the state of a pipeline."""
    from pipeline_platform.launcher.run_process import end_claims

    def look(part: str) -> None:
        looking_at(pipeline.name, part)

    look("the control store")
    _asking(instance, lambda asked: end_claims(asked, opened.control, pipeline.name) if asked else None)
    producers = {}
    for producer in BoundProducer.all_of(pipeline):
        look(f"the source {producer.source}")
        producers[producer.name] = _producer(opened, producer, instance)
    look("the control store")
    whole = BoundProducer(pipeline)
    retries = _retries(opened, whole, instance) if whole.is_whole_pipeline else None
    look("Dagster's storage")
    runs = _runs(pipeline, instance, opened.control)
    look("the lake")
    unrated = PipelineStatus(
        state=Health.HEALTHY,
        problems=[],
        producers=producers,
        retries=retries,
        runs=runs,
        receives=receives_status(opened, pipeline),
        failures=failures_status(opened.lake, pipeline),
        changed_types=Tables(opened.lake, pipeline).refusals(),
        redelivered=redelivered(opened.lake, pipeline),
    )
    problems = problems_of(pipeline, unrated)
    look("")
    state = worst([problem.health for problem in problems])
    return unrated.model_copy(update={"state": state, "problems": problems})


def _asking(instance: Instance, look: Callable[[dg.DagsterInstance | None], T]) -> T:
    """Return the result of a function that uses Dagster if it answers. Otherwise `DagsterRuns.error` has the reason."""
    try:
        return look(known(instance))
    except ControlStoreError:
        raise
    except Exception:  # any error of the instance's storage; PostgreSQL's is not of SQLAlchemy
        return look(None)


def _producer(opened: loading.Deployment, producer: BoundProducer, instance: Instance) -> ProducerStatus:
    from pipeline_platform.orchestration.sensors.producer_state import state_of

    control = opened.control
    state = _asking(instance, lambda asked: state_of(producer, opened.sources[producer.source], control, asked))
    pause = _pause(control, producer)
    return ProducerStatus(
        key=producer.key,
        source=producer.source,
        backlog=_backlog(state),
        pause=pause,
        requests=_requests(producer, state, pause, instance),
        rate_limit=_rate_limit(control, producer),
        overrides=_overrides(control, producer.key),
        in_flight=_in_flight(control, producer.key, state.in_flight, opened.spark_ui),
        messages_per_s=round(state.rate, 3),
        failed_runs=_asking(instance, lambda asked: failed_runs(producer, asked, control) if asked else None),
        summary=state.sentence,
    )


def _retries(opened: loading.Deployment, whole: BoundProducer, instance: Instance) -> Shared:
    from pipeline_platform.orchestration.sensors.runs_under_way import in_flight

    control = opened.control
    found = _asking(instance, lambda asked: in_flight(whole, asked, control))
    return Shared(
        key=whole.key,
        pause=_pause(control, whole),
        overrides=_overrides(control, whole.key),
        in_flight=_in_flight(control, whole.key, found, opened.spark_ui),
    )


def _backlog(state: ProducerState) -> BacklogStatus:
    allowed = None if state.oldest_allowed is None else state.oldest_allowed.total_seconds()
    if isinstance(state.backlog, SourceError):
        return BacklogStatus(
            messages=None, oldest_allowed_s=allowed, error=f"{state.source} {state.backlog.summary}: {state.backlog}"
        )
    return BacklogStatus(
        messages=None if state.backlog.is_endless else state.at_source,  # "in flight" counts the others
        is_endless=state.backlog.is_endless,
        is_minimum=state.backlog.at_least,
        is_maximum=state.backlog.counts_gaps,
        oldest_at=state.backlog.oldest,
        oldest_allowed_s=allowed,
        lost=state.backlog.lost,
    )


def _requests(
    producer: BoundProducer, state: ProducerState, pause: PauseStatus | None, instance: Instance
) -> RequestsStatus:
    if pause:
        return RequestsStatus(state="draining" if pause.draining_until else "paused", reason=pause.reason)
    if isinstance(state.backlog, SourceError):
        return RequestsStatus(state="source", reason=f"the source {state.backlog.summary}")
    return requests_of(producer, instance)


def _pause(control: ControlStore, producer: BoundProducer) -> PauseStatus | None:
    if (reason := Quota(producer, control).paused) is None:
        return None
    by_breaker = control.paused(producer.key) is None
    return PauseStatus(reason=reason, draining_until=control.draining(producer.key), by_breaker=by_breaker)


def _overrides(control: ControlStore, key: str) -> dict[str, int]:
    return control.overrides(key).model_dump(exclude_none=True)


def _rate_limit(control: ControlStore, producer: BoundProducer) -> RateLimitStatus | None:
    own = producer.options.rate_limiting
    if (limit := control.rate_limiting(producer.key, own)) is None:
        return None
    return RateLimitStatus(
        allowed_messages=limit.allowed_messages,
        interval_s=limit.interval.total_seconds(),
        is_set_at_run_time=limit != own,
        permits_left=control.spare(producer.key, limit, timedelta(0)) or 0,
    )


def _in_flight(control: ControlStore, key: str, found: InFlight, spark_ui: str) -> InFlightStatus:
    """Return the messages that runs have leased, and the demand of runs that have leased no messages yet."""
    runs = [
        RunStatus(
            run_id=claim.run_id,
            state=state,
            messages=claim.messages,
            receive_id=claim.receive_id,
            started_at=claim.started_at,
            claim_expires_at=claim.expires_at,
            slow_tasks=late_tasks(spark_ui, claim.receive_id) if spark_ui and state == "leased" else "",
        )
        for state, claims in (("leased", control.in_flight(key)), ("expired", control.over(key)))
        for claim in claims
        if state == "expired" or (claim.run_id in found.leased and not claim.is_stand_by)
    ]
    runs += [
        RunStatus(run_id=run_id, state="to_lease", messages=demand)
        for run_id, demand in found.to_lease.items()
        if run_id not in found.leased
    ]
    return InFlightStatus(messages=sum(run.messages for run in runs if run.state == "leased"), runs=runs)


def _runs(pipeline: type[Pipeline], instance: Instance, control: ControlStore) -> DagsterRuns:
    """Return the active runs of the pipeline. Manual materialisations of assets count once they have received."""
    if isinstance(instance, str):
        return DagsterRuns(error=instance)
    from pipeline_platform.launcher.run_process import never_begins
    from pipeline_platform.orchestration.jobs import RunTags, tags_of
    from pipeline_platform.orchestration.sensors.runs_under_way import UNDER_WAY, runs_with

    name, now = pipeline.name, datetime.now(UTC)
    claims = {claim.run_id for claim in (*control.in_flight(name, of_all=True), *control.over(name, of_all=True))}
    try:
        records = runs_with(instance, UNDER_WAY, tags_of(pipeline))
        # After its last acknowledgement, a run of a job of the user may materialise other assets.
        received = RunTags.of(pipeline).received
        runs = [(record, record.dagster_run) for record in records]
        without_claim = [record for record, run in runs if run.run_id not in claims and received not in run.tags]
        crashed = [record.dagster_run.run_id for record in without_claim if never_begins(record, instance, now)]
    except Exception as error:  # any error of the instance's storage; the other parts do not depend on it
        return DagsterRuns(error=unavailable(error))
    counts = Counter(record.dagster_run.status for record in records)
    by_state = {status.value.lower(): counts[status] for status in UNDER_WAY if counts[status]}
    return DagsterRuns(by_state=by_state, crashed=crashed)


def receives_status(opened: loading.Deployment, pipeline: type[Pipeline]) -> ReceivesStatus:
    """Return the unfinished receives of a pipeline."""
    from pipeline_platform.run.receive_state import Phase, ReceiveState

    flow = opened.flow(pipeline)
    undecided, unfinished, unreadable = list[ReceiveStatus](), list[ReceiveStatus](), list[str]()
    for receive_id in flow.ledger.unfinished():
        state = ReceiveState(flow, receive_id)
        try:
            if receive := state.receive:
                phase = state.phase
                found = ReceiveStatus(receive_id=receive_id, run_id=receive.run_id, phase=phase.name.lower())
                (undecided if phase < Phase.DECIDED else unfinished).append(found)
        except ReceiveError as error:
            unreadable.append(str(error))
    return ReceivesStatus(undecided=undecided, unfinished=unfinished, unreadable=unreadable)


def failures_status(lake: Lake, pipeline: type[Pipeline]) -> FailuresStatus:
    """Return the numbers of open failures of a pipeline."""
    by_window = FailedMessages(name=pipeline.name, lake=lake, pipeline=pipeline.name).by_window()
    counts = by_window.values()
    largest = sorted(by_window, key=lambda window: (by_window[window].open, window), reverse=True)[:LARGEST]
    due = min((each.due for each in counts if each.due is not None), default=None)
    return FailuresStatus(
        open=sum(each.open for each in counts),
        dead=sum(each.dead for each in counts),
        scheduled=sum(each.scheduled for each in counts),
        due_at=None if due is None else time_of(due),
        windows=len(by_window),
        first_window=min(by_window, default=None),
        last_window=max(by_window, default=None),
        largest=[
            WindowFailures(window=window, open=by_window[window].open, dead=by_window[window].dead)
            for window in largest
        ],
    )


def redelivered(lake: Lake, pipeline: type[Pipeline]) -> RedeliveredStatus | None:
    """Return the messages that are returned again and again without a decision."""
    from pipeline_platform.lake.failures.inspection import coming_back

    found = coming_back(Tables(lake, pipeline)["outcomes"])
    if found is None:
        return None
    return RedeliveredStatus(messages=found.messages, deliveries=found.deliveries, first_window=found.oldest)


def requests_of(producer: BoundProducer, instance: Instance) -> RequestsStatus:
    """Return whether runs of a producer that is not paused are requested."""
    from pipeline_platform.orchestration.sensors.asking import not_asked_for

    if isinstance(instance, str):
        return RequestsStatus(state="unknown", reason=instance)
    try:
        why = not_asked_for(producer, instance)
    except Exception as error:  # any error of the instance's storage
        return RequestsStatus(state="unknown", reason=unavailable(error))
    return RequestsStatus(state="active" if why is None else "not_requested", reason=why)
