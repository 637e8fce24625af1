"""Portions: what is read, sent or held at once, bounded in items and bytes."""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import pyarrow as pa

T = TypeVar("T")


def portions(
    items: Iterable[T], size: Callable[[T], int], max_bytes: int, max_items: int = sys.maxsize
) -> Iterator[list[T]]:
    """Group items in order, each with its size in bytes: as many as are within both bounds; a larger one is alone.

    It reads at most one item ahead of what it yields.
    """
    portion, held = list[T](), 0
    for item in items:
        weight = size(item)
        if portion and held + weight > max_bytes:
            yield portion
            portion, held = [], 0
        portion.append(item)
        held += weight
        if len(portion) == max_items:  # at once: the next one may be long in coming, or never come
            yield portion
            portion, held = [], 0
    if portion:
        yield portion


def halves(batch: pa.RecordBatch, max_bytes: int) -> Iterator[pa.RecordBatch]:
    """Cut rows in halves until each part is within `max_bytes` or a single row: the sizes of rows are unknown."""
    if batch.num_rows <= 1 or batch.get_total_buffer_size() <= max_bytes or batch.nbytes <= max_bytes:
        yield batch
        return
    half = batch.num_rows // 2
    yield from halves(batch.slice(0, half), max_bytes)
    yield from halves(batch.slice(half), max_bytes)
