"""The acknowledger: tells a source, in groups, what became of its messages."""

from __future__ import annotations

from collections.abc import Sequence

import dagster as dg
from pydantic import Field

from pipeline_platform.lake.ledger import Receive
from pipeline_platform.run import steps
from pipeline_platform.run.flow import Flow
from pipeline_platform.source.contract import Source
from pipeline_platform.tasks.acknowledge import Acknowledged, Patience, Told, acknowledge


class Acknowledger(dg.ConfigurableResource["Acknowledger"]):
    """Acknowledges what is decided and published, grouped by `ack_ref`.

    One group's error never holds back another. What a source refuses is asked again, then reported and kept for the
    next run: it is never dropped.
    """

    attempts: int = Field(default=3, ge=1, description="How often a source that refuses is asked in one run.")
    wait_s: float = Field(default=1.0, ge=0, description="Seconds before it is asked again, doubled each time.")

    def ack(self, source: Source, ack_ref: str, successful: Sequence[str], failed: Sequence[str] = ()) -> Acknowledged:
        """Tell a source of one group, by its settings for success and failure.

        Args:
            source: Whose messages.
            ack_ref: Their group.
            successful: Ids that the source acknowledges by, of those that were handled.
            failed: Of those that failed.
        """
        told = [Told(ack_id, source.on_success) for ack_id in successful]
        told += [Told(ack_id, source.on_failure) for ack_id in failed]
        return acknowledge(source, ack_ref, told, self._patience)

    def acknowledge(self, flow: Flow, receive: Receive) -> steps.Acknowledgement:
        """Acknowledge a receive, in Spark tasks over its outcome files where that is worth it and the source allows."""
        return steps.acknowledge(flow, receive, self._patience)

    @property
    def _patience(self) -> Patience:
        return Patience(self.attempts, self.wait_s)
