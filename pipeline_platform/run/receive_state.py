"""Whose a receive is by now, and what became of it: what a step asks before it goes on."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline_platform.lake.decision import FencedError, decided, expect_owner, standing_of
from pipeline_platform.lake.ledger import Receive
from pipeline_platform.lake.tables import DECIDED
from pipeline_platform.run.flow import Flow


def as_decided(flow: Flow, receive: Receive) -> Receive | None:
    """The receive as the run that decided it left it; None if it is not decided."""
    return decided(flow.tables["outcomes"], receive)


def expect_decided(flow: Flow, receive: Receive) -> None:
    """Refuse to go on with a receive that this run has not decided.

    Raises:
        FencedError: It was given up or taken over: its messages are another run's now.
    """
    done = as_decided(flow, receive)
    if done is None:
        raise FencedError(
            f"receive {receive.receive_id} is not decided: it was given up while its run stalled, or `commit` was "
            "left out; its messages come back when their lease is over"
        )
    expect_owner(receive, done.owner)


def expect_finished(flow: Flow, receive_id: str, run_ids: Sequence[str]) -> None:
    """Refuse to take a receive that is gone for finished, unless its own run decided it.

    Args:
        flow: Its flow.
        receive_id: Which.
        run_ids: The run that asks, and those that it re-executes.

    Raises:
        FencedError: It was given up, and its messages come back; or a re-execution took it over from this run.
    """
    standing = standing_of(flow.tables["outcomes"], receive_id)
    if standing.state != DECIDED:
        raise FencedError(
            f"receive {receive_id} was given up while its run stalled or had failed: its messages come back when "
            "their lease is over, and nothing is left to do here"
        )
    if standing.owner and not any(standing.is_of(run_id) for run_id in run_ids):
        raise FencedError(
            f"receive {receive_id} is not run {run_ids[0]}'s any more: another re-execution took it over and "
            "finished it; nothing is left to do here"
        )
