"""The one recovery of receives: decided ones are published and acknowledged, others fenced and released."""

import logging
from collections.abc import Callable
from typing import TypeAlias

from pipeline_platform.lake.decisions.ledger import Receive
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import PipelineError
from pipeline_platform.run import steps
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import intake_of
from pipeline_platform.run.lease import fence_and_release
from pipeline_platform.run.receive_state import ReceiveState

_LOG = logging.getLogger(__name__)
Report: TypeAlias = Callable[[Receive], object]
"""Reports a published receive, for example to Dagster."""


def no_report(receive: Receive) -> None:
    """Report nothing."""


def finish(
    flow: Flow,
    receive: Receive,
    log: Callable[[str], None] = _LOG.info,
    report: Report = no_report,
) -> bool:
    """Finish a receive of a run that does not work on it any more.

    Args:
        flow: The pipeline and its resources.
        receive: The receive.
        log: Gets the reason if the receive cannot be finished yet.
        report: Gets a decided receive after it is published, unless its own run has reported it. If it raises, the
            receive stays unfinished, and the next attempt reports it.

    Returns:
        Whether the receive is finished. If not, a later run tries again.
    """
    flow.ledger.forget()  # another run may have sent some of its dead letters
    decided = ReceiveState(flow, receive.receive_id).unfinished or fence_and_release(flow, receive)
    if decided is None:
        return True
    steps.publish(flow, decided)
    _report(flow, decided, report)
    answer = steps.acknowledge(flow, decided)
    letters, not_taken = answer.letters, answer.not_taken
    if letters.error:
        log(f"Kept receive {decided.receive_id} until its {letters.unsent} dead letters are sent: {letters.error}")
    elif not_taken.messages:
        log(f"Kept receive {decided.receive_id} until the pipeline's own `acknowledge` succeeds: {not_taken.errors[0]}")
    elif answer.is_kept:
        log(f"Kept receive {decided.receive_id} until its source acknowledges it: {'; '.join(answer.errors[:1])}")
    return not answer.is_kept


def _report(flow: Flow, published: Receive, report: Report) -> None:
    # A run reports a receive after its acknowledgement, which notes that an unfinished receive is published.
    if not flow.ledger.was_published(published):
        report(published)
        flow.ledger.note_published(published)


def finish_now(
    flow: Flow,
    receive: Receive,
    log: Callable[[str], None] = _LOG.info,
    report: Report = no_report,
) -> bool:
    """Finish a receive whose run may still be alive. Its claim ends first, so that the run decides nothing more.

    Arguments are those of `finish`.

    Returns:
        As `finish`.

    Raises:
        PipelineError: Another deployment began it.
    """
    _expect_here(flow, receive)
    if flow.control.end(receive.receive_id):
        _interrupt(flow, receive.receive_id, log)
    return finish(flow, receive, log, report)


def finish_others(flow: Flow, log: Callable[[str], None] = _LOG.info, report: Report = no_report) -> list[str]:
    """Finish the receives that crashed, failed and terminated runs left; return the ids of those that are finished.

    Receives of another producer are only published: acknowledging them takes that producer's source. `log` gets a
    line for each receive that cannot be finished, which stays as it is. `report` gets published receives, see `finish`.
    """
    # Retries and replays have no producer: any run may finish them.
    expired = [claim.receive_id for claim in flow.control.over(flow.quota.key, flow.pipeline.name)]
    for claim in flow.control.over(flow.pipeline.name, of_all=True):
        _interrupt(flow, claim.receive_id, log)
    # Records before claims: a receive claims capacity before it writes its record.
    leasing, unfinished = flow.source.holders(), flow.ledger.unfinished()
    finished, kept = list[str](), set[str]()
    for receive_id in unfinished:
        try:
            if (is_finished := _finish_other(flow, receive_id, log, report)) is not None:
                (finished.append if is_finished else kept.add)(receive_id)
        except Exception as error:  # one bad receive must not keep runs from starting
            log(steps.unfinishable(receive_id, error))
    for receive_id in leasing - {*unfinished}:
        if not ReceiveState(flow, receive_id).is_live:
            flow.source.abandon(receive_id, list)  # a stalled run leased these after its receive was fenced
    for receive_id in expired:
        if receive_id not in kept:  # its claim makes the sensor request a run, which tries again
            flow.control.end(receive_id, if_over=True)
    if finished:
        receives = "receive" if len(finished) == 1 else "receives"
        log(f"Finished {receives} {', '.join(finished)} of earlier runs, which crashed, failed or were refused")
    return finished


def _interrupt(flow: Flow, receive_id: str, log: Callable[[str], None]) -> None:
    """End the Spark tasks of a run that has crashed: they would occupy the cores that this run needs."""
    try:
        flow.work(receive_id).interrupt()
    except Exception as error:  # Spark may be unavailable, and this run may not need it
        log(f"Could not interrupt Spark tasks of receive {receive_id}: {type(error).__name__}: {error}")


def _finish_other(flow: Flow, receive_id: str, log: Callable[[str], None], report: Report) -> bool | None:
    """Finish a receive if this run may; return whether it is finished, and None if this run may not."""
    state = ReceiveState(flow, receive_id)
    is_live, record = state.is_live, state.receive
    if record is None:
        if not is_live:
            flow.ledger.remove(receive_id)  # files that a task wrote after the receive was finished
        return None
    if not is_live and _is_ours(flow, record):
        return finish(flow, record, log, report)
    if decided := state.unfinished:
        # Of a live run, too: what this run looks up or replays must be published before it is acknowledged here.
        steps.publish(flow, decided)
    if not is_live:
        if decided:
            _report(flow, decided, report)
        _expect_other_run(flow, record)
    return None


def _is_ours(flow: Flow, receive: Receive) -> bool:
    """Whether a run of this flow can finish a receive: it needs the source of a receive that was pulled."""
    if is_elsewhere(flow, receive):
        return False
    return not intake_of(flow, receive).is_outside or (
        receive.producer == flow.producer.name and not flow.producer.is_whole_pipeline
    )


def adopt(flow: Flow) -> int:
    """Let the next runs finish the receives of deployments that no longer exist; return the number of receives."""
    found, _ = flow.ledger.under_way()
    theirs = [receive for receive in found if is_elsewhere(flow, receive)]
    for receive in theirs:
        flow.ledger.begin(receive.model_copy(update={"control": flow.control.reader().id, "place": ""}))
    return len(theirs)


def is_elsewhere(flow: Flow, receive: Receive) -> bool:
    """Whether another deployment began a receive: this one cannot see whether its run is alive."""
    return receive.control not in ("", flow.control.reader().id)


def _expect_other_run(flow: Flow, receive: Receive) -> None:
    """Check that some later run can finish a receive.

    Raises:
        PipelineError: Its producer was removed, or another deployment began it.
    """
    _expect_here(flow, receive)
    names = [producer.name for producer in BoundProducer.all_of(flow.pipeline)]
    if intake_of(flow, receive).is_outside and receive.producer not in names:
        option = f"producers[{receive.producer!r}]" if receive.producer else "producer"
        raise PipelineError(
            f"it pulled from `{option}`, which {flow.pipeline.name} no longer has: put it back into the class until "
            "its next run has finished this receive"
        )


def _expect_here(flow: Flow, receive: Receive) -> None:
    """Check that this deployment began a receive.

    Raises:
        PipelineError: Another deployment began it.
    """
    if is_elsewhere(flow, receive):
        raise PipelineError(
            f"it belongs to another deployment, {receive.place}: give each deployment a lake of its own, or its "
            "pipelines other names. If that deployment or its control store no longer exists, run `pipeline-platform "
            f"receives {flow.pipeline.name} --take-over`: the next run finishes the receive, or releases its messages"
        )
