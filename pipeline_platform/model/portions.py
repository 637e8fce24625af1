"""Portions: groups of items that are read or sent together, limited in number and bytes."""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import pyarrow as pa

T = TypeVar("T")

BATCH_BYTES = 16 * 2**20
"""Payloads of a batch that a connector yields; a larger message is a batch by itself."""


def portions(
    items: Iterable[T], size: Callable[[T], int], max_bytes: int, max_items: int = sys.maxsize
) -> Iterator[list[T]]:
    """Yield items in groups within both limits, in order. An item larger than `max_bytes` is a group alone.

    It reads at most one item ahead of what it yields.

    Args:
        items: The items.
        size: Function that returns the bytes of an item.
        max_bytes: Most bytes of a group.
        max_items: Most items of a group.
    """
    portion, held = list[T](), 0
    for item in items:
        weight = size(item)
        if portion and held + weight > max_bytes:
            yield portion
            portion, held = [], 0
        portion.append(item)
        held += weight
        if len(portion) == max_items:  # without waiting for the next item, which may be late
            yield portion
            portion, held = [], 0
    if portion:
        yield portion


def halves(batch: pa.RecordBatch, max_bytes: int) -> Iterator[pa.RecordBatch]:
    """Halve a batch until each part has at most `max_bytes` or one row; the sizes of single rows are unknown."""
    if batch.num_rows <= 1 or batch.get_total_buffer_size() <= max_bytes or batch.nbytes <= max_bytes:
        yield batch
        return
    half = batch.num_rows // 2
    yield from halves(batch.slice(0, half), max_bytes)
    yield from halves(batch.slice(half), max_bytes)
