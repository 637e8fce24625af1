"""What dead runs left behind: what they decided is finished, what they did not is given up."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pipeline_platform.lake.decision import fence
from pipeline_platform.run import steps
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import intake_of
from pipeline_platform.run.lease import held
from pipeline_platform.run.standing import as_decided

_LOG = logging.getLogger(__name__)


def clear_up(flow: Flow, log: Callable[[str], None] = _LOG.info) -> list[str]:
    """Finish what dead runs decided, give up what they did not; return the ids of what was cleared up.

    Args:
        flow: The pipeline and its resources.
        log: Hears of a receive that cannot be finished, each time; it stays as it is.
    """
    dead = [claim.receive_id for claim in flow.control.over(flow.pipeline.name)]
    for receive_id in dead:
        flow.work(receive_id).interrupt()  # it would hold up this run's
    # First what is held and lies there, then what lives: a receive claims its room before it leaves a trace.
    holders, unfinished = flow.source.holders(), flow.ledger.unfinished()
    live = {claim.receive_id for claim in flow.control.in_flight(flow.pipeline.name)}
    cleared = []
    for receive_id in unfinished:
        try:
            if _clear_up(flow, receive_id, is_live=receive_id in live):
                cleared.append(receive_id)
        except Exception as error:  # whatever is wrong with one receive, it keeps no run from beginning
            log(steps.unfinishable(receive_id, error))
    for receive_id in holders - live - {*unfinished}:
        flow.source.abandon(receive_id, list)  # its run stalled, and reserved this after it was given up
    for receive_id in dead:
        flow.control.end(receive_id, if_over=True)
    return cleared


def _clear_up(flow: Flow, receive_id: str, *, is_live: bool) -> bool:
    """Clear up one receive; return whether that ended it."""
    receive = flow.ledger.get(receive_id)
    if receive is None:
        # A task of a dead run wrote this after the receive was given up or finished.
        if not is_live:
            flow.ledger.remove(receive_id)
        return False
    if done := as_decided(flow, receive):
        if is_live:
            # What this run looks up must be published before it is acknowledged.
            steps.publish(flow, done)
            return False
        steps.acknowledge(flow, done)
    elif is_live or not fence(flow.tables, receive_id):
        return False
    else:
        intake_of(flow, receive).source.abandon(receive_id, lambda: held(flow, receive))
        flow.ledger.remove(receive_id)
    return True
