"""The receive of a Dagster run: its own, or a receive that a run before it decided and could not finish."""

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

import dagster as dg
from pydantic import ValidationError

from pipeline_platform.imports import import_apart
from pipeline_platform.lake.decisions.decision import FencedError
from pipeline_platform.lake.decisions.ledger import Origin, Receive
from pipeline_platform.lake.failures.failure_events import Selection
from pipeline_platform.launcher.run_process import end_claims
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline, PipelineError
from pipeline_platform.model.strict_options import shown
from pipeline_platform.orchestration.jobs import RunTags, producer_tag
from pipeline_platform.orchestration.reports.reporting import report_finished
from pipeline_platform.orchestration.resources.sink_resources import sink_keys
from pipeline_platform.orchestration.resources.source_resources import source_of
from pipeline_platform.orchestration.runs.receive_config import (
    ReceiveConfig,
    RunOrigin,
    receive_config_of,
    without_variables,
)
from pipeline_platform.run import steps
from pipeline_platform.run.begin import begin
from pipeline_platform.run.finish import finish_now, finish_others
from pipeline_platform.run.flow import Flow, no_source
from pipeline_platform.run.intake import RetryFailures
from pipeline_platform.run.receive_state import ReceiveState
from pipeline_platform.run.stopping import heeding
from pipeline_platform.run.work.spark_work import FEW
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.connection import ConnectedSource
from pipeline_platform.source.contract import SourceError
from pipeline_platform.spark.late_tasks import naming_late_tasks

_FLOWS: dict[str, Flow] = {}
"""Flows of the run that this process works on, by producer. Steps in one process share caches of manifests and tables.
Dagster passes no Python object between steps but its resources, and these are the deployment's own."""


def flow_of(producer: BoundProducer, context: dg.AssetExecutionContext) -> Flow:
    """Return the flow of a producer with the resources of a run, the same for all steps in one process."""
    pipeline, resources, flow = producer.pipeline, context.resources, _FLOWS.get(producer.key)
    if has_one_process(context):
        resources.control.run_id = context.run.run_id
    if flow is None or flow.pipeline is not pipeline or flow.control is not resources.control:
        import_apart("pandas")  # PyArrow imports it with the first value that it makes
        flow = _FLOWS[producer.key] = Flow(
            producer,
            source=no_source(pipeline, resources.lake)
            if producer.is_whole_pipeline
            else getattr(resources, producer.source),
            lake=resources.lake,
            control=resources.control,
            session=lambda: resources.spark.spark_session,
            dead_letters=getattr(resources, pipeline.dead_letters) if pipeline.dead_letters else None,
            variables=resources.spark.variables,
            sinks={batcher: getattr(resources, key) for batcher, key in sink_keys(pipeline).items()},
            worker=resources.spark.local_worker,
        )
    return flow


def receive_of(
    pipeline: type[Pipeline], context: dg.AssetExecutionContext, config: ReceiveConfig | None = None
) -> tuple[Flow, Receive | None]:
    """Return the receive of a run, whose messages are leased. The first step that needs it starts it.

    A re-execution is a run of its own. If the run before it decided a receive, the re-execution finishes that receive.
    An undecided receive is fenced and released, and the re-execution starts a new receive.

    Args:
        pipeline: The class.
        context: Of a step.
        config: Of `receive_messages`, in that step. Other steps read it from the config of the run.

    Returns:
        The flow of the receive's producer, and the receive; None if there is nothing to do.

    Raises:
        FencedError: The receive of this run was fenced.
    """
    if config is not None:
        _start_worker(pipeline, context, config)
    flow, tags = flow_of(BoundProducer(pipeline), context), RunTags.of(pipeline)
    lineage = [dict(run.tags) for run in _lineage(context)]
    own, earlier = _receive_ids([each.get(tags.receive_id) for each in lineage])
    if own:
        state = ReceiveState(flow, own)
        if (receive := state.receive) is None:
            if lineage[0].get(tags.demand) != "0" and not state.is_decided:
                raise FencedError.of(own)
            return flow, None
        flow = flow_of(BoundProducer(pipeline, receive.producer), context)
        if flow.ledger.manifest(receive, "receive").reports:
            return flow, receive
        earlier = own  # the step that leased did not finish
    if earlier:
        state = ReceiveState(flow, earlier)
        if (receive := state.receive) is not None:
            flow = flow_of(BoundProducer(pipeline, receive.producer), context)
            if state.is_decided:
                return flow, receive
            finish_now(flow, receive, context.log.info, partial(report_finished, context, flow))
            context.log.info(f"Released the undecided receive {receive.receive_id} of run {receive.run_id}.")
        elif state.is_decided and config is None:
            context.log.info(f"Receive {earlier} is finished already.")
            return flow, None
    return _received(pipeline, context, config or config_of(pipeline, context), ChainMap(*lineage))


def interrupted_retry(flow: Flow, context: dg.AssetExecutionContext, config: ReceiveConfig) -> Receive | None:
    """Return the finished first receive of a retry that a step or a run repeats, as its further receives need it.

    Its demand is the number of failures that were retried, and `asked` includes the open failures from before the start
    of the run. Receives that the run left are finished first.

    Returns:
        The receive; None if the run does not retry failures, or retried none.
    """
    tags, lineage = RunTags.of(flow.pipeline), _lineage(context)
    inherited = ChainMap(*(dict(run.tags) for run in lineage))
    receive_id = inherited.get(tags.receive_id)
    if not receive_id or inherited.get(tags.origin) != "failed" or not ReceiveState(flow, receive_id).is_decided:
        return None
    end_claims(context.instance, flow.control, flow.pipeline.name)
    finish_others(flow, context.log.info, partial(report_finished, context, flow))
    run_id = next(run.run_id for run in reversed(lineage) if run.tags.get(tags.receive_id) == receive_id)
    record = context.instance.get_run_record_by_id(run_id)
    assert record is not None
    assert record.start_time is not None
    done, selection = int(inherited.get(tags.received, 0)), _selection(flow.pipeline, config.failures)
    receive = Receive(
        receive_id=receive_id,
        pipeline=flow.pipeline.name,
        origin="failed",
        run_id=context.run.run_id,
        windows=tuple(context.partition_keys),
        context=config.overrides(),
        started_at=datetime.fromtimestamp(record.start_time, UTC),
        selection=selection,
        demand=done,
    )
    earlier = selection.model_copy(update={"failed_before": receive.started_at})
    wanted = None if config.demand is None else max(0, config.demand - done)
    left = RetryFailures(flow, receive.windows, receive.base, earlier).asked(wanted)
    return receive.model_copy(update={"asked": done + left})


def producer_of(pipeline: type[Pipeline], context: dg.AssetExecutionContext, config: ReceiveConfig) -> BoundProducer:
    """Return the producer of a run: of its config, or of the tags that its first step has set."""
    inherited = ChainMap(*(dict(run.tags) for run in _lineage(context)))
    return BoundProducer(pipeline, config.producer or inherited.get(RunTags.of(pipeline).producer, ""))


def _start_worker(pipeline: type[Pipeline], context: dg.AssetExecutionContext, config: ReceiveConfig) -> None:
    """Start the local worker if a run needs no Spark: the worker loads its modules while the run loads its own."""
    worker = context.resources.spark.local_worker
    if worker is not None and config.demand and config.demand <= FEW and not pipeline.uses_columns():
        worker.start()


def _lineage(context: dg.AssetExecutionContext) -> list[dg.DagsterRun]:
    """Return the run with its present tags, the run that it re-executes, and so on."""
    lineage = []
    run_id: str | None = context.run.run_id
    while run_id and (run := context.instance.get_run_by_id(run_id)):
        lineage.append(run)
        run_id = run.parent_run_id
    return lineage or [context.run]


def _receive_ids(receive_ids: Sequence[str | None]) -> tuple[str | None, str | None]:
    """Return the id of the run's own receive, and of the last one before it, by the tags of its lineage."""
    own, *before = receive_ids
    copied = bool(before) and own == before[0]  # a re-execution starts with a copy of the tags
    return None if copied else own, next(filter(None, before), None)


def _received(
    pipeline: type[Pipeline], context: dg.AssetExecutionContext, config: ReceiveConfig, inherited: Mapping[str, str]
) -> tuple[Flow, Receive]:
    """Begin a receive of this run and lease its messages. `inherited` are the tags of the run's lineage."""
    tags = RunTags.of(pipeline)
    only_failed = context.selected_asset_keys == {dg.AssetKey([pipeline.name, "failed"])}
    default = inherited.get(tags.origin, "failed" if only_failed else "source")
    origin: Origin = (config.origin or RunOrigin(default)).value
    producer = BoundProducer(pipeline, config.producer or inherited.get(tags.producer, ""))
    if origin == "source" and producer.is_whole_pipeline:
        producer = with_most_waiting(pipeline, context.resources, context.log.info)
    flow = flow_of(producer, context)
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
        ignore_pause=config.ignore_pause,
        log=context.log.info,
        report=partial(report_finished, context, flow),
    )
    begun = {tags.origin: origin, tags.demand: str(receive.demand), tags.receive_id: receive.receive_id}
    begun |= producer_tag(producer) | ({tags.rounds: "0"} if config.rounds else {})
    context.instance.add_run_tags(context.run.run_id, begun)
    with working_step(flow, receive, context):
        manifest = steps.receive_messages(flow, receive)
        context.instance.add_run_tags(context.run.run_id, {tags.received: str(manifest.totals.received)})
    return flow, receive


def with_most_waiting(pipeline: type[Pipeline], resources: Any, log: Callable[[str], None]) -> BoundProducer:
    """Return the producer with the most waiting messages; of equal producers, the first.

    A source that does not report its backlog ranks below sources with waiting messages.

    Raises:
        SourceError: No source answers.
    """
    found: dict[BoundProducer, Backlog] = {}
    unanswered: dict[BoundProducer, SourceError] = {}
    for producer in BoundProducer.all_of(pipeline):
        try:
            found[producer] = source_of(resources, producer.source).backlog()
        except SourceError as error:
            unanswered[producer] = error
    if not found:
        raise next(iter(unanswered.values()))
    chosen = max(found, key=lambda producer: 0.5 if (waiting := found[producer].messages) is None else waiting)
    answers = {**found, **dict.fromkeys(unanswered, "no answer")}
    seen = [f"{producer.name}: {answer}" for producer, answer in answers.items()]
    log(
        f"Chose producer {chosen.name!r}, which has the largest backlog ({'; '.join(seen)}). "
        "To pull from another producer, set `producer` in the config of receive_messages."
    )
    return chosen


@contextmanager
def working_step(flow: Flow, receive: Receive, context: dg.AssetExecutionContext) -> Iterator[None]:
    """Heed signals to stop, and name slow tasks, while a step works on a receive."""
    with heeding(flow, receive), naming_late_tasks(context.resources.spark.ui, receive.receive_id, context.log.info):
        yield


def config_of(pipeline: type[Pipeline], context: dg.AssetExecutionContext) -> ReceiveConfig:
    """Return the config of `receive_messages`, which a re-execution of later steps has from the run before it.

    Raises:
        PipelineError: It contains variables (`{env: NAME}`), which Dagster would resolve in the first step only.
    """
    path = ("ops", pipeline.name, "ops", "receive_messages", "config")
    return without_variables(receive_config_of(pipeline), context.run.run_config, path)


def _selection(pipeline: type[Pipeline], given: dict[str, Any]) -> Selection:
    try:
        return Selection.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise PipelineError(
            f"{pipeline.name}: `failures` of the run config: {'.'.join(map(str, first['loc']))} is "
            f"{shown(first['input'])}: {first['msg']}. Valid fields: {', '.join(Selection.model_fields)}"
        ) from None


def _expect_one_process(flow: Flow, context: dg.AssetExecutionContext) -> None:
    """Refuse executors that give each step a process, if the steps share the connection of the source."""
    if isinstance(flow.source, ConnectedSource) and not has_one_process(context):
        executor = context.job_def.executor_def.name
        raise SourceError(
            f"source {flow.source.name!r}: executor {executor!r} gives each step of a run a process of its own, but "
            "the connection that receives messages has to acknowledge them. Run the pipeline's own job, or give yours "
            "dg.in_process_executor"
        )


def has_one_process(context: dg.AssetExecutionContext) -> bool:
    """Whether all steps of the run share this process."""
    execution: Any = context.run.run_config.get("execution") or {}
    in_one = {dg.in_process_executor.name, "execute_in_process_executor"}
    return context.job_def.executor_def.name in in_one or "in_process" in (execution.get("config") or {})
