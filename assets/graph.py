"""A pipeline as one graph of ops, whose outputs are its partitioned assets."""

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any

import dagster as dg
from pydantic import Field

from assets import settlement
from assets.tags import RunTags
from assets.windows import windows_of
from pipeline_platform.imports import import_apart
from pipeline_platform.lake.ledger import Origin, Receive
from pipeline_platform.model.options import Batcher
from pipeline_platform.model.pipeline import Pipeline, PipelineError
from pipeline_platform.run import steps
from pipeline_platform.run.begin import begin, resume
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.lease import alive
from pipeline_platform.run.standing import expect_finished


class RunOrigin(Enum):
    """Where a run takes its messages from: the origins, as the launchpad offers them."""

    source = "source"
    failed = "failed"
    messages = "messages"


class ReceiveConfig(dg.Config):
    """What a run takes on. With nothing said it drives the open failures of its windows once more.

    A job says its origin by a tag: config of its own, and Dagster would take none from who launches a backfill of it.
    """

    origin: RunOrigin | None = Field(
        default=None,
        description="`source` pulls messages, `failed` drives the open failures of the windows once more, "
        "`messages` replays everything that the windows received, in place of what came of it. Unset, it is what the "
        "job is for; of assets that are materialised without a job, `failed`.",
    )
    demand: int | None = Field(
        default=None,
        ge=1,
        description="Messages to take on, up to what a run may; as many if unset. A replay takes all in any case.",
    )
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
        "no_open_failures", asset=failed, description="No failed message of any window waits to be driven again."
    )
    tables = [*batchers, "failed"]
    called = [batcher for batcher, options in pipeline.batchers.items() if isinstance(options, Batcher)]
    receive, handle, commit, acknowledge = (
        _receive_op(pipeline),
        _handle_op(pipeline),
        _commit_op(pipeline),
        _acknowledge_op(pipeline, tables, acknowledged, open_failures),
    )
    batch_ops = [_batch_op(pipeline, batcher) for batcher in called]
    handle_failed = _handle_failed_op(pipeline)
    checks = {spec.get_python_identifier(): spec for spec in (acknowledged, open_failures)}
    outs = {out: dg.GraphOut() for out in ["messages", *tables, *checks]}

    @dg.graph(name=name, description=pipeline.description(), out=outs)
    def ops() -> dict[str, Any]:
        received = receive.alias("receive_messages")()
        handled = handle.alias("handle_messages")(received)
        batched = [op.alias(f"batch_{batcher}")(handled) for op, batcher in zip(batch_ops, called, strict=True)]
        routed = handle_failed.alias("handle_failed")([handled, *batched])
        committed = commit.alias("commit")(routed)
        settled = acknowledge.alias("acknowledge")(committed)
        return {"messages": received, **{out: getattr(settled, out) for out in [*tables, *checks]}}

    keys = {"messages": messages, **batchers, "failed": failed}
    return dg.AssetsDefinition.from_graph(
        ops,
        keys_by_output_name=keys,
        internal_asset_deps={"messages": set(), **{table: {messages} for table in tables}},
        partitions_def=windows_of(pipeline),
        backfill_policy=dg.BackfillPolicy.single_run(),
        check_specs=[acknowledged, open_failures],
        group_name=name,
        descriptions_by_output_name=_descriptions(pipeline),
        owners_by_output_name={out: list(pipeline.owners) for out in keys},
        tags_by_output_name={out: {"dagster/kind/spark": "", "dagster/kind/deltalake": ""} for out in keys},
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


_FLOWS: dict[str, Flow] = {}
"""Of the run that this process works on, by pipeline: the steps of a run share what they know of their receive."""


def flow_of(pipeline: type[Pipeline], context: dg.AssetExecutionContext) -> Flow:
    """The pipeline with the resources of a run, the same for all steps in one process."""
    resources, flow = context.resources, _FLOWS.get(pipeline.name)
    if flow is None or flow.pipeline is not pipeline or flow.control is not resources.control:
        import_apart("pandas")  # PyArrow does it at the first value it makes
        flow = _FLOWS[pipeline.name] = Flow(
            pipeline=pipeline,
            source=getattr(resources, pipeline.producer.source),
            lake=resources.lake,
            control=resources.control,
            session=lambda: resources.spark.spark_session,
        )
    return flow


def receive_of(flow: Flow, context: dg.AssetExecutionContext) -> Receive | None:
    """What this run received, or the run that it re-executes; None where it had no room, or another run finished it.

    Raises:
        PipelineError: No run received anything.
        FencedError: It was given up, or another run works on it by now.
    """
    tags = RunTags.of(flow.pipeline)
    received = next((run for run in _lineage(context) if run.tags.get(tags.receive_id)), None)
    if received is None:
        raise PipelineError(
            f"{flow.pipeline.name}: run {context.run.run_id} received nothing, nor did a run that it re-executes: "
            "execute `receive_messages` and all steps after it"
        )
    receive_id = received.tags[tags.receive_id]
    receive = flow.ledger.get(receive_id)
    if receive is None and received.tags.get(tags.demand) != "0":
        expect_finished(flow, receive_id, [run.run_id for run in _lineage(context)])
        context.log.warning(f"receive {receive_id} is finished: nothing is left to do here")
    return receive


def _lineage(context: dg.AssetExecutionContext) -> Iterator[dg.DagsterRun]:
    """The run, the one that it re-executes, and so on; with tags as they are now: at its start a run has no receive."""
    run_id: str | None = context.run.run_id
    while run_id and (run := context.instance.get_run_by_id(run_id)):
        yield run
        run_id = run.parent_run_id


def at_work(flow: Flow, context: dg.AssetExecutionContext) -> Receive | None:
    """What was received, to be worked on by this run from now on."""
    receive = receive_of(flow, context)
    if receive is not None and receive.run_id != context.run.run_id:
        return resume(flow, receive, context.run.run_id)
    return receive


def _keys(pipeline: type[Pipeline], *more: str) -> set[str]:
    return {pipeline.producer.source, "lake", "control", "spark", *more}


def _receive_op(pipeline: type[Pipeline]) -> dg.OpDefinition:
    @dg.op(
        name=f"{pipeline.name}__receive_messages",
        description="Leases messages and writes them down, once; everything later reads what is written here.",
        required_resource_keys=_keys(pipeline),
        out=dg.Out(dg.Nothing),
    )
    def receive_messages(context: dg.AssetExecutionContext, config: ReceiveConfig) -> None:
        tags = RunTags.of(pipeline)
        origin: Origin = (config.origin or RunOrigin(context.run.tags.get(tags.origin, "failed"))).value
        flow = flow_of(pipeline, context)
        receive = begin(
            flow,
            origin=origin,
            run_id=context.run.run_id,
            windows=context.partition_keys,
            demand=config.demand,
            context=config.context,
            log=context.log.info,
        )
        told = {tags.origin: origin, tags.demand: str(receive.demand), tags.receive_id: receive.receive_id}
        context.instance.add_run_tags(context.run.run_id, told)
        manifest = steps.receive_messages(flow, receive)
        settlement.tell_received(context, receive, manifest)

    return receive_messages


Step = Callable[[Flow, Receive, dg.AssetExecutionContext], None]
"""What an op does with what its run received; not called where that was nothing."""


def _step_op(pipeline: type[Pipeline], name: str, description: str, step: Step) -> dg.OpDefinition:
    """Build an op that comes after others and hands nothing over but the word that it is done."""

    @dg.op(
        name=f"{pipeline.name}__{name}",
        description=description,
        required_resource_keys=_keys(pipeline),
        ins={"after": dg.In(dg.Nothing)},
        out=dg.Out(dg.Nothing),
    )
    def op(context: dg.AssetExecutionContext) -> None:
        flow = flow_of(pipeline, context)
        receive = at_work(flow, context)
        if receive is not None:
            step(flow, receive, context)

    return op


def _handle_op(pipeline: type[Pipeline]) -> dg.OpDefinition:
    def handle_messages(flow: Flow, receive: Receive, context: dg.AssetExecutionContext) -> None:
        manifest = steps.handle_messages(flow, receive)
        staged = sum(manifest.total(f"staged:{name}") for name in pipeline.batchers)
        handled, failed = manifest.total("handled"), manifest.total("failed")
        context.log.info(f"handled {handled}, failed {failed}, to batch {staged}")

    description = "Gives each message to `handle_message`, in Spark tasks; a failure is its message's alone."
    return _step_op(pipeline, "handle_messages", description, handle_messages)


def _batch_op(pipeline: type[Pipeline], batcher: str) -> dg.OpDefinition:
    def batch(flow: Flow, receive: Receive, context: dg.AssetExecutionContext) -> None:
        manifest = steps.batch_messages(flow, receive, batcher)
        context.log.info(f"{manifest.total('batches')} batches, {manifest.total('handled')} messages")

    description = f"Gives batches of messages for `{batcher}` to `handle_batch`."
    return _step_op(pipeline, f"batch_{batcher}", description, batch)


def _handle_failed_op(pipeline: type[Pipeline]) -> dg.OpDefinition:
    def handle_failed(flow: Flow, receive: Receive, context: dg.AssetExecutionContext) -> None:
        if told := settlement.of_failures(flow.ledger.manifest(receive)):
            context.add_output_metadata(told)

    description = "Brings the failures of all stages together: kept as failed messages, or given back to the source."
    return _step_op(pipeline, "handle_failed", description, handle_failed)


def _commit_op(pipeline: type[Pipeline]) -> dg.OpDefinition:
    def commit(flow: Flow, receive: Receive, context: dg.AssetExecutionContext) -> None:
        with alive(flow, receive):
            decision = steps.decide(flow, receive)
            rows = steps.publish(flow, receive)
        if decision.dropped:
            context.log.info(
                f"{decision.dropped} messages were decided by other runs meanwhile; decided the rest in "
                f"{decision.tries} tries"
            )
        context.add_output_metadata({f"rows in {table}": count for table, count in rows.items()})

    description = "Decides what became of every message, then makes it visible in every table."
    return _step_op(pipeline, "commit", description, commit)


def _acknowledge_op(
    pipeline: type[Pipeline],
    tables: Sequence[str],
    acknowledged: dg.AssetCheckSpec,
    open_failures: dg.AssetCheckSpec,
) -> dg.OpDefinition:
    checks = [spec.get_python_identifier() for spec in (acknowledged, open_failures)]

    @dg.op(
        name=f"{pipeline.name}__acknowledge",
        description="Tells the source, in groups, what is decided and published; then settles the windows' figures.",
        required_resource_keys=_keys(pipeline, "acknowledger"),
        ins={"committed": dg.In(dg.Nothing)},
        out={**{table: dg.Out(dg.Nothing) for table in tables}, **{check: dg.Out(None) for check in checks}},
    )
    def acknowledge(context: dg.AssetExecutionContext) -> Iterator[Any]:
        flow = flow_of(pipeline, context)
        settled = settlement.settle(context, flow, at_work(flow, context), context.resources.acknowledger)
        if settled.red:
            yield from settled.checks(acknowledged, open_failures)
            context.instance.add_run_tags(context.run.run_id, {RunTags.of(pipeline).published: context.run.run_id})
            # Before the tables' outputs: a window that is materialised is green, and a backfill of it too.
            raise dg.Failure(settled.red, allow_retries=False)
        # Each table once, and last: what Dagster shows of it are the figures of the whole run.
        for table in tables:
            yield dg.Output(None, output_name=table)
        yield from settled.checks(acknowledged, open_failures)

    return acknowledge
