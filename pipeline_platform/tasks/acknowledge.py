"""Acknowledging: the outcomes of a receive, grouped by `ack_ref`, told to the source in its largest unit."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import Range, read_ranges
from pipeline_platform.lake.storage import Lake
from pipeline_platform.source.contract import Refused, Source

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

    def __add__(self, other: object) -> Acknowledged:
        """Both together."""
        if not isinstance(other, Acknowledged):
            return NotImplemented
        return Acknowledged(self.told + other.told, self.refused + other.refused, self.errors + other.errors)


class Patience(NamedTuple):
    """How often a source is asked that refuses, or does not answer.

    Attributes:
        attempts: Calls at the most; each asks for what is left alone.
        wait_s: Seconds before the second one, doubled each time.
    """

    attempts: int
    wait_s: float


ONCE = Patience(1, 0.0)


def acknowledge(source: Source, ack_ref: str, messages: Sequence[Told], patience: Patience = ONCE) -> Acknowledged:
    """Tell the source of the messages of one group, one call an action; an error is returned, never raised.

    So one action's error, like one group's, holds back no other.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for message in messages:
        groups[message.action].append(message.ack_id)
    answer = Acknowledged(0, [], [])
    for action, ack_ids in groups.items():
        answer += _tell(source, ack_ref, action, ack_ids, patience)
    return answer


def _tell(source: Source, ack_ref: str, action: str, ack_ids: list[str], patience: Patience) -> Acknowledged:
    answer = _ask(source, ack_ref, action, ack_ids)
    for attempt in range(patience.attempts - 1):
        if not answer.errors:  # else all that was asked for is left
            ack_ids = [one.ack_id for one in answer.refused if not one.lost]
        if not ack_ids:
            break
        time.sleep(patience.wait_s * 2**attempt)
        lost = [one for one in answer.refused if one.lost]
        answer = Acknowledged(answer.told, lost, []) + _ask(source, ack_ref, action, ack_ids)
    return answer


def _ask(source: Source, ack_ref: str, action: str, ack_ids: list[str]) -> Acknowledged:
    try:
        refused: list[Refused] = []
        if action == "ack":
            refused = source.ack(ack_ref, ack_ids)
        elif action != "noop":
            refused = source.release(ack_ref, ack_ids, int(action.partition(":")[2] or 0))
    except Exception as error:
        said = f"{action} of {len(ack_ids)} messages of {source.name}: {type(error).__name__}: {error}"
        return Acknowledged(0, [], [said])
    return Acknowledged(len(ack_ids) - len(refused), refused, [])


@dataclass(frozen=True)
class Acknowledge:
    """Task `n` tells the source of the outcomes in `parts[n]`.

    It is told of no duplicate where `withhold_duplicates`: what another receive decided may not be published.
    """

    source: Source
    lake: Lake
    parts: Sequence[Sequence[Range]]
    patience: Patience = ONCE
    withhold_duplicates: bool = False

    def __call__(self, index: int) -> Iterator[pa.RecordBatch]:
        """Run task `index`; return the counts as the notes of a manifest."""
        started = time.monotonic()
        told = lost = refused = withheld = 0
        refusals: list[Refused] = []
        errors: list[str] = []
        for _, batch in read_ranges(self.lake, self.parts[index], ["ack_ref", "action", "ack_id", "outcome"], _ROWS):
            if self.withhold_duplicates:
                rows = batch.num_rows
                batch = batch.filter(pc.not_equal(batch.column("outcome"), "duplicate"))  # noqa: PLW2901
                withheld += rows - batch.num_rows
            for (ack_ref, action), ack_ids in _groups(batch):
                answer = _tell(self.source, ack_ref, action, ack_ids, self.patience)
                again = [one for one in answer.refused if not one.lost]
                told, lost = told + answer.told, lost + len(answer.refused) - len(again)
                refused += len(again)
                refusals = (refusals + again)[:_SAMPLE]
                errors = (errors + answer.errors)[:_SAMPLE]
        notes = {
            "acknowledged": told,
            "lost": lost,
            "withheld": withheld,
            "refused": refused,
            "refusals": [one._asdict() for one in refusals],
            "errors": errors,
            "seconds": time.monotonic() - started,
            "task": index,
        }
        yield from Manifest(notes=[notes]).to_arrow().to_batches()


def _groups(batch: pa.RecordBatch) -> Iterator[tuple[tuple[str, str], list[str]]]:
    """The ids of a batch by `ack_ref` and action, each group in the order in which its messages were handled.

    Most often there is one, so columns are compared and not rows gone through.
    """
    for ack_ref in pc.unique(batch.column("ack_ref")).to_pylist():
        mine = batch.filter(pc.equal(batch.column("ack_ref"), ack_ref))
        for action in pc.unique(mine.column("action")).to_pylist():
            yield (ack_ref, action), mine.filter(pc.equal(mine.column("action"), action)).column("ack_id").to_pylist()
