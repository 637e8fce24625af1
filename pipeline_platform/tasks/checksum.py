"""Whether rows that went through Spark in any order are the rows that went in: each once, and none missing."""

from __future__ import annotations

from typing import Any

import numpy as np


def checksum(positions: np.ndarray[Any, np.dtype[np.int64]]) -> int:
    """A sum over positions, in any order, that tells a row which is there twice from one that is not there.

    Each is mixed first (splitmix64, Steele et al. 2014): of plain positions two sums are easily the same.
    """
    mixed = positions.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))


def checksum_of_all(rows: int) -> int:
    """The checksum of positions 0 to `rows` - 1, a part at a time."""
    parts = (np.arange(start, min(start + 2**20, rows)) for start in range(0, rows, 2**20))
    return sum(map(checksum, parts)) % 2**64
