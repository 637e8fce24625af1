"""A pipeline as one graph of ops, whose outputs are its partitioned assets."""

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import dagster as dg
from pydantic import ValidationError

from pipeline_platform.imports import import_apart
from pipeline_platform.lake.failure_events import Selection
from pipeline_platform.lake.ledger import Origin, Receive
from pipeline_platform.launcher.run_process import end_claims
from pipeline_platform.model.options import Batcher, Splitter
from pipeline_platform.model.pipeline import Pipeline, PipelineError
from pipeline_platform.model.safe_text import printable
from pipeline_platform.model.strict_options import shown
from pipeline_platform.orchestration import reporting
from pipeline_platform.orchestration.asset_metadata import metadata_of
from pipeline_platform.orchestration.asset_windows import windows_of
from pipeline_platform.orchestration.failing import failing_with_reason
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.orchestration.producer_choice import with_most_waiting
from pipeline_platform.orchestration.receive_config import RunOrigin, receive_config_of
from pipeline_platform.orchestration.reporting import log_output
from pipeline_platform.orchestration.resources.lake_resources import IO_MANAGER
from pipeline_platform.run import batching, steps
from pipeline_platform.run.begin import begin, resume
from pipeline_platform.run.flow import Flow, no_source
from pipeline_platform.run.lease import alive, keep_until_next_step
from pipeline_platform.run.outages import naming_outages
from pipeline_platform.run.receive_state import ReceiveState
from pipeline_platform.run.stopping import acknowledged, end_if_asked, heeding
from pipeline_platform.source.connection import ConnectedSource
from pipeline_platform.source.contract import SourceError
from pipeline_platform.spark.late_tasks import naming_late_tasks


def asset_keys(pipeline: type[Pipeline]) -> dict[str, dg.AssetKey]:
    """The keys of a pipeline's assets by table: its messages, its batchers' and its failures."""
    return {table: dg.AssetKey([pipeline.name, table]) for table in ("messages", *pipeline.batchers, "failed")}


def pipeline_assets(pipeline: type[Pipeline]) -> dg.AssetsDefinition:
    """Build `<pipeline>/messages`, `<pipeline>/<batcher>` for each batcher and `<pipeline>/failed`.

    They are partitioned by window. Whichever is materialised, all steps run: `failed` alone retries the open failures
    of the windows, others pull.
    """
    keys = asset_keys(pipeline)
    receive, acknowledge = _receive_op(pipeline), _acknowledge_op(pipeline, keys)
    handle, commit = _step_op(pipeline, "handle_messages", _handle), _step_op(pipeline, "commit", _commit)
    has_batches = any(isinstance(options, Batcher) for options in pipeline.batchers.values())
    batches = [_step_op(pipeline, "handle_batches", _handle_batches)] if has_batches else []
    handle_failed = _step_op(pipeline, "handle_failed", _handle_failed)

    @dg.graph(name=pipeline.name, description=pipeline.description(), out={out: dg.GraphOut() for out in keys})
    def ops() -> dict[str, Any]:
        received = _named(receive)()
        handled = _named(handle)(received)
        routed = _named(handle_failed)([handled, *(_named(batch)(handled) for batch in batches)])
        acknowledged = _named(acknowledge).with_hooks({end_as_asked})(_named(commit)(routed))
        return {out: getattr(acknowledged, out) for out in keys}

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
    sources = ", ".join(f"`{producer.source}`" for producer in pipeline.producers_of().values())
    pulls = f"Materialising it pulls from {sources}."
    descriptions = {
        "messages": f"Every delivery from {sources}, as received. {pulls}\n\n{pipeline.description()}",
        "failed": "Messages that could not be handled, with reason and original payload. Materialise windows of it "
        "alone, with no configuration, to retry those that are open.",
    }
    for name, options in pipeline.batchers.items():
        rows = "" if options.table_schema is None else f" Columns: `{options.table_schema.__name__}`."
        how = (
            f"What `handle_batch` made of batches of up to {_size(options)}, {options.concurrency} at a time."
            if isinstance(options, Batcher)
            else "The rows that `handle_message` sent here."
        )
        descriptions[name] = f"{how}{rows} Each message once. {pulls}"
    return descriptions


def _size(options: Batcher) -> str:
    by_step = isinstance(options.batch_size, Splitter)
    return f"{options.batch_bytes:,} bytes, cut by a splitter" if by_step else f"{options.batch_size} messages"


_FLOWS: dict[str, Flow] = {}
"""Of the run that this process works on, by producer: the steps of a run share what they know of their receive."""


def flow_of(pipeline: type[Pipeline], context: dg.AssetExecutionContext, producer: str = "") -> Flow:
    """The producer with the resources of a run, the same for all steps in one process."""
    chosen, key = pipeline.producers_of(producer).get(producer), pipeline.limits_key(producer)
    resources, flow = context.resources, _FLOWS.get(key)
    if _has_one_process(context):
        resources.control.run_id = context.run.run_id
    if flow is None or flow.pipeline is not pipeline or flow.control is not resources.control:
        import_apart("pandas")  # PyArrow imports it with the first value that it makes
        flow = _FLOWS[key] = Flow(
            pipeline=pipeline,
            source=getattr(resources, chosen.source) if chosen else no_source(pipeline, resources.lake),
            lake=resources.lake,
            control=resources.control,
            session=lambda: resources.spark.spark_session,
            producer=producer,
            dead_letters=getattr(resources, pipeline.dead_letters) if pipeline.dead_letters else None,
            variables=resources.spark.variables,
        )
    return flow


def at_work(pipeline: type[Pipeline], context: dg.AssetExecutionContext) -> tuple[Flow, Receive | None]:
    """What this run received, or the run that it re-executes, as this run's from now on; with the flow of its producer.

    Returns:
        No receive if there was no room for messages, or another run finished it.

    Raises:
        PipelineError: No run received anything.
        FencedError: The receive was given up, or another run works on it by now.
    """
    flow, tags, lineage = flow_of(pipeline, context), RunTags.of(pipeline), list(_lineage(context))
    received = next((run for run in lineage if run.tags.get(tags.receive_id)), None)
    if received is None:
        raise PipelineError(
            f"{pipeline.name}: run {context.run.run_id} received nothing, nor did a run that it re-executes: "
            "execute `receive_messages` and all steps after it"
        )
    receive_id = received.tags[tags.receive_id]
    state = ReceiveState(flow, receive_id)
    receive = state.record
    if receive is None:
        if received.tags.get(tags.demand) != "0":
            state.expect_finished([run.run_id for run in lineage])
            context.log.warning(f"receive {receive_id} is finished: nothing is left to do here")
        return flow, None
    flow = flow_of(pipeline, context, receive.producer)
    if receive.run_id == context.run.run_id:
        return flow, receive
    end_claims(context.instance, flow.control, pipeline.name)
    return flow, resume(flow, receive, context.run.run_id)


def _lineage(context: dg.AssetExecutionContext) -> Iterator[dg.DagsterRun]:
    """The run, the one that it re-executes, and so on, with the tags that they have now: a run starts without them."""
    run_id: str | None = context.run.run_id
    while run_id and (run := context.instance.get_run_by_id(run_id)):
        yield run
        run_id = run.parent_run_id


def _op(pipeline: type[Pipeline], name: str, **options: Any) -> Callable[..., dg.OpDefinition]:
    """The decorator of an op that hands nothing over: what ops share lies in the lake under their receive."""
    sources = {producer.source for producer in pipeline.producers_of().values()}
    letters = {pipeline.dead_letters} if pipeline.dead_letters else set()
    keys = {*sources, *letters, "lake", "control", "spark", "acknowledger"}
    options = {"out": dg.Out(dg.Nothing, io_manager_key=IO_MANAGER), **options}
    return dg.op(name=f"{pipeline.name}__{name}", required_resource_keys=keys, **options)


@contextmanager
def _failing_with_reason(context: dg.AssetExecutionContext) -> Iterator[None]:
    with failing_with_reason(), naming_outages(context.resources.lake, context.resources.spark.remote):
        yield


@contextmanager
def _step_of(flow: Flow, receive: Receive, context: dg.AssetExecutionContext) -> Iterator[None]:
    """One step of a receive. Another step follows."""
    with heeding(flow, receive), naming_late_tasks(context.resources.spark.ui, receive.receive_id, context.log.info):
        yield
    if not _has_one_process(context):
        keep_until_next_step(flow, receive)


def _named(op: dg.OpDefinition) -> Any:
    """The op by its name in the pipeline's graph; in a code location, each op's own name is unique."""
    return op.alias(op.name.split("__", 1)[1])


def _receive_op(pipeline: type[Pipeline]) -> dg.OpDefinition:
    configured: Any = receive_config_of(pipeline)

    @_op(pipeline, "receive_messages")
    def receive_messages(context: dg.AssetExecutionContext, config: configured) -> None:
        """Leases messages and writes them down, once; everything later reads what is written here."""
        tags = RunTags.of(pipeline)
        by_hand = "failed" if context.selected_asset_keys == {asset_keys(pipeline)["failed"]} else "source"
        origin: Origin = (config.origin or RunOrigin(context.run.tags.get(tags.origin, by_hand))).value
        producer = config.producer or context.run.tags.get(tags.producer, "")
        with _failing_with_reason(context):
            if origin == "source" and pipeline.producers and not producer:
                producer = with_most_waiting(pipeline, context.resources, context.log.info)
            flow = flow_of(pipeline, context, producer)
            if origin == "source":
                _expect_one_process(flow, context)
            end_claims(context.instance, flow.control, pipeline.name)
            receive = begin(
                flow,
                origin=origin,
                run_id=context.run.run_id,
                windows=context.partition_keys,
                demand=config.demand,
                context=config.overrides(),
                selection=_selection(pipeline, config.failures),
                although_paused=config.ignores_pause(context.log.warning),
                log=context.log.info,
            )
            received = {tags.origin: origin, tags.demand: str(receive.demand), tags.receive_id: receive.receive_id}
            if producer:
                received[tags.producer] = producer
            context.instance.add_run_tags(context.run.run_id, received)
            with _step_of(flow, receive, context):
                manifest = steps.receive_messages(flow, receive)
                context.instance.add_run_tags(context.run.run_id, {tags.received: str(manifest.total("received"))})

    return receive_messages


def _selection(pipeline: type[Pipeline], given: dict[str, Any]) -> Selection:
    """The failures that a run's configuration chooses; a `PipelineError` if it is no such choice."""
    try:
        return Selection.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise PipelineError(
            f"{pipeline.name}: `failures` of the run config: {'.'.join(map(str, first['loc']))} is "
            f"{shown(first['input'])}: {first['msg']}; there is {', '.join(Selection.model_fields)}"
        ) from None


def _expect_one_process(flow: Flow, context: dg.AssetExecutionContext) -> None:
    """Refuse executors that give each step a process, where the steps share the source's connection."""
    if isinstance(flow.source, ConnectedSource) and not _has_one_process(context):
        executor = context.job_def.executor_def.name
        raise SourceError(
            f"source {flow.source.name!r}: executor {executor!r} gives each step of a run a process of its own, but "
            "the connection that receives messages has to acknowledge them. Run the pipeline's own job, or give yours "
            "dg.in_process_executor"
        )


def _has_one_process(context: dg.AssetExecutionContext) -> bool:
    """Whether all steps of the run share this process."""
    execution: Any = context.run.run_config.get("execution") or {}
    in_one = {dg.in_process_executor.name, "execute_in_process_executor"}
    return context.job_def.executor_def.name in in_one or "in_process" in (execution.get("config") or {})


Step = Callable[[Flow, Receive, dg.AssetExecutionContext], None]
"""What an op does with what its run received; not called if that was nothing."""


def _step_op(pipeline: type[Pipeline], name: str, step: Step) -> dg.OpDefinition:
    @_op(pipeline, name, description=step.__doc__, ins={"after": dg.In(dg.Nothing)})
    def op(context: dg.AssetExecutionContext) -> None:
        with _failing_with_reason(context):
            flow, receive = at_work(pipeline, context)
            if receive is not None:
                with _step_of(flow, receive, context):
                    step(flow, receive, context)

    return op


def _handle(flow: Flow, receive: Receive, context: dg.AssetExecutionContext) -> None:
    """Gives each message to `handle_message`, in Spark tasks; a failure is its message's alone."""
    manifest = steps.handle_messages(flow, receive)
    log_output(context, manifest)
    staged = sum(manifest.total(f"staged:{name}") for name in flow.pipeline.batchers)
    handled, failed = manifest.total("handled"), manifest.total("failed")
    context.log.info(f"handled {handled}, failed {failed}, to batch {staged}")
    if given_back := manifest.total("given_back"):
        context.log.warning(f"was asked to stop: {given_back} messages were not begun, and are given back")


def _handle_batches(flow: Flow, receive: Receive, context: dg.AssetExecutionContext) -> None:
    """Gives batches of messages to `handle_batch`, all batchers side by side."""
    for batcher, manifest in steps.batch_messages(flow, receive).items():
        log_output(context, manifest)
        batches, handled, failed = map(manifest.total, ("batches", "handled", "failed"))
        context.log.info(f"{batcher}: batches {batches}, handled {handled}, failed {failed}")


def _handle_failed(flow: Flow, receive: Receive, context: dg.AssetExecutionContext) -> None:
    """Brings the failures of all stages together: kept as failed messages, or given back to the source."""
    log_output(context, flow.ledger.manifest(receive, batching.PARENTS))
    manifest = flow.ledger.manifest(receive)
    if figures := reporting.of_failures(manifest):
        context.add_output_metadata(figures)
        sample = (row["message_id"] for notes in manifest.notes for row in notes.get("sample", ()))
        some_id = shlex.quote(printable(next(sample, "<message id>")))
        context.log.info(
            f"failures: `pipeline-platform failures list {flow.pipeline.name}`; the whole life of one: "
            f"`pipeline-platform trace {flow.pipeline.name} {some_id}`"
        )
    if rescued := manifest.total("rescued"):
        context.log.info(f"handle_failed rescued {rescued} messages")
    if kept := manifest.total("not_rescued"):
        context.log.warning(
            f"handle_failed gave back {kept} failed messages as ok, and they stay failed: it may rescue where "
            "Processors(rescue=True), or Batcher(rescue=True) of their batcher, says so, never what ended its worker"
        )


def _commit(flow: Flow, receive: Receive, context: dg.AssetExecutionContext) -> None:
    """Decides what became of every message, then makes it visible in every table."""
    with alive(flow, receive):
        decision = steps.decide(flow, receive)
        rows = steps.publish(flow, receive)
    if decision.dropped:
        context.log.info(
            f"other runs decided {decision.dropped} of the messages meanwhile; the rest is decided, "
            f"at try {decision.tries}"
        )
    context.add_output_metadata({f"rows in {table}": count for table, count in rows.items()})


def _acknowledge_op(pipeline: type[Pipeline], tables: Mapping[str, dg.AssetKey]) -> dg.OpDefinition:
    out = {name: dg.Out(dg.Nothing, io_manager_key=IO_MANAGER, is_required=False) for name in tables}

    @_op(pipeline, "acknowledge", ins={"committed": dg.In(dg.Nothing)}, out=out)
    def acknowledge(context: dg.AssetExecutionContext) -> Iterator[Any]:
        """Acknowledges, in groups, what is decided and published; then reports the windows' figures."""
        with _failing_with_reason(context):
            flow, receive = at_work(pipeline, context)
            with nullcontext() if receive is None else heeding(flow, receive):
                red = reporting.acknowledge(context, flow, receive, context.resources.acknowledger)
        if red:
            context.instance.add_run_tags(context.run.run_id, {RunTags.of(pipeline).published: context.run.run_id})
            raise dg.Failure(red, allow_retries=False)
        if receive is not None:
            acknowledged(receive)
        yield from ()  # no output: it would give all windows of the run one data version, and a new one each time

    return acknowledge


@dg.success_hook(name="end_as_asked")
def end_as_asked(context: dg.HookContext) -> None:
    """End a run that was asked to end, once `acknowledge` has succeeded: inside the step it would fail the step."""
    end_if_asked(context.log.info)
