"""Runs whose process is gone: Dagster takes them for running for hours, and their backfill with them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pipeline_platform.control import ControlStore
from pipeline_platform.flow import LEASE_S
from pipelines.demo.dagster_api import Dagster, Run
from pipelines.demo.place import Place, Progress
from pipelines.demo.queues import table_queue
from pipelines.flights import Flights


class DeadRuns:
    """Tells Dagster of runs that hold no live claim and have held none for as long as one lasts.

    What they held comes back with its lease, whatever Dagster thinks; this is for whoever looks at the runs.
    """

    def __init__(self, place: Place, dagster: Dagster) -> None:
        self._place, self._dagster = place, dagster
        self._seen: dict[str, float] = {}

    def tell(self, runs: Sequence[Run]) -> list[Run]:
        """Mark those that are dead as canceled, and return them."""
        control = ControlStore(f"sqlite:///{self._place.control}")
        try:
            live = {claim.run_id for claim in control.in_flight(Flights.name)}
            over = {claim.run_id for claim in control.over(Flights.name)}
        finally:
            control.close()
        now, dead = time.monotonic(), []
        for run in runs:
            if run.status not in ("STARTING", "STARTED", "CANCELING"):
                continue
            if run.run_id in live or run.run_id not in self._seen:
                self._seen[run.run_id] = now
            elif run.run_id in over or now - self._seen[run.run_id] > LEASE_S:
                dead.append(run)
        for run in dead:
            self._dagster.mark_canceled(run.run_id)
        return dead


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
