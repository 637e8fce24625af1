"""The begin of a receive: earlier receives are finished, then capacity is claimed."""

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pipeline_platform.lake.failure_events import ALL, Selection
from pipeline_platform.lake.ledger import Origin, Receive
from pipeline_platform.model.pipeline import PipelineError
from pipeline_platform.run import lease
from pipeline_platform.run.finish import finish_others
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import INTAKES, Intake
from pipeline_platform.run.run_events import emitting_begin
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
    although_paused: bool = False,
    log: Callable[[str], None] = _LOG.info,
) -> Receive:
    """Begin a receive. Everything that could refuse it later is asked now.

    Where the pipeline or its producer is paused, the receive is of no messages.

    Args:
        flow: The pipeline and its resources.
        origin: Where messages come from.
        run_id: Of the Dagster run.
        windows: Partition keys the run is about, in order.
        demand: Messages wanted; None for as many as the pipeline allows a run.
        context: What the run changes in the pipeline's context.
        selection: Of the open failures, those that a backfill drives.
        although_paused: Whether to take on messages all the same. Not while runs under way are drained.
        log: Hears what was cleared up, and why the demand is less than wanted.

    Raises:
        PipelineError: The context does not fit; the windows are others than those of the data; it pulls from no
            producer, or retries what all of them received from one; it selects failures and retries none; there is no
            room for a backfill, or for all of a replay; the pipeline is drained; or the lake lacks the tables of
            earlier runs.
        SchemaChangeError: A model no longer fits its table.
        SourceError: The source cannot be reached, or is not there.
    """
    _check_producer(flow, INTAKES[origin])
    if not INTAKES[origin].selects and selection != ALL:
        raise PipelineError(
            f"{flow.pipeline.name}: a {INTAKES[origin].name} retries no failures: leave `failures` out of its config"
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
        producer=flow.producer,
        traceparent=traceparent(),
    )
    _check_lake(flow)
    flow.tables.ensure()
    if _is_held_back(flow, log, although_paused=although_paused):
        return receive
    if INTAKES[origin].is_outside:
        patiently(flow.source.check_ready, flow.source.patience)
    finish_others(flow, log)
    selection = selection.at(datetime.now(UTC))
    receive_id = receive.receive_id
    try:
        while True:
            # After the clear-up: what that decides is a message like any other to a backfill or a replay.
            intake = INTAKES[origin](flow, tuple(windows), flow.tables["outcomes"].version(), selection)
            base, asked = intake.base(), intake.asked(demand)
            # Before the claim, which nobody renews yet: over many windows it takes longer than a lease.
            replaces = intake.replaces()
            wanted = intake.wanted(asked, log)
            # Nobody asks again at once for a run that waits for its turn.
            within_s = Intake.room_within_s if intake.is_alone else intake.room_within_s
            bounds: dict[str, Any] = {"lease_s": lease.CLAIM_S, "within_s": within_s, "alone": intake.is_alone}
            granted = flow.quota.claim(receive_id, run_id, wanted, log, **bounds)
            # Once more: who pauses either sees this claim as one under way, or is seen here.
            if granted and _is_held_back(flow, log, although_paused=although_paused):
                flow.control.end(receive_id)
                return receive
            # A run that it waited for may have died, and its tasks would handle on.
            found = finish_others(flow, log) if granted and intake.is_alone else []
            if not (found and intake.is_whole):
                break
            flow.control.end(receive_id)  # there are more messages to replay now
        if not intake.is_enough(granted, wanted):
            raise PipelineError(
                f"{flow.pipeline.name}: room for {granted} of the {wanted} messages of this {intake.name}, for other "
                f"runs hold the rest of {flow.quota.capacity}: start it again when they are done, or pause the "
                "pipeline meanwhile and start it with `although_paused` in its run config"
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
    """Refuse a lake without the pipeline's tables if its runs had some: it is not mounted, or not restored.

    Raises:
        PipelineError: Messages that were decided would be handled again, and open failures are missing.
    """
    name = flow.pipeline.name
    if flow.tables["outcomes"].exists() or not (finished := flow.control.ended(name, last=1)):
        return
    raise PipelineError(
        f"{name}: the lake {flow.lake.root} has no table {name}/outcomes, but the control store {flow.control} "
        f"remembers receive {finished[0].receive_id}, acknowledged at {finished[0].ended_at:%Y-%m-%d %H:%M:%S} UTC. "
        "Mount or restore that lake, or correct its root. To start with an empty lake, give it a new control store"
    )


def _is_held_back(flow: Flow, log: Callable[[str], None], *, although_paused: bool) -> bool:
    """Whether the run is to take on nothing.

    Raises:
        PipelineError: It is forced to, and would be stopped at once: the pipeline is drained.
    """
    key = flow.quota.key
    reason = flow.control.paused(key)
    if reason is None:
        return False
    if not although_paused:
        log(f"takes on nothing: {key} is paused: {reason}. Resume it, or start a run with `although_paused`")
    elif flow.control.draining(key) is not None:
        raise PipelineError(
            f"{key}: although_paused is set, but runs under way are drained ({reason}): wait for the end of "
            "`pipeline-platform drain`, or give `pipeline-platform pause` in its place"
        )
    return not although_paused


def _check_producer(flow: Flow, intake: type[Intake]) -> None:
    if intake.is_outside and not flow.has_source:
        raise PipelineError(
            f"{flow.pipeline.name}: a {intake.name} is from one producer, and there is {', '.join(flow.producers)}: "
            "name it in the run config, `producer`"
        )
    if flow.producer and not intake.is_outside:
        raise PipelineError(
            f"{flow.pipeline.name}: a {intake.name} is of all producers: leave `producer` ({flow.producer}) out of the "
            "run config"
        )
