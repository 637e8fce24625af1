"""Problems of a pipeline, by its state: the reasons why `status` is not healthy."""

from collections.abc import Iterator
from datetime import UTC, datetime

from pipeline_platform.cli.loading import counted
from pipeline_platform.cli.status.status_data import Health, PipelineStatus, Problem, ProducerStatus
from pipeline_platform.cli.terminal import duration
from pipeline_platform.model.pipeline import Pipeline


def problems_of(pipeline: type[Pipeline], status: PipelineStatus) -> list[Problem]:
    """Return the problems of a pipeline, the worst first. The pause that a person chose is not a problem."""
    found = [*_of_pipeline(pipeline, status)]
    for name, producer in status.producers.items():
        found += [problem.model_copy(update={"producer": name}) for problem in _of_producer(producer)]
    order = list(Health)
    return sorted(found, key=lambda problem: order.index(problem.health), reverse=True)


def _of_producer(producer: ProducerStatus) -> Iterator[Problem]:
    backlog = producer.backlog
    if backlog.error:
        yield Problem(kind="source", text=backlog.error)
    if producer.requests.state == "not_requested":
        yield Problem(kind="not_requested", text=f"no runs are requested: {producer.requests.reason}")
    if producer.pause and producer.pause.by_breaker:
        yield Problem(kind="breaker", text=str(producer.pause))
    if backlog.lost:
        yield Problem(kind="lost_messages", text=f"the source lost messages: {backlog.lost}")
    if backlog.oldest_at and backlog.oldest_allowed_s is not None:
        age_s = (datetime.now(UTC) - backlog.oldest_at).total_seconds()
        if age_s > backlog.oldest_allowed_s:
            waited = f"the oldest message has waited {duration(age_s)}"
            text = f"{waited}, longer than oldest_allowed ({duration(backlog.oldest_allowed_s)})"
            yield Problem(kind="oldest_allowed", text=text)
    if failed := producer.failed_runs:
        runs = "the last run" if failed.runs == 1 else f"the last {counted(failed.runs, 'run')}"
        step = f" in {failed.step}" if failed.step else ""
        reason = f": {failed.reason}" if failed.reason else ""
        yield Problem(kind="failed_runs", text=f"{runs} failed, {failed.run_id[:8]}{step}{reason}")


def _of_pipeline(pipeline: type[Pipeline], status: PipelineStatus) -> Iterator[Problem]:
    if status.runs.error:
        yield Problem(kind="dagster", text=f"unknown whether runs are requested: {status.runs.error}")
    for text in status.changed_types.values():
        yield Problem(kind="changed_types", text=text)
    for text in status.receives.unreadable:
        yield Problem(kind="unreadable_receives", text=text)
    in_flight = [part.in_flight for part in (*status.producers.values(), *filter(None, [status.retries]))]
    crashed = {run.run_id for part in in_flight for run in part.runs if run.state == "expired"}
    if crashed := crashed | set(status.runs.crashed):
        names = ", ".join(sorted(run_id[:8] for run_id in crashed))
        yield Problem(kind="crashed_runs", text=f"{counted(len(crashed), 'run')} crashed or stalled: {names}")
    # As in alerts: a failure that an automatic retry will handle needs no person.
    if waiting := status.failures.open - (status.failures.scheduled if pipeline.retry else 0):
        yield Problem(kind="open_failures", text=f"{counted(waiting, 'open failure')} without automatic retry")
    if found := status.redelivered:
        times = f"returned up to {found.deliveries:,} times without a decision"
        text = f"{counted(found.messages, 'message')} {times}, since window {found.first_window}"
        yield Problem(kind="redelivered", text=text)
