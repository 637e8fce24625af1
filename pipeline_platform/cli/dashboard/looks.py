"""Looks at the state of pipelines in the background: a source that hangs delays neither the picture nor other looks."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import UTC, datetime

from pipeline_platform.background import in_background
from pipeline_platform.cli.dashboard.picture import Causes, Look
from pipeline_platform.cli.status.status_data import PipelineStatus
from pipeline_platform.cli.status.status_gathering import LookingAt

_AT_ONCE = 8
"""Maximum number of concurrent looks that do not hang. The control store has at most ten connections per process."""
_POLL_S = 0.05


class Paced:
    """A time to repeat work, by the processor time that it took: at most a share of one processor is used."""

    def __init__(self, share: float) -> None:
        self._share, self._again_at = share, 0.0

    @property
    def is_due(self) -> bool:
        """Whether the work may be repeated."""
        return time.monotonic() >= self._again_at

    def ended(self, cost_s: float) -> None:
        """Store the cost of the work that ended now."""
        self._again_at = time.monotonic() + cost_s / self._share


class BackgroundLook:
    """The state of a pipeline and the causes of its failures, looked at in a thread.

    Args:
        status: Returns the state; calls its argument as described in `LookingAt`.
        causes: Returns the causes in this state.
        share: Share of a processor to use at most, on average.
    """

    def __init__(
        self, status: Callable[[LookingAt], PipelineStatus], causes: Callable[[PipelineStatus], Causes], share: float
    ) -> None:
        self._status, self._causes, self._pace = status, causes, Paced(share)
        self._look: Future[None] | None = None
        self._known, self._error = Look(), ""
        self._waits_for, self._since = "", time.monotonic()
        self._began = self._since

    @property
    def is_due(self) -> bool:
        """Whether to look again: no look is active, and the pace allows another look."""
        return self._pace.is_due and not self.is_active

    @property
    def is_active(self) -> bool:
        """Whether a look is active."""
        return self._look is not None and not self._look.done()

    @property
    def active_s(self) -> float:
        """Seconds since the start of the last look."""
        return time.monotonic() - self._began

    def start(self) -> None:
        """Start a look."""
        self._began = time.monotonic()
        self._look = in_background(self._perform, "look")

    def wait(self, seconds: float) -> None:
        """Wait for the active look."""
        if self._look is not None:
            wait([self._look], seconds)

    def last(self) -> Look:
        """Return the last known state."""
        if not self.is_active:
            return self._known._replace(error=self._error)
        waits_s = time.monotonic() - self._since
        return self._known._replace(waits_for=self._waits_for, waits_s=waits_s, error=self._error)

    def _perform(self) -> None:
        began = time.thread_time()

        def looking_at(_: str, part: str) -> None:
            self._waits_for, self._since = part, time.monotonic()

        try:
            status = self._status(looking_at)
            self._known, self._error = Look(status, self._known.causes, datetime.now(UTC)), ""
            looking_at("", "the lake")  # with many failures, their causes take longer than the state
            self._known = self._known._replace(causes=self._causes(status))
        except Exception as error:  # of any store; the picture shows it
            self._error = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._pace.ended(time.thread_time() - began)


def look_at_all(looks: Sequence[BackgroundLook], within_s: float) -> None:
    """Start the looks that are due, some at a time, and wait for each look at most `within_s` seconds."""
    due = [look for look in looks if look.is_due]
    while True:
        active = [look for look in looks if look.is_active and look.active_s < within_s]
        started, due = due[: _AT_ONCE - len(active)], due[_AT_ONCE - len(active) :]
        for look in started:
            look.start()
        if not (waits := [*active, *started]):
            return
        waits[0].wait(_POLL_S)
