"""Counts of a task for the driver and for people: numbers, reasons, batch keys and a sample of failures, bounded."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from pipeline_platform.model.failure import Failure, words
from pipeline_platform.model.message import Message

_SAMPLE = 10
_KEYS = 100
_KEY = 200
"""Characters of a batch key that are counted and shown. Keys are data and may have any length."""
_REASON = 300
_DISTINCT = 10_000
"""Maximum number of reasons or batch keys that a task counts. Beyond it, the rarest are dropped."""


class Tally:
    """Counts of one task.

    Attributes:
        counts: Numbers by name.
        more: Other values for the driver.
    """

    def __init__(self, batchers: Iterable[str] = ()) -> None:
        self.counts: Counter[str] = Counter()
        self.more: dict[str, Any] = {}
        self._reasons: Counter[str] = Counter()
        self._keys: dict[str, Counter[str]] = {name: Counter() for name in batchers}
        self._sample: list[dict[str, Any]] = []

    def outcome(self, outcome: str, window: str, messages: int) -> None:
        """Count messages in total and by window."""
        if messages:
            self.counts[outcome] += messages
            self.counts[f"{outcome}@{window}"] += messages

    def keys(self, batcher: str, keys: pa.Array) -> None:
        """Count the batch keys of rows."""
        counted = self._keys[batcher]
        names, counts = keys.value_counts().flatten()
        for name, count in zip(names.to_pylist(), counts.to_pylist(), strict=True):
            counted[name[:_KEY]] += count
        _forget_rare(counted)

    def reason(self, reason: str) -> None:
        """Count the reason of a failure."""
        self._reasons[reason[:_REASON]] += 1
        _forget_rare(self._reasons)

    def failure(self, message: Message) -> None:
        """Count a failed message. The first ones are kept as a sample."""
        failure = message.failure or Failure("failed", "")
        self.reason(words(f"{failure.kind}: {failure.reason}"))
        if len(self._sample) < _SAMPLE:
            shown = {"stage": failure.stage, "kind": failure.kind, "reason": words(failure.reason, _REASON)}
            self._sample.append({"message_id": message.message_id, **shown, "attempt": message.attempt})

    def notes(self) -> dict[str, Any]:
        """Return the values for the driver."""
        return {
            **self.counts,
            **self.more,
            "reasons": dict(self._reasons.most_common(_SAMPLE)),
            "keys": {name: dict(keys.most_common(_KEYS)) for name, keys in self._keys.items() if keys},
            "sample": self._sample,
        }

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON, for `load` in another process."""
        counted = {"counts": self.counts, "reasons": self._reasons, "keys": self._keys}
        return {**counted, "more": self.more, "sample": self._sample}

    def load(self, counted: dict[str, Any]) -> None:
        """Replace the state by that of another tally, from its `to_json`."""
        self.counts, self._reasons = Counter(counted["counts"]), Counter(counted["reasons"])
        self._keys = {name: Counter(keys) for name, keys in counted["keys"].items()}
        self.more, self._sample = counted["more"], counted["sample"]


def _forget_rare(counter: Counter[str]) -> None:
    if len(counter) > _DISTINCT:
        kept = dict(counter.most_common(_DISTINCT // 2))
        counter.clear()
        counter.update(kept)
