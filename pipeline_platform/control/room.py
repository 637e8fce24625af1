"""How many messages a receive takes on: what it is asked for, within what the pipeline's other runs leave it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pipeline_platform.control.demand import RUN_LASTS, Limits
from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.pipeline import Pipeline


@dataclass(frozen=True)
class Room:
    """What a pipeline's runs may hold at once, and how a receive comes by its part.

    Attributes:
        pipeline: The class.
        control: Knows what its runs hold, and its rate limit.
    """

    pipeline: type[Pipeline]
    control: ControlStore

    @property
    def per_run(self) -> int:
        """Messages that one run takes on at most; a replay may take on more."""
        return Limits.of(self.pipeline.producer, self.pipeline.processors).per_run

    @property
    def capacity(self) -> int:
        """Messages that all runs may hold at once."""
        return Limits.of(self.pipeline.producer, self.pipeline.processors).capacity

    def for_a_pull(self) -> int:
        """What a pull without a demand takes on: a run's most, or what its rate limit permits while it should last."""
        limit = self.control.rate_limiting(self.pipeline.name, self.pipeline.producer.rate_limiting)
        spare = self.control.spare(self.pipeline.name, limit, RUN_LASTS)
        # More would be leased for longer than a run should last.
        return self.per_run if spare is None else min(self.per_run, spare)

    def claim(
        self, receive_id: str, run_id: str, wanted: int, log: Callable[[str], None], *, lease_s: float, within_s: float
    ) -> int:
        """Claim room, and wait for what is missing; keeps what it has got meanwhile.

        Args:
            receive_id: Who claims it.
            run_id: Of its Dagster run.
            wanted: How many messages.
            log: Hears while it waits, and if it gets less.
            lease_s: How long the claim lasts unless it is renewed.
            within_s: How long to wait.

        Returns:
            What it has got.
        """
        deadline, told = time.monotonic() + within_s, False
        while True:
            granted = self.control.claim(
                self.pipeline.name, receive_id, run_id, wanted=wanted, capacity=self.capacity, lease_s=lease_s
            )
            if granted == wanted:
                return granted
            if time.monotonic() >= deadline:
                log(f"room for {granted} of {wanted} messages: other runs hold what else may be in flight")
                return granted
            if not told:
                log(f"room for {granted} of {wanted} messages so far; waiting up to {within_s:.0f} s for other runs")
                told = True
            time.sleep(1.0)
