"""The runs of a pipeline: their tags, requests and jobs."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self, get_args

import dagster as dg

from pipeline_platform.lake.decisions.ledger import Origin
from pipeline_platform.lake.failures.failure_events import ALL, Selection
from pipeline_platform.lake.schema_changes import SchemaChangeError
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline

REPLAY_TAG = "pipeline_platform/replay"
"""Tag of every replay, with the pipeline's name: `dagster.yaml` limits replays of a pipeline to one at a time."""
_RANGE = "dagster/asset_partition_range"
"""The tags by which Dagster runs an asset job over several partitions."""
NO_RETRIES = {"dagster/max_retries": "0"}
"""Dagster does not retry runs: the next run finishes a decided receive, and releases an undecided one."""

_JOBS: dict[Origin, tuple[str, str]] = {
    "source": ("pull", "Pulls messages from the source."),
    "failed": ("retry", "Retries the open failures of the chosen windows."),
    "messages": ("replay", "Replays all messages of the chosen windows; the new rows replace the old ones."),
}
"""Names of jobs after the pipeline's, with descriptions, by origin of their runs."""


class RunTags(NamedTuple):
    """Tag keys of a pipeline: `orders/demand`. A run may contain several pipelines, so each pipeline has its own keys.

    They are short, because Dagster's list of runs cuts a tag, key and value together, after about 35 characters.

    Attributes:
        origin: Origin of the messages, on every run of the pipeline.
        demand: Number of messages requested; from the start of the receive on, its demand.
        receive_id: Id of the receive. Ops, and a re-execution of the run, find the receive by it.
        received: Number of messages received.
        published: Own id of a red run whose receive is published and acknowledged. Re-executions copy tags.
        producer: Name of the producer, if the pipeline has several and the run pulls from one.
        rounds: Number of rounds at the last report, on a run that continues after its first receive.
    """

    origin: str
    demand: str
    receive_id: str
    received: str
    published: str
    producer: str
    rounds: str

    @classmethod
    def of(cls, pipeline: type[Pipeline]) -> Self:
        """Return the keys of a pipeline."""
        return cls(*(f"{pipeline.name}/{field}" for field in cls._fields))


def producer_tag(producer: BoundProducer) -> dict[str, str]:
    """Return the tag of a run with the name of its producer; empty without a name."""
    return {RunTags.of(producer.pipeline).producer: producer.name} if producer.name else {}


def tags_of(pipeline: type[Pipeline], *origins: Origin) -> dict[str, Sequence[str]]:
    """Return the tags of the runs of a pipeline with one of the origins, or any origin."""
    return {RunTags.of(pipeline).origin: list(origins or get_args(Origin))}


def job_of(pipeline: type[Pipeline], origin: Origin) -> str:
    """Return the name of the job that has the runs of an origin."""
    return f"{pipeline.name}_{_JOBS[origin][0]}"


def receive_config(
    producer: BoundProducer,
    origin: Origin,
    demand: int | None = None,
    selection: Selection = ALL,
    *,
    ignore_pause: bool = False,
    rounds: bool = False,
    context: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the run config of a run. Without a demand, it receives as many messages as a run may."""
    failures = selection.model_dump(mode="json", exclude_defaults=True)
    given = {
        "origin": origin,
        "demand": demand,
        "producer": producer.name or None,
        "failures": failures or None,
        "context": dict(context) if context else None,
        "ignore_pause": ignore_pause or None,
        "rounds": rounds or None,
    }
    config = {name: value for name, value in given.items() if value is not None}
    return {"ops": {producer.pipeline.name: {"ops": {"receive_messages": {"config": config}}}}}


REFUSED: dict[type[Pipeline], str] = {}
"""Pipelines without runs, with the reason: a model that no longer fits its table when definitions are loaded. The ticks
of sensors and schedules look it up; opening the tables at each tick would be slow."""


def refuse_changed_models(pipeline: type[Pipeline]) -> None:
    """Raise a `SchemaChangeError` if runs of the pipeline would be refused because of a model."""
    if (refusal := REFUSED.get(pipeline)) is not None:
        raise SchemaChangeError(refusal)


def run_request(
    producer: BoundProducer,
    origin: Origin,
    windows: Sequence[str],
    expected: int,
    demand: int | None = None,
    run_key: str | None = None,
    selection: Selection = ALL,
    *,
    ignore_pause: bool = False,
    rounds: bool = False,
    context: Mapping[str, Any] | None = None,
) -> dg.RunRequest:
    """Return the request for a run on contiguous windows.

    Args:
        producer: Producer to pull from; the whole pipeline for retries and replays.
        origin: Origin of the messages.
        windows: Partition keys, in order.
        expected: Messages that count as in flight until the run has claimed its capacity.
        demand: Maximum number of messages; None for as many as a run may receive.
        run_key: Key of the request; the requests of one tick of a schedule need different keys.
        selection: Open failures that a retry selects.
        ignore_pause: Whether the run receives messages even if the pipeline is paused.
        rounds: Whether the run continues after its first receive.
        context: Fields of the pipeline's context to change in this run, as JSON.

    Raises:
        SchemaChangeError: A model of the pipeline no longer fits its table.
    """
    refuse_changed_models(producer.pipeline)
    tags, partition = RunTags.of(producer.pipeline), windows[0] if len(windows) == 1 else None
    bounds = {f"{_RANGE}_start": windows[0], f"{_RANGE}_end": windows[-1]}
    own = {tags.origin: origin, tags.demand: str(expected), **producer_tag(producer)}
    return dg.RunRequest(
        run_key,
        receive_config(producer, origin, demand, selection, ignore_pause=ignore_pause, rounds=rounds, context=context),
        {**own, **NO_RETRIES, **({} if partition else bounds)},
        partition_key=partition,
    )


def pipeline_jobs(pipeline: type[Pipeline], assets: dg.AssetsDefinition) -> list[Any]:
    """Build `<pipeline>_pull`, `<pipeline>_retry` (open failures) and `<pipeline>_replay` (everything)."""
    # A run reports its checks itself; that of the backlog looks at the source, and every run would do that twice.
    selection = dg.AssetSelection.assets(*assets.keys).without_checks()
    replay = {"messages": {REPLAY_TAG: pipeline.name}}
    return [
        dg.define_asset_job(
            job_of(pipeline, origin),
            selection=selection,
            description=description,
            executor_def=dg.in_process_executor,
            tags={RunTags.of(pipeline).origin: origin, **NO_RETRIES, **replay.get(origin, {})},
        )
        for origin, (_, description) in _JOBS.items()
    ]
