"""Acknowledging the outcomes of a receive by `ack_ref` and ack action, in the source's largest unit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import RowRange, groups, keys_of, only, read_ranges
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import OUTCOMES
from pipeline_platform.lake.task_report import SAMPLE, TaskReport
from pipeline_platform.model.actions import EARLY
from pipeline_platform.model.failure import words
from pipeline_platform.model.retry import Backoff
from pipeline_platform.source.contract import Refused, Source

_ROWS = 65_536
"""Messages that a task acknowledges at once. Their ids are in memory."""
_LONGEST = timedelta(hours=1)
_KEY = ("ack_ref", "ack_id")
_READ, _NOT_TAKEN = only(OUTCOMES, *_KEY, "action", "outcome"), only(OUTCOMES, *_KEY)


class Answer(NamedTuple):
    """The source's answer to an acknowledgement.

    Attributes:
        acknowledged: Number of messages acknowledged, now or early, or skipped by `noop`.
        refused: Messages that the source refused after all attempts.
        errors: Errors of whole groups, one sentence each.
    """

    acknowledged: int
    refused: list[Refused]
    errors: list[str]


@dataclass(frozen=True)
class Acknowledger:
    """Acknowledges messages of a source and retries what the source refused.

    Attributes:
        attempts: Maximum number of calls per group. Each call sends only the messages that are left.
        wait_s: Pause in seconds before the second call. It doubles with each call, up to an hour.
    """

    attempts: int = 1
    wait_s: float = 0.0

    def acknowledge(self, source: Source, ack_ref: str, action: str, ack_ids: Sequence[str]) -> Answer:
        """Acknowledge one group by one ack action. Errors are returned, not raised, so that other groups continue.

        Args:
            source: Source of the messages.
            ack_ref: Group of the messages.
            action: Ack action that the source supports.
            ack_ids: The source's ids of the messages.
        """
        answer, left = Answer(0, [], []), list(ack_ids)
        for attempt in range(self.attempts):
            if not left:
                break
            if attempt and self.wait_s:
                first = timedelta(seconds=self.wait_s)
                time.sleep(Backoff(first=first, most=max(first, _LONGEST)).before(attempt + 1).total_seconds())
            lost = [refusal for refusal in answer.refused if refusal.lost]
            asked = _ask(source, ack_ref, action, left)
            answer = Answer(answer.acknowledged + asked.acknowledged, lost + asked.refused, asked.errors)
            if not answer.errors:  # an error leaves the whole group
                left = [refusal.ack_id for refusal in answer.refused if not refusal.lost]
        return answer


ONCE = Acknowledger()


def _ask(source: Source, ack_ref: str, action: str, ack_ids: list[str]) -> Answer:
    try:
        refused = source.acknowledge(action, ack_ref, ack_ids)
    except Exception as error:
        noun = "message" if len(ack_ids) == 1 else "messages"
        text = f"{action} of {len(ack_ids)} {noun} of {source.name}: {type(error).__name__}: {error}"
        return Answer(0, [], [text])
    return Answer(len(ack_ids) - len(refused), refused, [])


@dataclass(frozen=True)
class AcknowledgeOutcomes:
    """Task `n` acknowledges the outcomes in `parts[n]`.

    Attributes:
        acknowledger: Attempts and pauses.
        withhold_duplicates: Whether duplicates are left unacknowledged. Set while the receive that decided them may
            still be unpublished.
        not_taken: Ids of messages to leave unacknowledged, because the pipeline's `acknowledge` was not notified
            of them.
    """

    source: Source
    lake: Lake
    parts: Sequence[Sequence[RowRange]]
    acknowledger: Acknowledger = ONCE
    withhold_duplicates: bool = False
    not_taken: Sequence[RowRange] = ()

    def __call__(self, index: int) -> Iterator[pa.RecordBatch]:
        """Run task `index`; return a manifest with its report."""
        report, started = TaskReport(task=index, began=time.time()), time.monotonic()
        not_taken = [keys_of(rows, *_KEY) for _, rows in read_ranges(self.lake, self.not_taken, _NOT_TAKEN, _ROWS)]
        for _, rows in read_ranges(self.lake, self.parts[index], _READ, _ROWS):
            batch = rows
            if not_taken:
                comes_later = pc.is_in(keys_of(batch, *_KEY), value_set=pa.concat_arrays(not_taken))
                batch = batch.filter(pc.invert(comes_later))
            if self.withhold_duplicates:
                acknowledged = batch.filter(pc.not_equal(batch.column("outcome"), "duplicate"))
                report.withheld += batch.num_rows - acknowledged.num_rows
                batch = acknowledged
            for (ack_ref, action), ack_ids in _groups(batch):
                if action == EARLY:
                    report.acknowledged += len(ack_ids)
                    continue
                answer = self.acknowledger.acknowledge(self.source, ack_ref, action, ack_ids)
                lost = [refusal.reason for refusal in answer.refused if refusal.lost]
                refusals = [f"{refusal.ack_id}: {refusal.reason}" for refusal in answer.refused if not refusal.lost]
                report.acknowledged += answer.acknowledged
                report.lost += len(lost)
                report.losses = _sample(report.losses, lost)[:1]
                report.refusals = _sample(report.refusals, refusals)
                report.errors = _sample(report.errors, answer.errors)
        report.seconds = time.monotonic() - started
        yield from Manifest(reports=[report]).to_arrow().to_batches()


def _sample(known: Sequence[str], more: Sequence[str]) -> list[str]:
    return [*known, *map(words, more)][:SAMPLE]


def _groups(batch: pa.RecordBatch) -> Iterator[tuple[tuple[str, str], list[str]]]:
    """Yield the ids of a batch by `ack_ref` and ack action, each group in the order of handling.

    `ack` comes last: a cumulative acknowledgement then includes no message that has another action.
    """
    for ack_ref, mine in groups(batch, "ack_ref"):
        for action, rows in sorted(groups(mine, "action"), key=lambda group: group[0] == "ack"):
            yield (ack_ref, action), rows.column("ack_id").to_pylist()
