"""What dead runs left behind: what they decided is finished, what they did not is given up."""

import logging
from collections.abc import Callable

from pipeline_platform.lake.ledger import Receive
from pipeline_platform.model.pipeline import PipelineError
from pipeline_platform.run import steps
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.give_up import give_up
from pipeline_platform.run.intake import intake_of
from pipeline_platform.run.receive_state import ReceiveState

_LOG = logging.getLogger(__name__)


def clear_up(flow: Flow, log: Callable[[str], None] = _LOG.info) -> list[str]:
    """Finish what dead runs decided, give up what they did not; return the ids of what was cleared up.

    What was pulled from another producer is published, no more: that producer's next run has its source.

    Args:
        flow: The pipeline and its resources.
        log: Hears what was cleared up; and of a receive that cannot be finished, each time: it stays as it is.
    """
    # Backfills and replays may be anyone's to finish.
    dead = [claim.receive_id for claim in flow.control.over(flow.quota.key, flow.pipeline.name)]
    for claim in flow.control.over(flow.pipeline.name, of_all=True):
        flow.work(claim.receive_id).interrupt()  # it would hold up this run's, whichever producer's it is
    # First what is held and lies there, then what lives: a receive claims its room before it leaves a trace.
    holders, unfinished = flow.source.holders(), flow.ledger.unfinished()
    cleared = []
    for receive_id in unfinished:
        try:
            if _clear_up(flow, receive_id, log):
                cleared.append(receive_id)
        except Exception as error:  # whatever is wrong with one receive, it keeps no run from beginning
            log(steps.unfinishable(receive_id, error))
    for receive_id in holders - {*unfinished}:
        if not ReceiveState(flow, receive_id).is_live:
            flow.source.abandon(receive_id, list)  # its run stalled, and reserved this after it was given up
    for receive_id in dead:
        flow.control.end(receive_id, if_over=True)
    if cleared:
        log(f"cleared up after runs that died or left something unacknowledged: receives {', '.join(cleared)}")
    return cleared


def _clear_up(flow: Flow, receive_id: str, log: Callable[[str], None]) -> bool:
    """Clear up one receive; return whether that ended it."""
    state = ReceiveState(flow, receive_id)
    is_live, record = state.is_live, state.record
    if record is None:
        # A task of a dead run wrote this after the receive was given up or finished.
        if not is_live:
            flow.ledger.remove(receive_id)
        return False
    is_free = not is_live and _is_ours(flow, record)
    if done := state.unfinished or (give_up(flow, record) if is_free else None):
        # Also of a live run: what this one looks up, or replays, is published before it is acknowledged here.
        steps.publish(flow, done)
    if not is_free:
        if not is_live:
            _expect_somebody(flow, record)
        return False
    if not done:
        return True
    letters, not_taken = (answer := steps.acknowledge(flow, done)).letters, answer.not_taken
    if letters.error:
        log(f"receive {receive_id} is kept until its {letters.unsent} dead letters are sent: {letters.error}")
    elif not_taken.messages:
        log(f"receive {receive_id} is kept until its own acknowledger takes it: {not_taken.errors[0]}")
    return not letters.error and not not_taken.messages


def _is_ours(flow: Flow, receive: Receive) -> bool:
    """Whether a run of this flow has what it takes to finish a receive: its source, if it pulled from one."""
    if _is_elsewhere(flow, receive):
        return False
    return not intake_of(flow, receive).is_outside or (flow.has_source and receive.producer == flow.producer)


def take_over(flow: Flow) -> int:
    """Have the next runs finish the receives of deployments that are gone for good; return how many."""
    found, _ = flow.ledger.under_way()
    theirs = [receive for receive in found if _is_elsewhere(flow, receive)]
    for receive in theirs:
        flow.ledger.begin(receive.model_copy(update={"control": flow.control.reader().id, "place": ""}))
    return len(theirs)


def _is_elsewhere(flow: Flow, receive: Receive) -> bool:
    """Whether another deployment began a receive: here nobody knows whether its run lives."""
    return receive.control not in ("", flow.control.reader().id)


def _expect_somebody(flow: Flow, receive: Receive) -> None:
    """Refuse to wait for a run of a producer that is gone, or of another deployment.

    Raises:
        PipelineError: No next run of this one will finish the receive.
    """
    if _is_elsewhere(flow, receive):
        raise PipelineError(
            f"it belongs to another deployment, {receive.place}: give each deployment a lake of its own, or its "
            "pipelines other names. If that deployment or its control store is gone for good, run `pipeline-platform "
            f"receives {flow.pipeline.name} --take-over`: the next run finishes the receive, or releases its messages"
        )
    if intake_of(flow, receive).is_outside and receive.producer not in flow.pipeline.producers_of():
        option = f"producers[{receive.producer!r}]" if receive.producer else "producer"
        raise PipelineError(
            f"it pulled from `{option}`, which {flow.pipeline.name} has no more: give it back to the class until its "
            "next run has finished this"
        )
