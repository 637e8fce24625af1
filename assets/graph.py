"""A pipeline as one graph of ops, whose outputs are its partitioned assets."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import dagster as dg
from pydantic import Field

from assets import settlement
from assets.windows import windows_of
from pipeline_platform.flow import Flow
from pipeline_platform.lake.receives import Origin, Receive
from pipeline_platform.options import Batcher
from pipeline_platform.pipeline import Pipeline

PIPELINE_TAG = "pipeline_platform/pipeline"
DEMAND_TAG = "pipeline_platform/demand"
ORIGIN_TAG = "pipeline_platform/origin"
RECEIVE_TAG = "pipeline_platform/receive_id"
"""Tags of a run: whose it is, what it was asked for, and what it leased. The receive is how its ops, and those of a
run that re-executes it, find what the earlier ones wrote."""

PLATFORM = {"lake", "control", "spark", "acknowledger"}


class ReceiveConfig(dg.Config):
    """What a run takes on. With nothing said it drives the open failures of its windows once more."""

    origin: str = Field(
        default="failed",
        description="`source` pulls messages, `failed` drives the open failures of the windows once more, "
        "`messages` replays everything that the windows received, in place of what came of it.",
    )
    demand: int | None = Field(default=None, ge=1, description="Messages to take on; as many as a run may, if unset.")
    context: dict[str, Any] = Field(default_factory=dict, description="Fields of the pipeline's context to change.")


def pipeline_assets(pipeline: type[Pipeline]) -> dg.AssetsDefinition:
    """Build the assets of a pipeline.

    Args:
        pipeline: The class.

    Returns:
        `<pipeline>/messages`, `<pipeline>/<batcher>` for each batcher and `<pipeline>/failed`, partitioned by window,
        with the checks `acknowledged` and `no_open_failures`.
    """
    name = pipeline.name
    messages, failed = (dg.AssetKey([name, table]) for table in ("messages", "failed"))
    batchers = {batcher: dg.AssetKey([name, batcher]) for batcher in pipeline.batchers}
    acknowledged = dg.AssetCheckSpec(
        "acknowledged", asset=messages, description="The source was told of every message that this run decided."
    )
    open_failures = dg.AssetCheckSpec(
        "no_open_failures", asset=failed, description="No failed message of these windows waits to be driven again."
    )
    called = [batcher for batcher, options in pipeline.batchers.items() if isinstance(options, Batcher)]
    receive, handle, commit, acknowledge = (
        _receive_op(pipeline),
        _handle_op(pipeline),
        _commit_op(pipeline, [*batchers, "failed"]),
        _acknowledge_op(pipeline, acknowledged, open_failures),
    )
    batch_ops = [_batch_op(pipeline, batcher) for batcher in called]
    handle_failed = _handle_failed_op(pipeline)
    checks = {spec.get_python_identifier(): spec for spec in (acknowledged, open_failures)}
    outs = {"messages": dg.GraphOut(), **{table: dg.GraphOut() for table in [*batchers, "failed"]}}

    @dg.graph(name=name, description=pipeline.description(), out={**outs, **{out: dg.GraphOut() for out in checks}})
    def ops() -> dict[str, Any]:
        received = receive.alias("receive_messages")()
        handled = handle.alias("handle_messages")(received)
        batched = [op.alias(f"batch_{batcher}")(handled) for op, batcher in zip(batch_ops, called, strict=True)]
        routed = handle_failed.alias("handle_failed")([handled, *batched])
        committed = commit.alias("commit")(routed)
        settled = acknowledge.alias("acknowledge")([getattr(committed, table) for table in [*batchers, "failed"]])
        return {
            "messages": received,
            **{table: getattr(committed, table) for table in [*batchers, "failed"]},
            **{out: getattr(settled, out) for out in checks},
        }

    keys = {"messages": messages, **batchers, "failed": failed}
    return dg.AssetsDefinition.from_graph(
        ops,
        keys_by_output_name=keys,
        internal_asset_deps={"messages": set(), **{table: {messages} for table in [*batchers, "failed"]}},
        partitions_def=windows_of(pipeline),
        backfill_policy=dg.BackfillPolicy.single_run(),
        check_specs=[acknowledged, open_failures],
        group_name=name,
        descriptions_by_output_name=_descriptions(pipeline),
        owners_by_output_name={out: list(pipeline.owners) for out in keys},
        tags_by_output_name={out: {"dagster/kind/spark": "", "dagster/kind/delta": ""} for out in keys},
        metadata_by_output_name={out: {"dagster/storage_kind": "delta"} for out in keys},
    )


def _descriptions(pipeline: type[Pipeline]) -> dict[str, str]:
    told = {
        "messages": f"Every delivery from `{pipeline.producer.source}`, as received.\n\n{pipeline.description()}",
        "failed": "Messages that could not be handled, with reason and original payload. Materialise windows of it, "
        "with no configuration, to drive those that are open once more.",
    }
    for name, options in pipeline.batchers.items():
        rows = "" if options.table_schema is None else f" Columns: `{options.table_schema.__name__}`."
        how = (
            f"What `handle_batch` made of batches of up to {options.batch_size}, {options.concurrency} at a time."
            if isinstance(options, Batcher)
            else "The rows that `handle_message` sent here."
        )
        told[name] = f"{how}{rows} Each message once."
    return told


def flow_of(pipeline: type[Pipeline], context: dg.OpExecutionContext) -> Flow:
    """The pipeline with the resources of a run."""
    resources = context.resources
    return Flow(
        pipeline=pipeline,
        source=getattr(resources, pipeline.producer.source),
        lake=resources.lake,
        control=resources.control,
        session=lambda: resources.spark.spark_session,
    )


def receive_of(flow: Flow, context: dg.OpExecutionContext) -> Receive | None:
    """What this run received, or the run that it re-executes; None where it received nothing."""
    run = context.run
    while True:
        # The run's own tags as they are now: those it was started with have no receive yet.
        stored = context.instance.get_run_by_id(run.run_id) or run
        receive_id = stored.tags.get(RECEIVE_TAG)
        if receive_id:
            return flow.receives.get(receive_id)
        parent = context.instance.get_run_by_id(run.parent_run_id) if run.parent_run_id else None
        if parent is None:
            return None
        run = parent


def _keys(pipeline: type[Pipeline], *more: str) -> set[str]:
    return {pipeline.producer.source, "lake", "control", "spark", *more}


def _receive_op(pipeline: type[Pipeline]) -> dg.OpDefinition:
    @dg.op(
        name=f"{pipeline.name}__receive_messages",
        description="Leases messages and writes them down, once; everything later reads what is written here.",
        required_resource_keys=_keys(pipeline),
        out=dg.Out(dg.Nothing),
    )
    def receive_messages(context: dg.OpExecutionContext, config: ReceiveConfig) -> Iterator[Any]:
        if config.origin not in ("source", "failed", "messages"):
            raise dg.Failure(
                f"origin is {config.origin!r}; it is 'source', 'failed' or 'messages'", allow_retries=False
            )
        origin: Origin = config.origin  # type: ignore[assignment]
        flow = flow_of(pipeline, context)
        receive = flow.begin(
            origin=origin,
            run_id=context.run_id,
            windows=context.partition_keys,
            demand=config.demand,
            context=config.context,
        )
        tags = {RECEIVE_TAG: receive.receive_id, PIPELINE_TAG: pipeline.name, ORIGIN_TAG: origin}
        context.instance.add_run_tags(context.run_id, {**tags, DEMAND_TAG: str(receive.demand)})
        manifest = flow.receive(receive)
        if not receive.demand:
            context.log.info("no room: other runs hold as many messages as the pipeline may have in flight")
        yield dg.Output(None, metadata=settlement.of_receive(receive, manifest))
        settlement.log_windows(context, receive, {"messages": settlement.received_by_window(receive, manifest)})

    return receive_messages


def _handle_op(pipeline: type[Pipeline]) -> dg.OpDefinition:
    @dg.op(
        name=f"{pipeline.name}__handle_messages",
        description="Gives each message to `handle_message`, in Spark tasks; a failure is its message's alone.",
        required_resource_keys=_keys(pipeline),
        ins={"received": dg.In(dg.Nothing)},
        out=dg.Out(dg.Nothing),
    )
    def handle_messages(context: dg.OpExecutionContext) -> None:
        flow = flow_of(pipeline, context)
        receive = receive_of(flow, context)
        if receive is not None:
            manifest = flow.handle(receive)
            context.log.info(
                "handled %s, failed %s, to batch %s",
                manifest.total("handled"),
                manifest.total("failed"),
                sum(manifest.total(f"staged:{name}") for name in pipeline.batchers),
            )

    return handle_messages


def _batch_op(pipeline: type[Pipeline], batcher: str) -> dg.OpDefinition:
    @dg.op(
        name=f"{pipeline.name}__batch_{batcher}",
        description=f"Gives batches of messages for `{batcher}` to `handle_batch`.",
        required_resource_keys=_keys(pipeline),
        ins={"handled": dg.In(dg.Nothing)},
        out=dg.Out(dg.Nothing),
    )
    def batch(context: dg.OpExecutionContext) -> None:
        flow = flow_of(pipeline, context)
        receive = receive_of(flow, context)
        if receive is not None:
            manifest = flow.batch(receive, batcher)
            context.log.info("%s batches, %s messages", manifest.total("batches"), manifest.total("handled"))

    return batch


def _handle_failed_op(pipeline: type[Pipeline]) -> dg.OpDefinition:
    @dg.op(
        name=f"{pipeline.name}__handle_failed",
        description="Brings the failures of all stages together: kept as failed messages, or given back to the source.",
        required_resource_keys=_keys(pipeline),
        ins={"stages": dg.In(dg.Nothing)},
        out=dg.Out(dg.Nothing),
    )
    def handle_failed(context: dg.OpExecutionContext) -> None:
        flow = flow_of(pipeline, context)
        receive = receive_of(flow, context)
        if receive is not None:
            told = settlement.of_failures(flow.receives.manifest(receive.receive_id))
            if told:
                context.add_output_metadata(told)

    return handle_failed


def _commit_op(pipeline: type[Pipeline], tables: Sequence[str]) -> dg.OpDefinition:
    @dg.op(
        name=f"{pipeline.name}__commit",
        description="Decides what became of every message, then makes it visible in every table.",
        required_resource_keys=_keys(pipeline),
        ins={"routed": dg.In(dg.Nothing)},
        out={table: dg.Out(dg.Nothing) for table in tables},
    )
    def commit(context: dg.OpExecutionContext) -> Iterator[Any]:
        flow = flow_of(pipeline, context)
        receive = receive_of(flow, context)
        rows: Mapping[str, int] = {}
        if receive is not None:
            decision = flow.decide(receive)
            if decision.dropped:
                context.log.info("%s messages were decided by other runs meanwhile", decision.dropped)
            rows = flow.publish(receive)
        for table in tables:
            yield dg.Output(None, output_name=table, metadata={"rows": rows.get(table, 0)})

    return commit


def _acknowledge_op(
    pipeline: type[Pipeline], acknowledged: dg.AssetCheckSpec, open_failures: dg.AssetCheckSpec
) -> dg.OpDefinition:
    @dg.op(
        name=f"{pipeline.name}__acknowledge",
        description="Tells the source, in groups, what is decided and published; then settles the windows' figures.",
        required_resource_keys=_keys(pipeline, "acknowledger"),
        ins={"committed": dg.In(dg.Nothing)},
        out={spec.get_python_identifier(): dg.Out(None) for spec in (acknowledged, open_failures)},
    )
    def acknowledge(context: dg.OpExecutionContext) -> Iterator[Any]:
        flow = flow_of(pipeline, context)
        receive = receive_of(flow, context)
        settled = settlement.settle(context, flow, receive, context.resources.acknowledger)
        for spec, result in zip(
            (acknowledged, open_failures), settled.checks(acknowledged, open_failures), strict=True
        ):
            yield dg.Output(result, output_name=spec.get_python_identifier())
        if settled.red:
            raise dg.Failure(settled.red, allow_retries=False)

    return acknowledge
