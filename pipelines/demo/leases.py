"""The leases of runs that an interruption of the demo stopped."""

from __future__ import annotations

from pipeline_platform.control.store import ControlStore
from pipelines.demo.place import Place, Progress
from pipelines.demo.queues import table_queue
from pipelines.flights import Flights


def let_leases_end(place: Place, progress: Progress) -> None:
    """End the leases of runs whose processes were all stopped, rather than wait a minute for them to run out.

    What such a run left is then cleared up by the next one, as that of any dead run. Of SQS the messages come back
    when their visibility timeout is over.
    """
    control = ControlStore(f"sqlite:///{place.control}")
    try:
        for claim in control.in_flight(Flights.name):
            control.beat(claim.receive_id, 0)
            if progress.source == "table":
                table_queue(place).model_copy(update={"lease_s": 0.001}).extend(claim.receive_id)
    finally:
        control.close()
