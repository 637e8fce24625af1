"""The acknowledger as a Dagster resource: how patiently messages are acknowledged."""

import dagster as dg
from pydantic import Field

from pipeline_platform.tasks.acknowledge.acknowledger import Acknowledger


class AcknowledgerResource(dg.ConfigurableResource[Acknowledger]):
    """Acknowledges what is decided and published, grouped by `ack_ref`.

    One group's error never holds back another. What a source refuses is asked again, then reported and kept for the
    next run: it is never dropped.
    """

    attempts: int = Field(default=3, ge=1, description="How often a run tries to acknowledge what a source refuses.")
    wait_s: float = Field(default=1.0, ge=0, description="Seconds before it is asked again, doubled each time.")

    def create_resource(self, context: dg.InitResourceContext) -> Acknowledger:
        """Hand out the acknowledger."""
        del context
        return Acknowledger(self.attempts, self.wait_s)
