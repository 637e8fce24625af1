"""Report of a task for the driver and for people: bounded counts, samples, output and times."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter

from pipeline_platform.model.failure import Failure, by_cause, words
from pipeline_platform.model.message import Message

SAMPLE = 10
"""Maximum number of reasons, failures or errors in a report."""
_KEYS = 100
_KEY = 200
"""Characters of a batch key that are counted and shown. Keys are data and may have any length."""
_REASON = 300
_DISTINCT = 10_000
"""Maximum number of reasons or batch keys that a task counts. Beyond it, the rarest are dropped."""


class FailureSample(NamedTuple):
    """A failed message, without its payload."""

    message_id: str
    stage: str
    kind: str
    reason: str
    attempt: int


class CallbackOutput(NamedTuple):
    """Output of callbacks (print and logging).

    Attributes:
        author: The callbacks, for people.
        text: Lines that are shown.
        more: Number of further lines, which are only in Spark's log.
    """

    author: str
    text: str
    more: int = 0


@dataclass
class Totals:
    """Counts, samples and output of one task, or of any number of tasks.

    Attributes:
        published: Received messages by publication time in ms; see `TaskReport.count_published`.
        handled: Messages by window, like `failed`, `returned` and `duplicates`.
        skipped: Messages that a callback skipped, by window.
        skip_reasons: Skipped messages by reason or cause.
        dead: Failed messages that are not retried.
        permanent: Dead messages that a retry cannot help. Other messages are dead after their last attempt.
        held: Messages that wait for a failure of their partition. They are also counted as failed.
        still_held: Held messages that a retry leaves open. They are also counted as returned.
        released: Messages that were not started because the run stops. They are also counted as returned.
        staged: Messages that wait for a batch, by batcher.
        batch_keys: Rows by batch key, by batcher.
        effects: Messages by window that `handle_batch` handled, by batcher without a table.
        failed_effects: Messages by window that failed in such a batcher.
        not_rescued: Failed messages that `handle_failed` returned as ok without being allowed to rescue.
        reasons: Failures by reason or cause.
        sample: The first failures.
        timed: Messages whose `handle_message` was timed, a sample, by the type of their data.
        timed_s: Seconds of these calls, by the type.
        waited: Seconds of waiting for permits.
        positions: Rows that the query of the Spark lane returned, or must not see.
        checksum: Checksum of their positions.
        acknowledged: Messages acknowledged, now or early, or skipped by `noop`.
        withheld: Duplicates that were left unacknowledged.
        lost: Messages whose leases expired before their acknowledgement.
        losses: Sample of the source's reasons for losses.
        refusals: Sample of the messages that the source refused, with its reasons.
        errors: Sample of errors of acknowledgements, or of the pipeline's own `acknowledge`.
        notified: Ranges of positions that the pipeline's own `acknowledge` was notified of, by `ack_ref`.
        not_taken: Messages for which the pipeline's own `acknowledge` raised.
        dropped: Messages that other receives decided.
        letters: Dead letters sent.
        output: Output of callbacks.
    """

    received: int = 0
    redelivered: int = 0
    published: Counter[int] = field(default_factory=Counter)
    handled: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    returned: Counter[str] = field(default_factory=Counter)
    duplicates: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    skip_reasons: Counter[str] = field(default_factory=Counter)
    dead: int = 0
    permanent: int = 0
    held: int = 0
    still_held: int = 0
    released: int = 0
    staged: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    batch_keys: dict[str, Counter[str]] = field(default_factory=dict)
    effects: dict[str, Counter[str]] = field(default_factory=dict)
    failed_effects: dict[str, Counter[str]] = field(default_factory=dict)
    rescued: int = 0
    not_rescued: int = 0
    handle_failed_errors: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    sample: list[FailureSample] = field(default_factory=list)
    timed: Counter[str] = field(default_factory=Counter)
    timed_s: dict[str, float] = field(default_factory=dict)
    waited: float = 0.0
    positions: int = 0
    checksum: int = 0
    acknowledged: int = 0
    withheld: int = 0
    lost: int = 0
    losses: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    notified: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    not_taken: int = 0
    dropped: int = 0
    letters: int = 0
    output: list[CallbackOutput] = field(default_factory=list)

    @classmethod
    def of(cls, reports: Iterable[Totals]) -> Totals:
        """Return the sum of reports: numbers are added, samples and output joined."""
        totals = cls()
        for report in reports:
            for name in _NAMES:
                if value := getattr(report, name):
                    setattr(totals, name, _sum(getattr(totals, name), value))
        return totals

    @property
    def retryable(self) -> int:
        """Failed messages that a retry could help, or that the source redelivers, without held ones."""
        failed, returned = self.failed.total() - self.held, self.returned.total() - self.still_held
        return failed - self.permanent + returned - self.released

    def latency(self, now: float) -> Counter[float]:
        """Return the number of received messages by seconds from their publication to `now`, to three digits.

        A publication time after `now`, by another clock, is a latency of 0.
        """
        latency: Counter[float] = Counter()
        for at, messages in self.published.items():
            latency[float(f"{max(0.0, now - at / 1000):.3g}")] += messages
        return latency

    def for_people(self) -> Totals:
        """Return the counts with the most frequent causes and batch keys, and bounded samples."""
        return replace(
            self,
            published=Counter(),
            reasons=_most_frequent(by_cause(self.reasons), _KEYS),
            skip_reasons=_most_frequent(by_cause(self.skip_reasons), _KEYS),
            batch_keys={batcher: _most_frequent(keys, _KEYS) for batcher, keys in self.batch_keys.items()},
            sample=self.sample[:SAMPLE],
            losses=self.losses[:SAMPLE],
            refusals=self.refusals[:SAMPLE],
            errors=self.errors[:SAMPLE],
            notified={},
            output=[],
        )

    def counts(self) -> dict[str, int]:
        """Return the numbers by the name of their field, summed over windows, batchers or reasons."""
        values = {name: getattr(self, name) for name in _NAMES}
        numbers = {name: value.total() if isinstance(value, Counter) else value for name, value in values.items()}
        return {name: number for name, number in numbers.items() if isinstance(number, int)}


def _sum(value: Any, other: Any) -> Any:
    if type(value) is not dict:
        return value + other
    return {**value, **other, **{key: value[key] + other[key] for key in value.keys() & other.keys()}}


_NAMES = [each.name for each in fields(Totals)]


@dataclass
class TaskReport(Totals):
    """Report of one task, or of a step as a whole.

    Attributes:
        task: Number of the task.
        step: Step that it reports as a whole; empty for a task.
        began: Unix time at which the task began; None for a step.
        seconds: Duration.
        largest: Size of the largest received message in bytes.
        redelivered_since: Publication time of the oldest redelivered message; None if the source does not report it.
        published_until: Publication time of the newest message; None if the source does not report it.
        stopped: Id of the first failure of each partition in which a message failed, in a pipeline that holds
            partitions. Not kept after the step.
    """

    task: int | None = None
    step: str = ""
    began: float | None = None
    seconds: float = 0.0
    largest: int = 0
    redelivered_since: datetime | None = None
    published_until: datetime | None = None
    stopped: dict[str, str] = field(default_factory=dict)

    def count_published(self, times: pa.Array) -> None:
        """Count received messages by publication time, except messages without it.

        To bound the counts, a time is rounded by at most a sixteenth of the age of its message.
        """
        published = times.drop_null().cast(pa.int64()).to_numpy() // 1000
        age = np.maximum(time.time_ns() // 1_000_000 - published, 1)
        grid = np.maximum(2 ** np.floor(np.log2(age)).astype(np.int64) // 8, 1)
        rounded, counts = np.unique(published // grid * grid + grid // 2, return_counts=True)
        for at, messages in zip(rounded.tolist(), counts.tolist(), strict=True):
            self.published[at] += messages

    def count_keys(self, batcher: str, keys: pa.Array) -> None:
        """Count the batch keys of rows."""
        counted = self.batch_keys.setdefault(batcher, Counter())
        names, counts = keys.value_counts().flatten()
        for name, count in zip(names.to_pylist(), counts.to_pylist(), strict=True):
            counted[name[:_KEY]] += count
        _forget_rare(counted)

    def count_effects(self, batcher: str, window: str, handled: int = 0, failed: int = 0) -> None:
        """Count messages of a batcher without a table."""
        self.effects.setdefault(batcher, Counter())[window] += handled
        self.failed_effects.setdefault(batcher, Counter())[window] += failed

    def count_reason(self, reason: str) -> None:
        """Count the reason of a failure."""
        self.reasons[words(reason, _REASON)] += 1
        self.reasons = _few(self.reasons)

    def count_skipped(self, reason: object) -> None:
        """Count the reason of a skipped message."""
        self.skip_reasons[words(reason, _REASON)] += 1
        self.skip_reasons = _few(self.skip_reasons)

    def count_held(self, messages: int, *, in_retry: bool) -> None:
        """Count messages that wait for a failure of their partition."""
        if in_retry:
            self.still_held += messages
        else:
            self.held += messages

    def count_failure(self, message: Message) -> None:
        """Count the reason of a failed message. The first messages are kept as a sample."""
        failure = message.failure or Failure("failed", "")
        self.count_reason(f"{failure.kind}: {failure.reason}")
        if len(self.sample) < SAMPLE:
            shown = words(failure.stage), words(failure.kind), words(failure.reason, _REASON)
            self.sample.append(FailureSample(message.message_id, *shown, message.attempt))

    def bounded(self) -> TaskReport:
        """Return the report with the most frequent causes and batch keys only."""
        keys = {batcher: _most_frequent(keys, _KEYS) for batcher, keys in self.batch_keys.items()}
        reasons, skips = (_most_frequent(by_cause(each), SAMPLE) for each in (self.reasons, self.skip_reasons))
        return replace(self, reasons=reasons, skip_reasons=skips, batch_keys=keys)

    def to_json(self) -> str:
        """Return the report as JSON, without defaults."""
        return _JSON.dump_json(self, exclude_defaults=True).decode()

    def load(self, text: str) -> None:
        """Replace all values by those of another report, given as JSON."""
        vars(self).update(vars(_JSON.validate_json(text)))


_JSON = TypeAdapter(TaskReport)
from_json = _JSON.validate_json
"""Return the report that `TaskReport.to_json` wrote."""


def earliest(times: Sequence[datetime | None]) -> datetime | None:
    """Return the earliest of some times; None if one of them is unknown."""
    known = [time for time in times if time is not None]
    return min(known) if known and len(known) == len(times) else None


def _most_frequent(counter: Counter[str], most: int) -> Counter[str]:
    return Counter(dict(counter.most_common(most)))


def _few(reasons: Counter[str]) -> Counter[str]:
    """Return counts of reasons, by cause if they are many."""
    if len(reasons) <= _DISTINCT:
        return reasons
    reasons = by_cause(reasons)
    _forget_rare(reasons)
    return reasons


def _forget_rare(counter: Counter[str]) -> None:
    if len(counter) > _DISTINCT:
        kept = dict(counter.most_common(_DISTINCT // 2))
        counter.clear()
        counter.update(kept)
