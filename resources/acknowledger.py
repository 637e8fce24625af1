"""The acknowledger: how patiently a source is told what became of its messages."""

import dagster as dg
from pydantic import Field

from pipeline_platform.lake.ledger import Receive
from pipeline_platform.run import steps
from pipeline_platform.run.flow import Flow
from pipeline_platform.tasks.acknowledge import Patience


class Acknowledger(dg.ConfigurableResource["Acknowledger"]):
    """Acknowledges what is decided and published, grouped by `ack_ref`.

    One group's error never holds back another. What a source refuses is asked again, then reported and kept for the
    next run: it is never dropped.
    """

    attempts: int = Field(default=3, ge=1, description="How often a source that refuses is asked in one run.")
    wait_s: float = Field(default=1.0, ge=0, description="Seconds before it is asked again, doubled each time.")

    def acknowledge(self, flow: Flow, receive: Receive) -> steps.Acknowledgement:
        """Acknowledge a receive, in Spark tasks over its outcome files if there are many and the source allows it."""
        return steps.acknowledge(flow, receive, Patience(self.attempts, self.wait_s))
