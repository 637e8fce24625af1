"""The message: what a source delivered, and what became of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import repeat
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from pipeline_platform.failure import Failure, reason_of, words

Status = Literal["ok", "failed"]
BatchMode = Literal["bulk", "flush"]

DEFAULT = "default"
"""The batcher and the batch key of a message that was given none, as in Broadway."""

BULK: BatchMode = "bulk"
"""The batch mode of a message that was given none."""

DELIVERIES = pa.schema(
    [
        pa.field("source", pa.string(), metadata={"doc": "name of the source; ids are its own"}),
        pa.field("message_id", pa.string(), metadata={"doc": "stable at the source, over redeliveries"}),
        pa.field("data", pa.binary(), metadata={"doc": "the payload, untouched"}),
        pa.field("metadata", pa.string(), metadata={"doc": "JSON object, or null"}),
        pa.field("ack_ref", pa.string(), metadata={"doc": "what acknowledgements are grouped by"}),
        pa.field("ack_id", pa.string(), metadata={"doc": "what the source acknowledges by"}),
        pa.field("attempt", pa.int32(), metadata={"doc": "1, and one more for each time it is driven again"}),
        pa.field("redelivered", pa.bool_(), metadata={"doc": "may have been delivered before"}),
    ]
)
"""What `Source.read` yields: one row a delivery."""

MESSAGES = pa.schema(
    [
        *DELIVERIES,
        pa.field("received_at", pa.timestamp("us", "UTC")),
        pa.field("receive_id", pa.string()),
        pa.field("window", pa.string()),
    ]
)
"""The table `<pipeline>/messages`: every delivery as it was received, with the receive that leased it."""

_ACTION = re.compile(r"ack|noop|nack(:\d{1,6})?")


def check_action(action: str) -> str:
    """Return `action`, if it says what the source is told of a message.

    Args:
        action: `ack` (done with), `noop` (left alone: its lease runs out), `nack` (given back now) or
            `nack:<seconds>` (given back after a delay).

    Raises:
        ValueError: It is none of these.
    """
    if not isinstance(action, str) or not _ACTION.fullmatch(action):
        raise ValueError(f"an action is 'ack', 'noop', 'nack' or 'nack:<seconds>', not {action!r}")
    return action


class Delivery:
    """The columns of one Arrow batch that messages look themselves up in, each decoded when first asked for."""

    __slots__ = ("_decoded", "batch")

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch
        self._decoded: dict[str, list[Any]] = {}

    def value(self, column: str, row: int) -> Any:
        """Look up one cell."""
        values = self._decoded.get(column)
        if values is None:
            values = self._decoded[column] = self.batch.column(column).to_pylist()
        return values[row]


def _text(value: Any) -> str:
    if not issubclass(type(value), str):  # isinstance would believe what the value says of itself
        raise TypeError("takes text")
    return str.__str__(value)  # exactly text: a kind of it may compare, hash and show itself in ways of its own


def _key(value: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a batch key is text, not {value!r}; convert it with str()")
    return value


def _mode(value: Any) -> str:
    if type(value) is not str or value not in ("bulk", "flush"):
        raise TypeError("takes 'bulk' or 'flush'")
    return value


def _failure(value: Any) -> Failure | None:
    if value is not None and type(value) is not Failure:
        raise TypeError("takes a reason")
    return None if value is None else Failure(*map(words, value))


class _Actions(NamedTuple):
    on_success: str | None
    on_failure: str | None


def _actions(value: Any) -> _Actions | None:
    if value is None:
        return None
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError("takes one action for success and one for failure")
    return _Actions(*(None if action is None else check_action(_text(action)) for action in value))


_SETTINGS: dict[str, tuple[str, Callable[[Any], Any], Any]] = {
    "batcher": ("put_batcher", _text, DEFAULT),
    "batch_key": ("put_batch_key", _text, DEFAULT),
    "batch_mode": ("put_batch_mode", _mode, BULK),
    "failure": ("failed", _failure, None),
    "actions": ("configure_ack", _actions, None),
}
"""What callbacks set on a message: the method meant for it, what gives or refuses its plain value, and the first."""

_new = object.__new__  # bound once: a message is copied several times on its way


class Message:
    """One message on its way through a pipeline.

    Messages are values: every method returns a new one and leaves this one as it was. What the source said of
    it (`message_id`, `metadata`, `attempt`, ...) is read only.

    Attributes:
        data: The payload: `bytes` as delivered, then whatever the callbacks put.
        batcher: The batcher it goes to, `default` at first.
        batch_key: What its batches are kept apart by, `default` at first. Data: any text.
        batch_mode: `bulk`, or `flush` to deliver its batch without waiting for more.
        failure: Why it failed, or None while all is well.
        actions: What the source is told `(on success, on failure)`, None for the source's own setting.
    """

    __slots__ = ("_delivery", "_row", "actions", "batch_key", "batch_mode", "batcher", "data", "failure")

    def __init__(self, data: Any, delivery: Delivery, row: int) -> None:
        self.data = data
        self.batcher = DEFAULT
        self.batch_key = DEFAULT
        self.batch_mode: BatchMode = BULK
        self.failure: Failure | None = None
        self.actions: tuple[str | None, str | None] | None = None
        self._delivery = delivery
        self._row = row

    @classmethod
    def each(cls, batch: pa.RecordBatch) -> Iterator[Message]:
        """The messages of an Arrow batch with the columns of `MESSAGES` (or at least `data`), in order."""
        return map(cls, batch.column("data").to_pylist(), repeat(Delivery(batch)), range(batch.num_rows))

    @property
    def status(self) -> Status:
        """`ok` or `failed`."""
        return "ok" if self.failure is None else "failed"

    @property
    def reason(self) -> str | None:
        """Why it failed, in one line; None while all is well."""
        return None if self.failure is None else self.failure.reason

    @property
    def message_id(self) -> str:
        """Its id at the source, the same at every delivery."""
        return str(self._delivery.value("message_id", self._row))

    @property
    def metadata(self) -> dict[str, Any]:
        """What the source said of it beside the payload: attributes, headers, times."""
        text = self._delivery.value("metadata", self._row)
        return dict(json.loads(text)) if text else {}

    @property
    def attempt(self) -> int:
        """1 when first received, one more each time it is driven again."""
        return int(self._delivery.value("attempt", self._row))

    @property
    def received_at(self) -> datetime:
        """When the run that leased it read it."""
        at: datetime = self._delivery.value("received_at", self._row)
        return at

    @property
    def window(self) -> str:
        """The partition key it belongs to."""
        return str(self._delivery.value("window", self._row))

    def _copy(self) -> Message:
        new: Message = _new(Message)
        new.data = self.data
        new.batcher = self.batcher
        new.batch_key = self.batch_key
        new.batch_mode = self.batch_mode
        new.failure = self.failure
        new.actions = self.actions
        new._delivery = self._delivery
        new._row = self._row
        return new

    def is_same(self, other: object) -> bool:
        """Whether `other` is this message, or was made from it by its methods."""
        return other.__class__ is Message and other._row == self._row and other._delivery is self._delivery

    def _moved_to(self, delivery: Delivery, row: int) -> Message:
        """The same message, as a row of a batch that holds more than the one it was handled in."""
        new = self._copy()
        new._delivery, new._row = delivery, row
        return new

    def _checked(self) -> Message:
        """This message, once what a callback set on it is known to be what later steps can take.

        Raises:
            TypeError, ValueError: It is not: attributes can be set past the methods.
        """
        if (
            type(self.batcher) is str
            and type(self.batch_key) is str
            and self.batch_mode is BULK
            and self.failure is None
            and (self.actions is None or type(self.actions) is _Actions)
        ):
            return self
        new = self._copy()
        for name, (method, plain, _) in _SETTINGS.items():
            value = getattr(self, name)
            try:
                setattr(new, name, plain(value))
            except TypeError as error:
                told = f"{name} was set to a value of type {type(value).__name__}; {method} {error}"
                raise TypeError(told) from None
        return new

    def _rejected(self, failure: Failure) -> Message:
        """The same message, failed, without whatever a callback set on it that later steps cannot take."""
        new = Message(getattr(self, "data", None), self._delivery, self._row)
        for name, (_, plain, first) in _SETTINGS.items():
            try:
                setattr(new, name, plain(getattr(self, name, first)))
            except (TypeError, ValueError):
                setattr(new, name, first)
        new.failure = failure
        return new

    def put(self, data: Any, *, batcher: str | None = None, batch_key: str | None = None) -> Message:
        """Replace the data and say where it goes, in one step: what most handlers end with.

        Args:
            data: As `put_data` takes it.
            batcher: As `put_batcher` takes it; what is not given stays.
            batch_key: As `put_batch_key` takes it; what is not given stays.

        Raises:
            TypeError: The key is no text.
        """
        new = self._copy()
        new.data = data
        if batcher is not None:
            new.batcher = batcher
        if batch_key is not None:
            new.batch_key = _key(batch_key)
        return new

    def put_data(self, data: Any) -> Message:
        """Replace the data."""
        new = self._copy()
        new.data = data
        return new

    def update_data(self, function: Callable[[Any], Any]) -> Message:
        """Replace the data by what `function` makes of it."""
        return self.put_data(function(self.data))

    def put_batcher(self, batcher: str) -> Message:
        """Send it to that batcher; one that the pipeline does not have fails the message."""
        new = self._copy()
        new.batcher = batcher
        return new

    def put_batch_key(self, batch_key: str) -> Message:
        """Keep its batches apart from those of other keys.

        Raises:
            TypeError: The key is no text; the column it is stored in holds text.
        """
        new = self._copy()
        new.batch_key = _key(batch_key)
        return new

    def put_batch_mode(self, batch_mode: BatchMode) -> Message:
        """Set `bulk` or `flush`.

        Raises:
            ValueError: It is neither.
        """
        if batch_mode not in ("bulk", "flush"):
            raise ValueError(f"a batch mode is 'bulk' or 'flush', not {batch_mode!r}")
        new = self._copy()
        new.batch_mode = batch_mode
        return new

    def failed(self, reason: object) -> Message:
        """Mark it failed, for a reason that people will read."""
        new = self._copy()
        if isinstance(reason, Failure):
            new.failure = reason
        else:
            text = reason_of(reason) if isinstance(reason, BaseException) else words(reason, 2_000)
            new.failure = Failure("failed", text)
        return new

    def configure_ack(self, *, on_success: str | None = None, on_failure: str | None = None) -> Message:
        """Say what the source is told of this message alone; see `check_action`. What is not given stays."""
        before = self.actions or (None, None)
        new = self._copy()
        new.actions = _Actions(
            check_action(on_success) if on_success is not None else before[0],
            check_action(on_failure) if on_failure is not None else before[1],
        )
        return new

    def __repr__(self) -> str:
        """Show where it stands, without its payload."""
        return f"Message({self.message_id!r}, batcher={self.batcher!r}, status={self.status!r})"


class BatchInfo(NamedTuple):
    """What `handle_batch` is told of its batch.

    Attributes:
        batcher: Name of the batcher.
        batch_key: The key that all its messages share.
        partition: The partition they share; None, for nothing partitions them yet.
        size: How many messages.
        trigger: Why it is delivered: `size` (full) or `flush` (no more to come, or a message asked for it).
        batch_id: The same for the same batch of one receive, however often it is tried: make outside effects
            idempotent by it.
    """

    batcher: str
    batch_key: str
    partition: int | None
    size: int
    trigger: Literal["size", "flush"]
    batch_id: str
