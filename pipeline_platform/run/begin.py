"""The begin of a receive: earlier receives are finished, then capacity is claimed."""

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from pipeline_platform.lake.decisions.decision import sink_columns
from pipeline_platform.lake.decisions.ledger import Origin, Receive
from pipeline_platform.lake.failures.failure_events import ALL, Selection
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import PipelineError
from pipeline_platform.run import lease
from pipeline_platform.run.finish import Report, finish_others, no_report
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import INTAKES, Intake
from pipeline_platform.run.run_events import emitting_begin
from pipeline_platform.sinks.contract import SinkAwayError
from pipeline_platform.source.patience import patiently
from pipeline_platform.telemetry.tracing import traceparent

_LOG = logging.getLogger(__name__)


@emitting_begin
def begin(
    flow: Flow,
    *,
    origin: Origin,
    run_id: str,
    windows: Sequence[str],
    demand: int | None = None,
    context: Mapping[str, Any] | None = None,
    selection: Selection = ALL,
    ignore_pause: bool = False,
    is_further: bool = False,
    log: Callable[[str], None] = _LOG.info,
    report: Report = no_report,
) -> Receive:
    """Begin a receive: check everything that could refuse it later, finish earlier receives, and claim capacity.

    If the pipeline or its producer is paused, the demand of the receive is 0.

    Args:
        flow: The pipeline and its resources.
        origin: Origin of the messages.
        run_id: Id of the Dagster run.
        windows: Partition keys of the run, in order.
        demand: Messages wanted; None for as many as the pipeline allows a run.
        context: Overridden fields of the pipeline's context.
        selection: Open failures that a retry selects.
        ignore_pause: Whether to receive messages even if the pipeline is paused. Not possible during a drain.
        is_further: Whether the run has had a receive before. What cannot change during a run is not checked again,
            and earlier receives are not finished: the caller does so from time to time.
        log: Gets the receives that were finished, and the reason if the demand is less than wanted.
        report: Gets the receives of earlier runs that are published here; see `finish_others`.

    Raises:
        PipelineError: The context, the windows, the producer or the selection is invalid; there is no capacity for a
            retry, or for all messages of a replay; the pipeline is drained; or the lake lacks the tables of earlier
            runs.
        SchemaChangeError: A model no longer fits its table.
        SinkError: A sink is unavailable, or cannot store the columns of a batcher.
        SourceError: The source is unavailable or does not exist.
    """
    _check_producer(flow, INTAKES[origin])
    if not INTAKES[origin].selects and selection != ALL:
        raise PipelineError(
            f"{flow.pipeline.name}: `failures` of the run config is for retries, not for a {INTAKES[origin].name}"
        )
    flow.pipeline.context_of(context)
    receive = Receive(
        receive_id=uuid.uuid4().hex,
        pipeline=flow.pipeline.name,
        origin=origin,
        run_id=run_id,
        windows=tuple(windows),
        context=dict(context or {}),
        started_at=datetime.now(UTC),
        producer=flow.producer.name,
        traceparent=traceparent(),
    )
    if not is_further:
        _check_lake(flow)
        flow.tables.ensure()
        for name, sink in flow.sinks.items():
            ensure = partial(sink.ensure, flow.pipeline.name, name, sink_columns(flow.tables[name]))
            patiently(ensure, sink.patience, SinkAwayError)
    if _is_held_back(flow, origin, log, ignore_pause=ignore_pause):
        return receive
    if not is_further:
        if INTAKES[origin].is_outside:
            patiently(flow.source.check_ready, flow.source.patience)
        finish_others(flow, log, report)
    selection = selection.at(datetime.now(UTC))
    receive_id = receive.receive_id
    try:
        while True:
            # After recovery: a retry or replay includes what that decides.
            intake = INTAKES[origin](flow, tuple(windows), flow.tables["outcomes"].version(), selection)
            base, asked = intake.base(), intake.asked(demand)
            # Before the claim, which is not renewed yet: over many windows this takes longer than a claim lasts.
            replaces = intake.replaces()
            wanted = intake.wanted(asked, log)
            # A run that waits for its turn is not requested again at once.
            within_s = Intake.room_within_s if intake.is_alone else intake.room_within_s
            bounds: dict[str, Any] = {"lease_s": lease.CLAIM_S, "within_s": within_s, "alone": intake.is_alone}
            granted = flow.quota.claim(receive_id, run_id, wanted, log, **bounds)
            # Again: a pause meanwhile either sees this claim, or is seen here.
            if granted and _is_held_back(flow, origin, log, ignore_pause=ignore_pause):
                flow.control.end(receive_id)
                return receive
            # A run that it waited for may have crashed, and its tasks may still run.
            found = []
            if granted and intake.is_alone:
                with lease.claimed(flow, receive):
                    found = finish_others(flow, log, report)
            if not (found and intake.is_whole):
                break
            flow.control.end(receive_id)  # there are more messages to replay now
        if not intake.is_enough(granted, wanted):
            raise PipelineError(
                f"{flow.pipeline.name}: capacity for {granted} of the {wanted} messages of this {intake.name}, because "
                f"other runs use the rest of {flow.quota.capacity}. Start it again when these have ended, or pause the "
                "pipeline and start it with `ignore_pause` in its run config"
            )
        taken = {"demand": granted, "asked": asked, "base": base, "replaces": replaces, "selection": selection}
        control, place, _ = flow.control.reader()
        taken |= {"control": control, "place": place}
        receive = receive.model_copy(update={**taken, "started_at": datetime.now(UTC)})
        if granted:
            flow.tables.begins(receive_id)
            flow.ledger.begin(receive)
    except BaseException:
        flow.control.end(receive_id)
        raise
    lease.begun(flow, receive)
    return receive


def _check_lake(flow: Flow) -> None:
    """Check that the lake contains the tables of earlier runs.

    Raises:
        PipelineError: The tables are missing, for example because the lake is not mounted or not restored.
    """
    name = flow.pipeline.name
    keys = {name, *(producer.key for producer in BoundProducer.all_of(flow.pipeline))}
    if flow.tables["outcomes"].exists() or not (finished := flow.control.ended(*keys, last=1)):
        return
    raise PipelineError(
        f"{name}: the lake {flow.lake.root} has no table {name}/outcomes, but the control store {flow.control} "
        f"remembers receive {finished[0].receive_id}, acknowledged at {finished[0].ended_at:%Y-%m-%d %H:%M:%S} UTC. "
        "Mount or restore that lake, or correct its root. To start with an empty lake, give it a new control store"
    )


def _is_held_back(flow: Flow, origin: Origin, log: Callable[[str], None], *, ignore_pause: bool) -> bool:
    """Whether a pause prevents the run from receiving messages.

    Raises:
        PipelineError: The run ignores pauses, but the pipeline is being drained.
    """
    key = flow.quota.key
    reason = flow.quota.paused if INTAKES[origin].is_outside else flow.control.paused(key)
    if reason is None:
        return False
    if not ignore_pause:
        log(f"Receives nothing: {key} is paused: {reason}. Resume it, or start a run with `ignore_pause`")
    elif flow.control.draining(key) is not None:
        raise PipelineError(
            f"{key}: ignore_pause does not apply during a drain ({reason}). Wait until `pipeline-platform drain` "
            "ends, or use `pipeline-platform pause` instead"
        )
    return not ignore_pause


def _check_producer(flow: Flow, intake: type[Intake]) -> None:
    if intake.is_outside and flow.producer.is_whole_pipeline:
        raise PipelineError(
            f"{flow.pipeline.name}: a {intake.name} needs one producer. Set `producer` in the run config to one of "
            f"{', '.join(flow.pipeline.producers)}"
        )
    if flow.producer.name and not intake.is_outside:
        raise PipelineError(
            f"{flow.pipeline.name}: a {intake.name} applies to all producers, got producer {flow.producer.name!r}. "
            "Remove `producer` from the run config"
        )
