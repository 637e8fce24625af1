"""The runs of a pipeline: their tags, how one is asked for, and the jobs that Dagster makes them of."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self, get_args

import dagster as dg

from pipeline_platform.lake.failure_events import ALL, Selection
from pipeline_platform.lake.ledger import Origin
from pipeline_platform.lake.maintenance import maintain
from pipeline_platform.lake.refused_changes import SchemaChangeError
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.pipeline import Pipeline

REPLAY_TAG = "pipeline_platform/replay"
"""On every run of a replay job, with the pipeline's name: `dagster.yaml` has one of a pipeline run at a time."""
_RANGE = "dagster/asset_partition_range"
"""The tags by which Dagster runs an asset job over several partitions."""
NO_RETRIES = {"dagster/max_retries": "0"}
"""A run is not tried again as a whole: the next one finishes what it decided, and its leases bring back the rest."""


class RunTags(NamedTuple):
    """The keys of one pipeline's tags. A run may carry several pipelines, so each has keys of its own.

    Attributes:
        origin: Where the run takes the pipeline's messages from; on every run that is known to be the pipeline's.
        demand: How many messages it was asked for, then how many it took on.
        receive_id: What it leased: ops, and the run that re-executes them, find by it what earlier ops wrote.
        received: How many messages it received, once it has.
        published: On a red run of which all is published and acknowledged: its own id, because re-executions copy tags.
        producer: Which producer it pulls from; on no run where there is one, or where it pulls from none.
    """

    origin: str
    demand: str
    receive_id: str
    received: str
    published: str
    producer: str

    @classmethod
    def of(cls, pipeline: type[Pipeline]) -> Self:
        """The keys for a pipeline."""
        return cls(*(f"pipeline_platform.{field}/{pipeline.name}" for field in cls._fields))


def named(pipeline: type[Pipeline], producer: str) -> str:
    """What sensors and schedules of a producer are named after."""
    return pipeline.limits_key(producer).replace("/", "_")


def runs_of(pipeline: type[Pipeline], statuses: Sequence[dg.DagsterRunStatus], *origins: Origin) -> dg.RunsFilter:
    """Filter a pipeline's runs of some statuses: those that take their messages from some origins, or all."""
    return dg.RunsFilter(tags={RunTags.of(pipeline).origin: list(origins or get_args(Origin))}, statuses=list(statuses))


def runs_by_producer(pipeline: type[Pipeline], statuses: Sequence[dg.DagsterRunStatus], producer: str) -> dg.RunsFilter:
    """Filter the runs that pull from a producer; without a name those that pull from none of several, or all runs."""
    tags = RunTags.of(pipeline)
    if producer:
        return dg.RunsFilter(tags={tags.origin: "source", tags.producer: producer}, statuses=list(statuses))
    others: tuple[Origin, ...] = ("failed", "messages") if pipeline.producers else ()
    return runs_of(pipeline, statuses, *others)


def receive_config(
    pipeline: type[Pipeline],
    origin: Origin,
    demand: int | None = None,
    producer: str = "",
    selection: Selection = ALL,
    *,
    ignore_pause: bool = False,
) -> dict[str, Any]:
    """The run config of a run on some origin; without a demand it takes on what a run may."""
    failures = selection.model_dump(mode="json", exclude_defaults=True)
    given = {
        "origin": origin,
        "demand": demand,
        "producer": producer or None,
        "failures": failures or None,
        "ignore_pause": ignore_pause or None,
    }
    config = {name: value for name, value in given.items() if value is not None}
    return {"ops": {pipeline.name: {"ops": {"receive_messages": {"config": config}}}}}


REFUSED: dict[type[Pipeline], str] = {}
"""Why pipelines get no runs: models that no longer fit their tables, as found when the definitions were loaded."""


def refuse_changed_models(pipeline: type[Pipeline]) -> None:
    """Raise a `SchemaChangeError` for a pipeline whose runs would be refused for its model."""
    if (refusal := REFUSED.get(pipeline)) is not None:
        raise SchemaChangeError(refusal)


def run_request(
    pipeline: type[Pipeline],
    origin: Origin,
    windows: Sequence[str],
    expected: int,
    demand: int | None = None,
    run_key: str | None = None,
    producer: str = "",
    selection: Selection = ALL,
    *,
    ignore_pause: bool = False,
) -> dg.RunRequest:
    """Ask for a run on neighbouring windows, in order.

    `expected` messages count as in flight until the run has claimed its room. It may take on `demand`, or what a run
    may. The requests of one schedule's tick need a `run_key` each. Of several producers, a pull is from one. A backfill
    may be about a `selection` of the open failures.

    Raises:
        SchemaChangeError: A model of the pipeline no longer fits its table.
    """
    refuse_changed_models(pipeline)
    tags, partition = RunTags.of(pipeline), windows[0] if len(windows) == 1 else None
    bounds = {f"{_RANGE}_start": windows[0], f"{_RANGE}_end": windows[-1]}
    pulls_from = {tags.producer: producer} if producer else {}
    return dg.RunRequest(
        run_key,
        receive_config(pipeline, origin, demand, producer, selection, ignore_pause=ignore_pause),
        {tags.origin: origin, tags.demand: str(expected), **pulls_from, **NO_RETRIES, **({} if partition else bounds)},
        partition_key=partition,
    )


def pipeline_jobs(pipeline: type[Pipeline], assets: dg.AssetsDefinition) -> list[Any]:
    """Build `<pipeline>_pull`, `<pipeline>_backfill` (open failures) and `<pipeline>_replay` (everything)."""
    # A run reports its checks itself; that of the backlog looks at the source, and every run would do that twice.
    selection = dg.AssetSelection.assets(*assets.keys).without_checks()
    jobs: dict[Origin, tuple[str, str]] = {
        "source": ("pull", "Pulls messages from the source."),
        "failed": ("backfill", "Retries the open failures of the chosen windows."),
        "messages": ("replay", "Replays all messages of the chosen windows; the new rows replace the old ones."),
    }
    replay = {"messages": {REPLAY_TAG: pipeline.name}}
    return [
        dg.define_asset_job(
            f"{pipeline.name}_{name}",
            selection=selection,
            description=description,
            executor_def=dg.in_process_executor,
            tags={RunTags.of(pipeline).origin: origin, **NO_RETRIES, **replay.get(origin, {})},
        )
        for origin, (name, description) in jobs.items()
    ]


def maintenance_job(pipeline: type[Pipeline]) -> dg.JobDefinition:
    """Build the job `<pipeline>_maintenance`: compaction and retention."""

    @dg.op(
        name=f"{pipeline.name}__maintain",
        description="Compacts every table, and drops what is older than `retention`.",
        required_resource_keys={"lake"},
        out=dg.Out(dg.Nothing),
    )
    def maintain_tables(context: dg.OpExecutionContext) -> None:
        report = maintain(Tables(context.resources.lake, pipeline), pipeline.retention, log=context.log.warning)
        context.add_output_metadata({table: dg.MetadataValue.json(done) for table, done in report.items()})

    @dg.job(
        name=f"{pipeline.name}_maintenance",
        description="Compacts the tables and drops old windows.",
        executor_def=dg.in_process_executor,
    )
    def job() -> None:
        maintain_tables.alias("maintain")()

    return job
