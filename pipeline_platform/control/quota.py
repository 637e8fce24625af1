"""How many messages a receive takes on: what it is asked for, within what the pipeline's other runs leave it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline_platform.control.demand import RUN_LASTS
from pipeline_platform.control.run_size import LOOK_BACK, rate_of, run_size
from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.pipeline import Pipeline


@dataclass(frozen=True)
class Quota:
    """What the runs of a producer may hold at once, by its options and the control store.

    Of a pipeline with several, and without one of them: what backfills and replays may hold, with all producers' runs.
    """

    pipeline: type[Pipeline]
    control: ControlStore
    producer: str = ""

    @property
    def key(self) -> str:
        """What the control store knows it by."""
        return self.pipeline.limits_key(self.producer)

    @property
    def per_run(self) -> int:
        """Messages that one run takes on at most; a replay may take on more."""
        return self.control.processors_of(self.pipeline).per_run

    @property
    def per_pull(self) -> int:
        """Messages that one run from the source takes on at most, by its `target_run_time` too."""
        processors = self.control.processors_of(self.pipeline)
        if processors.target_run_time is None:
            return processors.per_run
        return run_size(processors, rate_of(self.control.ended(self.key, last=LOOK_BACK)))

    @property
    def capacity(self) -> int:
        """Messages that all runs may hold at once."""
        names = self.pipeline.producers_of(self.producer)
        return self.per_run * sum(self.control.producer_of(self.pipeline, name).max_runs for name in names)

    def for_a_pull(self) -> int:
        """What a pull without a demand takes on: a run's most, or what its rate limit permits while it should last."""
        (producer,) = self.pipeline.producers_of(self.producer).values()
        spare = self.control.spare(self.key, producer.rate_limiting, RUN_LASTS)
        # More would be leased for longer than a run should last.
        return self.per_pull if spare is None else min(self.per_pull, spare)

    def claim(
        self,
        receive_id: str,
        run_id: str,
        wanted: int,
        log: Callable[[str], None],
        *,
        lease_s: float,
        within_s: float,
        alone: bool = False,
    ) -> int:
        """Claim room for a receive, and wait for what is missing, up to `within_s` seconds; return what it got.

        It keeps meanwhile what it has. `log` hears while it waits, and if it gets less. See `Claims.claim`.
        """
        key, began, waits = self.key, time.monotonic(), False
        bounds: dict[str, Any] = {"capacity": self.capacity, "lease_s": lease_s, "alone": alone}
        while True:
            granted = self.control.claim(key, receive_id, run_id, wanted=wanted, **bounds)
            if granted == wanted:
                return granted
            room = f"room for {granted} of {wanted} messages"
            if time.monotonic() - began >= within_s:
                log(f"{room}: other runs hold what else may be in flight")
                return granted
            if not waits:
                log(f"{room} so far; waiting up to {within_s:.0f} s for other runs")
                waits = True
            time.sleep(1.0)
