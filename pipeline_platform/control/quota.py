"""The number of messages that a receive may lease beside the pipeline's other runs."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pipeline_platform.control.breaker import TRIAL
from pipeline_platform.control.demand import RUN_LASTS
from pipeline_platform.control.run_size import RATE_RUNS, rate_of, run_size
from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.options import Breaker


@dataclass(frozen=True)
class Quota:
    """Capacity of a producer's runs, by its options and the control store.

    For the whole pipeline: capacity of retries and replays, together with the runs of all producers.
    """

    producer: BoundProducer
    control: ControlStore

    @property
    def key(self) -> str:
        """The key in the control store."""
        return self.producer.key

    @property
    def per_run(self) -> int:
        """Greatest number of messages in a run; a replay may handle more."""
        return self.control.processors_of(self.producer.pipeline).per_run

    @property
    def per_pull(self) -> int:
        """Greatest number of messages in a run from the source, limited by `target_run_time`, too."""
        processors = self.control.processors_of(self.producer.pipeline)
        most = processors.per_run
        if processors.target_run_time is not None:
            most = run_size(processors, rate_of(self.control.ended(self.key, last=RATE_RUNS)))
        is_attempt = self.breaker is not None and self.control.breaker(self.key).until is not None
        return min(most, TRIAL) if is_attempt else most

    @property
    def paused(self) -> str | None:
        """Reason why runs from the source may receive nothing now: a pause, or the breaker. None: they may."""
        return self.control.paused(self.key) or self.breaker_pause

    @property
    def breaker_pause(self) -> str | None:
        """Reason of the breaker's pause, which does not apply to retries and replays; None without a pause."""
        return self.control.breaker(self.key).paused(datetime.now(UTC)) if self.breaker else None

    def judge(self, messages: int, failed: int) -> None:
        """Record the messages of a published receive for the breaker, and how many failed and may be retried."""
        if messages and (breaker := self.breaker):
            self.control.judge(self.key, breaker, messages, failed)

    @property
    def breaker(self) -> Breaker | None:
        """The producer's option; None for the whole pipeline."""
        return None if self.producer.is_whole_pipeline else self.producer.options.breaker

    @property
    def capacity(self) -> int:
        """Messages that all runs may have in flight at once."""
        return self.per_run * sum(self.control.options_of(producer).max_runs for producer in self.producer.each)

    def for_a_pull(self) -> int:
        """Return the demand of a run that was given none: its greatest size, or the permits during the run."""
        spare = self.control.spare(self.key, self.producer.options.rate_limiting, RUN_LASTS)
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
        """Claim capacity for a receive, wait up to `within_s` seconds for all of it, and return the messages granted.

        A partial grant is kept during the wait. `log` is called when the wait starts and if it ends with less. See
        `Claims.claim`.
        """
        key, began, waits = self.key, time.monotonic(), False
        bounds: dict[str, Any] = {"capacity": self.capacity, "lease_s": lease_s, "alone": alone}
        while True:
            granted = self.control.claim(key, receive_id, run_id, wanted=wanted, **bounds)
            if granted == wanted:
                return granted
            claimed = f"Claimed capacity for {granted} of {wanted} messages"
            if time.monotonic() - began >= within_s:
                log(f"{claimed}: other runs use the remaining capacity")
                return granted
            if not waits:
                log(f"{claimed}; waiting up to {within_s:.0f} s for other runs")
                waits = True
            time.sleep(1.0)
