"""When a failed message is retried, and when it is dead."""

import math
import zlib
from datetime import datetime, timedelta
from typing import Self

from pydantic import Field, model_validator

from pipeline_platform.model.strict_options import Duration, Options

_SPREAD = 0.25
"""Part of a pause that is added at random, so that messages that failed together do not all come back together."""


class Backoff(Options):
    """Pauses that grow: `first`, then each `factor` times the one before it, up to `most`."""

    first: Duration = Field(description="Pause before the second attempt.")
    factor: float = Field(2.0, ge=1, le=100, description="Each pause is so many times the one before it.")
    most: Duration = Field(timedelta(hours=1), description="The longest pause.")

    @model_validator(mode="after")
    def _grows(self) -> Self:
        if self.most < self.first:
            raise ValueError(
                f"most is {self.most}, less than first ({self.first}): raise it, or give Retry one timedelta as backoff"
            )
        return self


class Retry(Options):
    """Retries a failed message after a pause. A message that fails at the last attempt is dead."""

    max_attempts: int = Field(ge=1, le=1_000, description="Attempts in all; with 1 no message is retried.")
    backoff: Duration | Backoff = Field(
        Backoff(first=timedelta(minutes=1)),
        description="The pause after each failure: always the same, or a Backoff. Up to a quarter is added to it.",
    )

    def is_last(self, attempt: int) -> bool:
        """Whether a message that fails at this attempt is dead."""
        return attempt >= self.max_attempts

    def due_at(self, source: str, message_id: str, attempt: int, failed_at: datetime) -> datetime:
        """When a message that failed at this attempt is to be retried. What is added is the same at each call."""
        spread = zlib.crc32("\0".join((source, message_id, str(attempt))).encode()) / 2**32
        return failed_at + self._pause(attempt) * (1 + _SPREAD * spread)

    def _pause(self, attempt: int) -> timedelta:
        if not isinstance(self.backoff, Backoff):
            return self.backoff
        first, factor, most = self.backoff.first, self.backoff.factor, self.backoff.most
        grown = (attempt - 1) * math.log(factor)  # as a power it may be more than a float holds
        return most if grown >= math.log(most / first) else first * math.exp(grown)
