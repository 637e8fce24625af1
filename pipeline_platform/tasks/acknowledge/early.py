"""Acknowledging messages before their run's decision: `ack_immediately`."""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa

from pipeline_platform.lake.decisions.early_acks import AckKey, Entry, Notes
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.actions import AckPolicy
from pipeline_platform.model.message import Message
from pipeline_platform.source.contract import Source
from pipeline_platform.tasks.acknowledge.acknowledger import ONCE

_LOG = logging.getLogger(__name__)


def ack_keys(rows: pa.RecordBatch) -> Iterator[AckKey]:
    """Yield the source's keys of rows: `ack_ref` and `ack_id`."""
    return zip(rows.column("ack_ref").to_pylist(), rows.column("ack_id").to_pylist(), strict=True)


class EarlyAcks(ABC):
    """Acknowledges messages early, each once. Safe to call from several threads.

    Attributes:
        acknowledged: Entries of the acknowledged messages, by delivery.
    """

    def __init__(self, ack_policy: AckPolicy) -> None:
        self.acknowledged: dict[AckKey, Entry] = {}
        self._ack_policy, self._turn = ack_policy, threading.Lock()

    def __call__(self, messages: Sequence[Message]) -> None:
        """Acknowledge the messages that are not acknowledged yet."""
        with self._turn:
            by_key = {self._key(message): message for message in messages}
            if left := {key: message for key, message in by_key.items() if key not in self.acknowledged}:
                self.acknowledged |= self._acknowledge_now(left)

    @abstractmethod
    def _acknowledge_now(self, messages: Mapping[AckKey, Message]) -> dict[AckKey, Entry]:
        """Acknowledge messages. Return the entries of those that the source accepted."""

    def among(self, rows: pa.RecordBatch, *, by_forks: bool) -> dict[int, Entry]:
        """Return the entries of the acknowledged rows, by index. `by_forks`: read entries of other processes first."""
        if by_forks:
            self.look()
        known = self.acknowledged
        return {index: known[key] for index, key in enumerate(ack_keys(rows)) if key in known} if known else {}

    def look(self) -> None:
        """Update `acknowledged` with the acknowledgements of other processes."""
        return

    def _entry(self, key: AckKey, message: Message) -> Entry:
        on_success, on_failure = message.actions or (None, None)
        if message.failure is None:
            return Entry(*key, on_success or self._ack_policy.on_success, failed=False)
        redelivered = message._state.delivery.value("redelivered", message._row)
        action = self._ack_policy.of_delivery(on_failure or self._ack_policy.on_failure, redelivered=redelivered)
        return Entry(*key, action, failed=True)

    @staticmethod
    def _key(message: Message) -> AckKey:
        value = message._state.delivery.value
        return value("ack_ref", message._row), value("ack_id", message._row)


class SourceEarlyAcks(EarlyAcks):
    """Acknowledges messages in the source's largest unit, after writing notes about them to the lake."""

    def __init__(self, source: Source, lake: Lake, pipeline: str, receive_id: str) -> None:
        super().__init__(source.ack_policy)
        self._source, self._receive_id, self._warned = source, receive_id, False
        self._notes = Notes(lake, pipeline, receive_id)
        self.look()

    def look(self) -> None:
        """Read the acknowledgements of callback processes, earlier attempts of the task, and earlier steps."""
        self.acknowledged |= {key: entry for key, entry in self._notes.read().items() if entry.certain}

    def _acknowledge_now(self, messages: Mapping[AckKey, Message]) -> dict[AckKey, Entry]:
        entries = {key: self._entry(key, message) for key, message in messages.items()}
        path = self._notes.write(entries.values())
        # After the note: a run that fences the receive first closes the notes, then reads them.
        if not self._notes.is_open():
            raise RuntimeError(f"receive {self._receive_id}: fenced while its run stalled; nothing was acknowledged")
        left = dict(entries)
        for (ack_ref, action), group in _groups(entries.values()).items():
            answer = ONCE.acknowledge(self._source, ack_ref, action, group)
            for refusal in answer.refused:
                left.pop((ack_ref, refusal.ack_id), None)
            if answer.errors:  # the source may have acknowledged them nevertheless
                left |= {(ack_ref, ack_id): left[ack_ref, ack_id]._replace(certain=False) for ack_id in group}
            self._warn([*answer.errors, *(f"{refusal.ack_id}: {refusal.reason}" for refusal in answer.refused)])
        if left != entries:
            self._notes.write(left.values(), path)
        return {key: entry for key, entry in left.items() if entry.certain}

    def _warn(self, refusals: Sequence[str]) -> None:
        if refusals and not self._warned:
            self._warned = True
            text = "Source %s refused an early acknowledgement; the run retries it at its end: %s"
            _LOG.warning(text, self._source.name, refusals[0])


def _groups(entries: Iterable[Entry]) -> dict[tuple[str, str], list[str]]:
    groups: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        groups.setdefault((entry.ack_ref, entry.action), []).append(entry.ack_id)
    return groups
