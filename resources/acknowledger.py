"""The acknowledger: tells a source, in groups, what became of its messages."""

from __future__ import annotations

from collections.abc import Sequence

import dagster as dg
from pydantic import Field

from pipeline_platform.lake.receives import Receive
from pipeline_platform.run.flow import Acknowledgement, Flow
from pipeline_platform.source.contract import Source
from pipeline_platform.tasks.acknowledge import Answer, Patience, settle


class Acknowledger(dg.ConfigurableResource["Acknowledger"]):
    """Acknowledges what is decided and published, grouped by `ack_ref`.

    One group's error never holds back another. What a source refuses is asked again, then reported and kept for the
    next run: it is never dropped.
    """

    attempts: int = Field(default=3, ge=1, description="How often a source that refuses is asked in one run.")
    wait_s: float = Field(default=1.0, ge=0, description="Seconds before it is asked again, doubled each time.")

    def ack(self, source: Source, ack_ref: str, successful: Sequence[str], failed: Sequence[str] = ()) -> Answer:
        """Settle one group by the source's settings for success and failure.

        Args:
            source: Whose messages.
            ack_ref: Their group.
            successful: Ids that the source acknowledges by, of those that were handled.
            failed: Of those that failed.
        """
        answer = settle(source, ack_ref, source.on_success, successful, self._patience)
        return answer + settle(source, ack_ref, source.on_failure, failed, self._patience)

    def acknowledge(self, flow: Flow, receive: Receive) -> Acknowledgement:
        """Acknowledge a receive, in Spark tasks over its outcome files where that is worth it and the source allows."""
        return flow.acknowledge(receive, self._patience)

    @property
    def _patience(self) -> Patience:
        return Patience(self.attempts, self.wait_s)
