"""Acknowledging: the outcomes of a receive, grouped by `ack_ref`, told to the source in its largest unit."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import pyarrow as pa

from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import Range, read_ranges
from pipeline_platform.lake.storage import Lake
from pipeline_platform.source import Refused, Source

_ROWS = 65_536
"""Acknowledged at once by one task: what it holds of ids."""
_SAMPLE = 10


class Told(NamedTuple):
    """A message that is done with: what the source knows it by, and what it is told."""

    ack_id: str
    action: str


class Acknowledged(NamedTuple):
    """What came of an acknowledgement.

    Attributes:
        told: How many messages the source was told of, those left alone by `noop` included.
        refused: What it would not take, although asked again.
        errors: What went wrong with whole groups, in words.
    """

    told: int
    refused: list[Refused]
    errors: list[str]


def acknowledge(source: Source, ack_ref: str, messages: Sequence[Told]) -> Acknowledged:
    """Tell the source of the messages of one group, one call an action; an error is returned, never raised.

    So one action's error, like one group's, holds back no other.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for message in messages:
        groups[message.action].append(message.ack_id)
    told, refused, errors = 0, [], []
    for action, ack_ids in groups.items():
        try:
            if action == "ack":
                refused += source.ack(ack_ref, ack_ids)
            elif action != "noop":
                refused += source.release(ack_ref, ack_ids, int(action.partition(":")[2] or 0))
            told += len(ack_ids)
        except Exception as error:
            errors.append(f"{action} of {len(ack_ids)} messages of {source.name}: {type(error).__name__}: {error}")
    return Acknowledged(told - len(refused), refused, errors)


@dataclass(frozen=True)
class Acknowledge:
    """Task `n` tells the source of the outcomes in `parts[n]`."""

    source: Source
    lake: Lake
    parts: Sequence[Sequence[Range]]

    def __call__(self, index: int) -> Iterator[pa.RecordBatch]:
        """Run task `index`; return the counts as the notes of a manifest."""
        started = time.monotonic()
        told = lost = 0
        refused: list[Refused] = []
        errors: list[str] = []
        for _, batch in read_ranges(self.lake, self.parts[index], ["ack_ref", "ack_id", "action"], _ROWS):
            # Sorted by group alone: within one, messages stay in the order in which they were handled.
            rows = sorted(zip(*(column.to_pylist() for column in batch.columns), strict=True), key=itemgetter(0))
            for ack_ref, group in groupby(rows, key=itemgetter(0)):
                result = acknowledge(self.source, ack_ref, [Told(*row[1:]) for row in group])
                told += result.told
                lost += sum(one.lost for one in result.refused)
                refused += [one for one in result.refused if not one.lost]
                errors += result.errors
        notes = {
            "acknowledged": told,
            "lost": lost,
            "refused": len(refused),
            "refusals": [one._asdict() for one in refused[:_SAMPLE]],
            "errors": errors[:_SAMPLE],
            "seconds": time.monotonic() - started,
            "task": index,
        }
        yield from Manifest(notes=[notes]).to_arrow().to_batches()
