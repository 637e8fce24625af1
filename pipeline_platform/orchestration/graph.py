"""A pipeline as one graph of ops, whose outputs are its partitioned assets."""

import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import dagster as dg

from pipeline_platform.lake.decisions.ledger import Receive
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.options import Batcher, Splitter, has_table
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.safe_text import printable
from pipeline_platform.orchestration.asset_metadata import metadata_of
from pipeline_platform.orchestration.asset_windows import windows_of
from pipeline_platform.orchestration.failing import failing_with_reason
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.orchestration.reports import reporting
from pipeline_platform.orchestration.reports.reporting import log_output
from pipeline_platform.orchestration.resources.lake_resources import IO_MANAGER
from pipeline_platform.orchestration.resources.sink_resources import sink_keys
from pipeline_platform.orchestration.rounds.rounds import Rounds
from pipeline_platform.orchestration.runs.further_retries import further_retries
from pipeline_platform.orchestration.runs.receive_config import ReceiveConfig, receive_config_of
from pipeline_platform.orchestration.runs.run_receive import (
    config_of,
    flow_of,
    has_one_process,
    interrupted_retry,
    producer_of,
    receive_of,
    working_step,
)
from pipeline_platform.run import batching, steps
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import intake_of
from pipeline_platform.run.lease import BETWEEN_STEPS_S, CLAIM_S, alive, keep_until_next_step, standing_by
from pipeline_platform.run.outages import naming_outages
from pipeline_platform.run.receive_state import Phase
from pipeline_platform.run.stopping import acknowledged, end_if_asked, heeding


def asset_keys(pipeline: type[Pipeline]) -> dict[str, dg.AssetKey]:
    """Return the keys of a pipeline's assets by table: `messages`, the batchers and `failed`."""
    return {table: dg.AssetKey([pipeline.name, table]) for table in ("messages", *pipeline.batchers, "failed")}


def resource_keys(pipeline: type[Pipeline]) -> set[str]:
    """Return the keys of the resources that a pipeline's ops use, beside the IO manager."""
    sources = {producer.source for producer in BoundProducer.all_of(pipeline)}
    letters = {pipeline.dead_letters} if pipeline.dead_letters else set()
    return {*sources, *letters, *sink_keys(pipeline).values(), "lake", "control", "spark", "acknowledger"}


def pipeline_assets(pipeline: type[Pipeline]) -> dg.AssetsDefinition:
    """Build `<pipeline>/messages`, `<pipeline>/<batcher>` for each batcher and `<pipeline>/failed`.

    They are partitioned by window. All steps run, whichever asset is materialised: `failed` alone retries the open
    failures of the windows, any other selection pulls.
    """
    keys = asset_keys(pipeline)
    has_rounds = any(producer.options.idle_timeout for producer in BoundProducer.all_of(pipeline))
    receive, acknowledge = _receive_op(pipeline), _acknowledge_op(pipeline, () if has_rounds else keys)
    handle = _step_op(pipeline, "handle_messages", _handle, Phase.LEASED)
    has_batches = any(isinstance(options, Batcher) for options in pipeline.batchers.values())
    batches = [_step_op(pipeline, "handle_batches", _handle_batches, Phase.HANDLED)] if has_batches else []
    handle_failed = _step_op(pipeline, "handle_failed", _handle_failed, Phase.BATCHED)
    commit = _step_op(pipeline, "commit", _commit, Phase.BATCHED)
    further_rounds = _further_rounds_op(pipeline, keys)

    @dg.graph(name=pipeline.name, description=pipeline.description(), out={out: dg.GraphOut() for out in keys})
    def ops() -> dict[str, Any]:
        received = _named(receive)()
        handled = _named(handle)(received)
        routed = _named(handle_failed)([handled, *(_named(batch)(handled) for batch in batches)])
        last, before = acknowledge, _named(commit)(routed)
        if has_rounds:
            last, before = further_rounds, _named(acknowledge)(before)
        ended = _named(last).with_hooks({end_as_asked})(before)
        return {out: getattr(ended, out) for out in keys}

    return dg.AssetsDefinition.from_graph(
        ops,
        keys_by_output_name=keys,
        internal_asset_deps={out: {keys["messages"]} - {key} for out, key in keys.items()},
        partitions_def=windows_of(pipeline),
        backfill_policy=dg.BackfillPolicy.single_run(),
        can_subset=True,  # all outputs are of the last op, so that no selection leaves out an op
        group_name=pipeline.name,
        descriptions_by_output_name=_descriptions(pipeline),
        owners_by_output_name={out: list(pipeline.owners) for out in keys},
        tags_by_output_name={out: {"dagster/kind/spark": "", "dagster/kind/deltalake": ""} for out in keys},
        metadata_by_output_name={out: metadata_of(pipeline, out) for out in keys},
    )


def _descriptions(pipeline: type[Pipeline]) -> dict[str, str]:
    sources = ", ".join(f"`{producer.source}`" for producer in BoundProducer.all_of(pipeline))
    pulls = f"Materialising it pulls from {sources}."
    descriptions = {
        "messages": f"Every delivery from {sources}, as received. {pulls}\n\n{pipeline.description()}",
        "failed": "Messages that could not be handled, with reason and original payload. Materialise windows of it "
        "alone, with no configuration, to retry those that are open.",
    }
    for name, options in pipeline.batchers.items():
        rows = "" if options.table_schema is None else f" Columns: `{options.table_schema.__name__}`."
        how = "The rows that `handle_message` sent here."
        if isinstance(options, Batcher):
            batches = f"batches of up to {_size(options)}, {options.concurrency} at a time."
            how = (
                f"Messages that `handle_batch` returned, in {batches}"
                if options.table
                else f"Effects of `handle_batch` for {batches}"
            )
        once = f"{rows} Each message is stored once." if has_table(options) else " Without a table."
        descriptions[name] = f"{how}{once} {pulls}"
    return descriptions


def _size(options: Batcher) -> str:
    by_step = isinstance(options.batch_size, Splitter)
    return f"{options.batch_bytes:,} bytes, cut by a splitter" if by_step else f"{options.batch_size} messages"


def _op(pipeline: type[Pipeline], name: str, **options: Any) -> Callable[..., dg.OpDefinition]:
    """Return the decorator of an op without outputs: ops share data through the lake, by receive."""
    options = {"out": dg.Out(dg.Nothing, io_manager_key=IO_MANAGER), **options}
    return dg.op(name=f"{pipeline.name}__{name}", required_resource_keys=resource_keys(pipeline), **options)


@contextmanager
def _failing_with_reason(context: dg.AssetExecutionContext) -> Iterator[None]:
    with failing_with_reason(), naming_outages(context.resources.lake, context.resources.spark.remote):
        yield


def _end_step(flow: Flow, receive: Receive, context: dg.AssetExecutionContext) -> None:
    if not has_one_process(context):
        keep_until_next_step(flow, receive)


def _named(op: dg.OpDefinition) -> Any:
    """Return the op under its short name in the graph. Names of ops are unique in a code location."""
    return op.alias(op.name.split("__", 1)[1])


def _receive_op(pipeline: type[Pipeline]) -> dg.OpDefinition:
    configured: Any = receive_config_of(pipeline)

    @_op(pipeline, "receive_messages")
    def receive_messages(context: dg.AssetExecutionContext, config: configured) -> None:  # noqa: ARG001 - for the launchpad
        """Leases messages from the source and writes them to the lake, from which all later steps read."""
        with _failing_with_reason(context):
            flow, receive = receive_of(pipeline, context, config_of(pipeline, context))
            if receive is not None:
                _end_step(flow, receive, context)

    return receive_messages


OpWork = Callable[[Flow, Receive, dg.AssetExecutionContext], None]
"""Work of an op on the receive of its run."""


def _step_op(pipeline: type[Pipeline], name: str, step: OpWork, after: Phase) -> dg.OpDefinition:
    @_op(pipeline, name, description=step.__doc__, ins={"after": dg.In(dg.Nothing)})
    def op(context: dg.AssetExecutionContext) -> None:
        with _failing_with_reason(context):
            flow, receive = receive_of(pipeline, context)
            if receive is not None:
                with working_step(flow, receive, context):
                    steps.advance(flow, receive, after)
                    step(flow, receive, context)
                _end_step(flow, receive, context)

    return op


def _handle(flow: Flow, receive: Receive, context: dg.AssetExecutionContext) -> None:
    """Calls `handle_message` for each message, in Spark tasks. A failure concerns one message only."""
    manifest = steps.handle_messages(flow, receive)
    log_output(context, manifest)
    totals = manifest.totals
    handled, failed, staged = totals.handled.total(), totals.failed.total(), totals.staged.total()
    skipped = f"skipped {totals.skipped.total()}, " if totals.skipped else ""
    context.log.info(f"handled {handled}, {skipped}failed {failed}, to batch {staged}")
    if totals.released:
        context.log.warning(f"Stopping: released {totals.released} unstarted messages to the source")


def _handle_batches(flow: Flow, receive: Receive, context: dg.AssetExecutionContext) -> None:
    """Calls `handle_batch` for batches of messages, all batchers in parallel."""
    for batcher, manifest in steps.batch_messages(flow, receive).items():
        log_output(context, manifest)
        totals = manifest.totals
        handled, failed = totals.handled.total(), totals.failed.total()
        context.log.info(f"{batcher}: batches {totals.batches}, handled {handled}, failed {failed}")


def _handle_failed(flow: Flow, receive: Receive, context: dg.AssetExecutionContext) -> None:
    """Reports the failures of all stages: recorded as failed messages, or returned to the source."""
    log_output(context, flow.ledger.manifest(receive, batching.PARENTS_STEP))
    totals = flow.ledger.manifest(receive).totals
    if figures := reporting.of_failures(totals):
        context.add_output_metadata(figures)
        message_id = totals.sample[0].message_id if totals.sample else "<message id>"
        some_id = shlex.quote(printable(message_id))
        context.log.info(
            f"failures: `pipeline-platform failures list {flow.pipeline.name}`; the whole life of one: "
            f"`pipeline-platform trace {flow.pipeline.name} {some_id}`"
        )
    if totals.rescued:
        context.log.info(f"handle_failed rescued {totals.rescued} messages")
    if totals.not_rescued:
        context.log.warning(
            f"handle_failed returned {totals.not_rescued} failed messages as ok; they stay failed. Rescuing needs "
            "Processors(rescue=True), or Batcher(rescue=True) of their batcher; crashes and timeouts are never rescued"
        )


def _commit(flow: Flow, receive: Receive, context: dg.AssetExecutionContext) -> None:
    """Decides the outcomes of all messages, then publishes the rows to the tables."""
    with alive(flow, receive):
        decision = steps.decide(flow, receive)
        rows = steps.publish(flow, receive)
    if decision.dropped:
        context.log.info(
            f"Decided at try {decision.tries}, without {decision.dropped} messages that other runs decided meanwhile"
        )
    context.add_output_metadata({f"rows in {table}": count for table, count in rows.items()})


def _assets(tables: Iterable[str]) -> dict[str, Any]:
    """Return the outputs of the last op, which are the assets of the tables; empty for another op."""
    out = {name: dg.Out(dg.Nothing, io_manager_key=IO_MANAGER, is_required=False) for name in tables}
    return {"out": out} if out else {}


def _acknowledge_op(pipeline: type[Pipeline], tables: Iterable[str]) -> dg.OpDefinition:
    @_op(pipeline, "acknowledge", ins={"committed": dg.In(dg.Nothing)}, **_assets(tables))
    def acknowledge(context: dg.AssetExecutionContext) -> Iterator[Any]:
        """Acknowledges the messages in groups, then reports the figures of the windows."""
        with _failing_with_reason(context):
            flow, receive = receive_of(pipeline, context)
            config = config_of(pipeline, context)
            first = receive or interrupted_retry(flow, context, config)
            with _staying_active(flow, first, context, config):
                with nullcontext() if receive is None else heeding(flow, receive):
                    if receive is not None:
                        steps.advance(flow, receive, Phase.PUBLISHED)
                    red = reporting.acknowledge_and_report(context, flow, receive, context.resources.acknowledger)
                if receive is not None:
                    acknowledged(receive)
                if first is not None:
                    red = further_retries(context, flow, first, red, ignore_pause=config.ignore_pause)
            if red:
                tag = {RunTags.of(pipeline).published: context.run.run_id}
                context.instance.add_run_tags(context.run.run_id, tag)
                raise dg.Failure(red, allow_retries=False)
        yield from ()  # no output: it would give all windows of the run one data version, and a new one each time

    return acknowledge


def _staying_active(
    flow: Flow, first: Receive | None, context: dg.AssetExecutionContext, config: ReceiveConfig
) -> AbstractContextManager[None]:
    """Keep a run that continues active when its first receive ends, or a sensor would request another run."""
    if config.rounds:
        return standing_by(flow, context.run.run_id, CLAIM_S if has_one_process(context) else BETWEEN_STEPS_S)
    if first is not None and intake_of(flow, first).left(first):
        return standing_by(flow, context.run.run_id)
    return nullcontext()


def _further_rounds_op(pipeline: type[Pipeline], tables: Iterable[str]) -> dg.OpDefinition:
    @_op(pipeline, "further_rounds", ins={"acknowledged": dg.In(dg.Nothing)}, **_assets(tables))
    def further_rounds(context: dg.AssetExecutionContext) -> Iterator[Any]:
        """Receives, handles and acknowledges again until no message has arrived for `idle_timeout`."""
        config, tags = config_of(pipeline, context), RunTags.of(pipeline)
        if config.rounds:
            with _failing_with_reason(context):
                flow = flow_of(producer_of(pipeline, context, config), context)
                if red := Rounds(context, flow, config.overrides()).perform():
                    context.instance.add_run_tags(context.run.run_id, {tags.published: context.run.run_id})
                    raise dg.Failure(red, allow_retries=False)
        yield from ()

    return further_rounds


@dg.success_hook(name="end_as_asked")
def end_as_asked(context: dg.HookContext) -> None:
    """End a run that was terminated, after `acknowledge` succeeded: earlier, the step would fail."""
    end_if_asked(context.log.info)
