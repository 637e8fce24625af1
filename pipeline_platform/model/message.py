"""The message: what a source delivered, and what became of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import repeat
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from pipeline_platform.model.failure import Failure, reason_of, words

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
        pa.field("published_at", pa.timestamp("us", "UTC"), metadata={"doc": "when it came to the source, or null"}),
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


def _text(value: Any) -> str | None:
    """Text as exactly that, for a kind of it may compare, hash and show itself in ways of its own; else None."""
    # isinstance would believe what the value says of itself.
    return str.__str__(value) if issubclass(type(value), str) else None


def check_action(action: str) -> str:
    """Return `action`, if it says what the source is told of a message.

    Args:
        action: `ack` (done with), `noop` (left alone: its lease runs out), `nack` (given back now) or
            `nack:<seconds>` (given back after a delay).

    Raises:
        ValueError: It is none of these.
    """
    text = _text(action)
    if text is None or not _ACTION.fullmatch(text):
        raise ValueError(f"an action is 'ack', 'noop', 'nack' or 'nack:<seconds>', not {action!r}")
    return text


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


def _key(value: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a batch key is text, not {value!r}; convert it with str()")
    return value


class Standing(NamedTuple):
    """What the messages of a batch have in common until a callback says more of one than data, batcher and key.

    Attributes:
        delivery: Where the source's words of them are.
        batch_mode: See `Message`; as are the others.
    """

    delivery: Delivery
    batch_mode: BatchMode = BULK
    failure: Failure | None = None
    actions: tuple[str | None, str | None] | None = None


_ROUTE = {"batcher": "put_batcher", "batch_key": "put_batch_key"}
"""What may be set past the methods, and the method meant for it: to check each value as it is set would take longer."""

_new = object.__new__  # bound once: a message is copied several times on its way


class Message:
    """One message on its way through a pipeline.

    Messages are values: every method returns a new one and leaves this one as it was. What the source said of
    it (`message_id`, `metadata`, `attempt`, ...) is read only.

    Attributes:
        data: The payload: `bytes` as delivered, then whatever the callbacks put.
        batcher: The batcher it goes to, `default` at first.
        batch_key: What its batches are kept apart by, `default` at first. Data: any text.
    """

    __slots__ = ("_row", "_standing", "batch_key", "batcher", "data")

    def __init__(self, data: Any, row: int, standing: Standing) -> None:
        self.data = data
        self.batcher = DEFAULT
        self.batch_key = DEFAULT
        self._row = row
        self._standing = standing

    @classmethod
    def each(cls, batch: pa.RecordBatch) -> Iterator[Message]:
        """The messages of an Arrow batch with the columns of `MESSAGES` (or at least `data`), in order."""
        return map(cls, batch.column("data").to_pylist(), range(batch.num_rows), repeat(Standing(Delivery(batch))))

    @property
    def batch_mode(self) -> BatchMode:
        """`bulk`, or `flush` to deliver its batch without waiting for more."""
        return self._standing.batch_mode

    @property
    def failure(self) -> Failure | None:
        """Why it failed, or None while all is well."""
        return self._standing.failure

    @property
    def actions(self) -> tuple[str | None, str | None] | None:
        """What the source is told `(on success, on failure)`, None for the source's own setting."""
        return self._standing.actions

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
        return str(self._standing.delivery.value("message_id", self._row))

    @property
    def metadata(self) -> dict[str, Any]:
        """What the source said of it beside the payload: attributes, headers, times."""
        text = self._standing.delivery.value("metadata", self._row)
        return dict(json.loads(text)) if text else {}

    @property
    def attempt(self) -> int:
        """1 when first received, one more each time it is driven again."""
        return int(self._standing.delivery.value("attempt", self._row))

    @property
    def received_at(self) -> datetime:
        """When the run that leased it read it."""
        at: datetime = self._standing.delivery.value("received_at", self._row)
        return at

    @property
    def window(self) -> str:
        """The partition key it belongs to."""
        return str(self._standing.delivery.value("window", self._row))

    def _copy(self) -> Message:
        new: Message = _new(Message)
        new.data = self.data
        new.batcher = self.batcher
        new.batch_key = self.batch_key
        new._row = self._row
        new._standing = self._standing
        return new

    def _but(self, **changed: Any) -> Message:
        new = self._copy()
        new._standing = self._standing._replace(**changed)
        return new

    def is_same(self, other: object) -> bool:
        """Whether `other` is this message, or was made from it by its methods."""
        return (
            other.__class__ is Message
            and other._row == self._row
            and other._standing.delivery is self._standing.delivery
        )

    def _checked(self, stage: str) -> Message:
        """This message, once what a callback set on it is known to be what later steps can take.

        Args:
            stage: The callback. If it failed the message, this is where it failed.

        Raises:
            TypeError: It is not: attributes can be set past the methods.
        """
        new = self._copy()
        for name, method in _ROUTE.items():
            value = getattr(self, name)
            if (text := _text(value)) is None:
                raise TypeError(f"{name} was set to a value of type {type(value).__name__}; {method} takes text")
            setattr(new, name, text)
        return new if new.failure is None else new._but(failure=new.failure.at(stage))

    def _rejected(self, failure: Failure) -> Message:
        """The same message, failed, without whatever a callback set on it that later steps cannot take."""
        new = Message(getattr(self, "data", None), self._row, self._standing._replace(failure=failure))
        for name in _ROUTE:
            if (text := _text(getattr(self, name, None))) is not None:
                setattr(new, name, text)
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
        new: Message = _new(Message)
        new.data = data
        new.batcher = self.batcher if batcher is None else batcher
        new.batch_key = self.batch_key if batch_key is None else _key(batch_key)
        new._row = self._row
        new._standing = self._standing
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
        mode = _text(batch_mode)
        if mode not in ("bulk", "flush"):
            raise ValueError(f"a batch mode is 'bulk' or 'flush', not {batch_mode!r}")
        return self._but(batch_mode=mode)

    def failed(self, reason: object) -> Message:
        """Mark it failed, for a reason that people will read."""
        if isinstance(reason, Failure):
            return self._but(failure=Failure(*map(words, reason)))
        text = reason_of(reason) if isinstance(reason, BaseException) else words(reason, 2_000)
        return self._but(failure=Failure("failed", text))

    def configure_ack(self, *, on_success: str | None = None, on_failure: str | None = None) -> Message:
        """Say what the source is told of this message alone; see `check_action`. What is not given stays."""
        before = self.actions or (None, None)
        given = (on_success, on_failure)
        actions = tuple(
            old if action is None else check_action(action) for old, action in zip(before, given, strict=True)
        )
        return self._but(actions=actions)

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
