"""Acknowledging: the outcomes of a receive, by `ack_ref` and action, acknowledged in the source's largest unit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import RowRange, keys_of, only, read_ranges
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import OUTCOMES
from pipeline_platform.model.actions import EARLY
from pipeline_platform.source.contract import Refused, Source

_ROWS = 65_536
"""Messages that a task acknowledges at once: it holds their ids."""
_SAMPLE = 10
_KEY = ("ack_ref", "ack_id")
_READ, _NOT_TAKEN = only(OUTCOMES, *_KEY, "action", "outcome"), only(OUTCOMES, *_KEY)


class Answer(NamedTuple):
    """What a source answered.

    Attributes:
        acknowledged: Messages that it acknowledged, those left alone by `noop`, and those that were early.
        refused: What it did not take, although asked again.
        errors: What went wrong with whole groups, in words.
    """

    acknowledged: int
    refused: list[Refused]
    errors: list[str]

    def __add__(self, other: object) -> Answer:
        """Both together."""
        if not isinstance(other, Answer):
            return NotImplemented
        return Answer(self.acknowledged + other.acknowledged, self.refused + other.refused, self.errors + other.errors)


@dataclass(frozen=True)
class Acknowledger:
    """Acknowledges messages of a source, patiently.

    Attributes:
        attempts: Calls at the most for each group; each asks only for what is left.
        wait_s: Seconds before the second one, doubled each time.
    """

    attempts: int = 1
    wait_s: float = 0.0

    def acknowledge(self, source: Source, ack_ref: str, action: str, ack_ids: Sequence[str]) -> Answer:
        """Acknowledge one group by one action. An error is returned, never raised, so it holds back no other group.

        Args:
            source: Whose messages they are.
            ack_ref: Their group.
            action: One of the source's words.
            ack_ids: What the source knows them by.
        """
        answer, left = Answer(0, [], []), list(ack_ids)
        for attempt in range(self.attempts):
            if not left:
                break
            if attempt:
                time.sleep(self.wait_s * 2 ** (attempt - 1))
            lost = [one for one in answer.refused if one.lost]
            answer = Answer(answer.acknowledged, lost, []) + _ask(source, ack_ref, action, left)
            if not answer.errors:  # else all that was asked for is left
                left = [one.ack_id for one in answer.refused if not one.lost]
        return answer


ONCE = Acknowledger()


def _ask(source: Source, ack_ref: str, action: str, ack_ids: list[str]) -> Answer:
    try:
        refused = source.acknowledge(action, ack_ref, ack_ids)
    except Exception as error:
        said = f"{action} of {len(ack_ids)} messages of {source.name}: {type(error).__name__}: {error}"
        return Answer(0, [], [said])
    return Answer(len(ack_ids) - len(refused), refused, [])


@dataclass(frozen=True)
class AcknowledgeOutcomes:
    """Task `n` acknowledges the outcomes in `parts[n]`.

    Attributes:
        acknowledger: How patiently.
        withhold_duplicates: Acknowledge no duplicate: what another receive decided may not be published.
        not_taken: The ids of messages that are not acknowledged, since the pipeline's own `acknowledge` was not
            notified of them.
    """

    source: Source
    lake: Lake
    parts: Sequence[Sequence[RowRange]]
    acknowledger: Acknowledger = ONCE
    withhold_duplicates: bool = False
    not_taken: Sequence[RowRange] = ()

    def __call__(self, index: int) -> Iterator[pa.RecordBatch]:
        """Run task `index`; return the counts as the notes of a manifest."""
        began, started, total, withheld = time.time(), time.monotonic(), Answer(0, [], []), 0
        lost, why_lost, refused = 0, "", 0
        not_taken = [keys_of(rows, *_KEY) for _, rows in read_ranges(self.lake, self.not_taken, _NOT_TAKEN, _ROWS)]
        for _, rows in read_ranges(self.lake, self.parts[index], _READ, _ROWS):
            batch = rows
            if not_taken:
                comes_later = pc.is_in(keys_of(batch, *_KEY), value_set=pa.concat_arrays(not_taken))
                batch = batch.filter(pc.invert(comes_later))
            if self.withhold_duplicates:
                acknowledged = batch.filter(pc.not_equal(batch.column("outcome"), "duplicate"))
                withheld, batch = withheld + batch.num_rows - acknowledged.num_rows, acknowledged
            for (ack_ref, action), ack_ids in _groups(batch):
                if action == EARLY:
                    total += Answer(len(ack_ids), [], [])
                    continue
                answer = self.acknowledger.acknowledge(self.source, ack_ref, action, ack_ids)
                again = [one for one in answer.refused if not one.lost]
                why_lost = why_lost or next((one.reason for one in answer.refused if one.lost), "")
                lost, refused = lost + len(answer.refused) - len(again), refused + len(again)
                total += answer._replace(refused=again)
                total = Answer(total.acknowledged, total.refused[:_SAMPLE], total.errors[:_SAMPLE])
        notes = {
            "acknowledged": total.acknowledged,
            "lost": lost,
            "why lost": why_lost,
            "withheld": withheld,
            "refused": refused,
            "refusals": [one._asdict() for one in total.refused],
            "errors": total.errors,
            "began": began,
            "seconds": time.monotonic() - started,
            "task": index,
        }
        yield from Manifest(notes=[notes]).to_arrow().to_batches()


def _groups(batch: pa.RecordBatch) -> Iterator[tuple[tuple[str, str], list[str]]]:
    """The ids of a batch by `ack_ref` and action, each group in the order in which its messages were handled.

    `ack` comes last: a source that acknowledges all messages up to one at once then finds no others among them.
    Most often there is one group, so columns are compared, and not row by row.
    """
    for ack_ref in pc.unique(batch.column("ack_ref")).to_pylist():
        mine = batch.filter(pc.equal(batch.column("ack_ref"), ack_ref))
        for action in sorted(pc.unique(mine.column("action")).to_pylist(), key=lambda action: action == "ack"):
            yield (ack_ref, action), mine.filter(pc.equal(mine.column("action"), action)).column("ack_id").to_pylist()
