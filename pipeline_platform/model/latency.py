"""Latency of messages: seconds from their publication at the source to their acknowledgement."""

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate

SHARES = (0.5, 0.95, 0.99)
"""Percentiles that are shown."""


def latency_of(published: Mapping[int, int], now: float) -> Counter[float]:
    """Return the number of messages by their latency at `now`, to three digits, for counts by publication time in ms.

    A publication time after `now`, by another clock, is a latency of 0.
    """
    latency: Counter[float] = Counter()
    for at, messages in published.items():
        latency[float(f"{max(0.0, now - at / 1000):.3g}")] += messages
    return latency


def percentile(latency: Mapping[float, int], share: float) -> float | None:
    """Return the latency that a share of the messages does not exceed; None without messages."""
    seconds, wanted = sorted(latency), share * sum(latency.values())
    sums = accumulate(latency[second] for second in seconds)
    return next((second for second, messages in zip(seconds, sums, strict=True) if messages >= wanted), None)
