"""The message: what a source delivered, and how it stands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from itertools import repeat
from typing import Any, Literal, NamedTuple, TypeVar, cast, overload

import pyarrow as pa

from pipeline_platform.model import payload
from pipeline_platform.model.actions import AckPolicy
from pipeline_platform.model.failure import Failure, reason_of, words

Status = Literal["ok", "failed"]
BatchMode = Literal["bulk", "flush"]
Trigger = Literal["size", "flush", "timeout"]
Model = TypeVar("Model")

DEFAULT = "default"
"""The batcher and the batch key at first, as in Broadway."""

BULK: BatchMode = "bulk"
"""The batch mode at first."""

DELIVERIES = pa.schema(
    [
        pa.field("source", pa.string(), metadata={"doc": "name of the source; ids are its own"}),
        pa.field("message_id", pa.string(), metadata={"doc": "stable at the source, over redeliveries"}),
        pa.field("data", pa.binary(), metadata={"doc": "the payload, untouched"}),
        pa.field("metadata", pa.string(), metadata={"doc": "JSON object, or null"}),
        pa.field("ack_ref", pa.string(), metadata={"doc": "what acknowledgements are grouped by"}),
        pa.field("ack_id", pa.string(), metadata={"doc": "what the source acknowledges by"}),
        pa.field("attempt", pa.int32(), metadata={"doc": "1, and one more for each time it is retried"}),
        pa.field("redelivered", pa.bool_(), metadata={"doc": "may have been delivered before"}),
        pa.field("published_at", pa.timestamp("us", "UTC"), metadata={"doc": "when it came to the source, or null"}),
        pa.field("partition", pa.string(), metadata={"doc": "the part of the source that keeps an order, or null"}),
        pa.field("sequence", pa.int64(), metadata={"doc": "order within the partition, or null"}),
    ]
)
"""What `Source.read` yields: one row a delivery."""

MESSAGES = pa.schema(
    [
        *DELIVERIES,
        pa.field("received_at", pa.timestamp("us", "UTC")),
        pa.field("receive_id", pa.string()),
        pa.field("first_receive_id", pa.string(), metadata={"doc": "the receive of its delivery, if replayed since"}),
        pa.field("window", pa.string()),
    ]
)
"""The table `<pipeline>/messages`: every delivery as it was received, with the receive that leased it."""


def _text(value: Any) -> str | None:
    """Return value as a plain str, or None. A subclass of str could override comparison and hashing."""
    # isinstance would believe what the value says of its own class.
    return str.__str__(value) if issubclass(type(value), str) else None


ACK_POLICY = AckPolicy("a source")
"""Of messages that come from nowhere in particular."""


class Delivery:
    """The columns of the Arrow batch that messages came in, decoded when first asked for, and how to acknowledge it."""

    __slots__ = ("_decoded", "ack_policy", "batch")

    def __init__(self, batch: pa.RecordBatch, ack_policy: AckPolicy = ACK_POLICY) -> None:
        self.batch, self.ack_policy = batch, ack_policy
        self._decoded: dict[str, list[Any]] = {}

    def value(self, column: str, row: int) -> Any:
        """Look up one cell."""
        values = self._decoded.get(column)
        if values is None:
            values = self._decoded[column] = self.batch.column(column).to_pylist()
        return values[row]


class MessageState(NamedTuple):
    """What messages of a batch share, until a callback sets more of one than data, batcher and key; see `Message`."""

    delivery: Delivery
    batch_mode: BatchMode = BULK
    failure: Failure | None = None
    actions: tuple[str | None, str | None] | None = None
    child: int | None = None
    children: tuple[Message, ...] | None = None


_ROUTE = {"batcher": "put_batcher", "batch_key": "put_batch_key"}
"""Attributes that can be set past the method meant for them: to check each value as it is set would take longer."""


class Message:
    """One message on its way through a pipeline.

    Messages are values: every method returns a new one and leaves this one as it was. What the source delivered with
    a message (`message_id`, `metadata`, `attempt`, ...) is read only.

    Attributes:
        data: The payload: `bytes` as delivered, then what the callbacks put.
        batcher: The batcher it goes to, `default` at first.
        batch_key: Messages of different keys share no batch. Any text, `default` at first.
    """

    __slots__ = ("_row", "_state", "batch_key", "batcher", "data")

    def __init__(self, data: Any, row: int, state: MessageState) -> None:
        self.data = data
        self.batcher = DEFAULT
        self.batch_key = DEFAULT
        self._row = row
        self._state = state

    @classmethod
    def each(
        cls, batch: pa.RecordBatch, ack_policy: AckPolicy = ACK_POLICY, batch_mode: BatchMode = BULK
    ) -> Iterator[Message]:
        """The messages of an Arrow batch with the columns of `MESSAGES` (or at least `data`), in order."""
        state = MessageState(Delivery(batch, ack_policy), batch_mode)
        return map(cls, batch.column("data").to_pylist(), range(batch.num_rows), repeat(state))

    @property
    def batch_mode(self) -> BatchMode:
        """`bulk`, or `flush` to deliver its batch without waiting for more."""
        return self._state.batch_mode

    @property
    def failure(self) -> Failure | None:
        """Why it failed; None if it has not."""
        return self._state.failure

    @property
    def actions(self) -> tuple[str | None, str | None] | None:
        """How it is acknowledged `(on success, on failure)`, None for the source's own setting."""
        return self._state.actions

    @property
    def child(self) -> int | None:
        """Its number, from 0, among those that `handle_message` made of one message; None if it made no list."""
        return self._state.child

    @property
    def status(self) -> Status:
        """`ok` or `failed`."""
        return "ok" if self.failure is None else "failed"

    @property
    def reason(self) -> str | None:
        """Why it failed, in one line; None if it has not."""
        return None if self.failure is None else self.failure.reason

    @property
    def source(self) -> str:
        """Name of its source. With `message_id` and `child` it is a key for effects outside."""
        return str(self._state.delivery.value("source", self._row))

    @property
    def message_id(self) -> str:
        """Its id at the source, the same at every delivery."""
        return str(self._state.delivery.value("message_id", self._row))

    @property
    def metadata(self) -> dict[str, Any]:
        """What the source delivered beside the payload: attributes, headers, times."""
        text = self._state.delivery.value("metadata", self._row)
        return dict(json.loads(text)) if text else {}

    @property
    def attempt(self) -> int:
        """1 when first received, one more each time it is retried."""
        return int(self._state.delivery.value("attempt", self._row))

    @property
    def received_at(self) -> datetime:
        """When the run that leased it read it."""
        return cast(datetime, self._state.delivery.value("received_at", self._row))

    @property
    def window(self) -> str:
        """The partition key it belongs to."""
        return str(self._state.delivery.value("window", self._row))

    @overload
    def json(self) -> Any: ...

    @overload
    def json(self, model: type[Model]) -> Model: ...

    @overload
    def json(self, model: Any) -> Any: ...

    def json(self, model: Any = None) -> Any:
        """Decode the payload: plain Python, or an instance of a model, as strict as its `model_validate_json`.

        `A | B`, `list[A]` and any other type that pydantic's `TypeAdapter` takes do as well. A `Decimal` keeps all
        digits of its number, where pydantic alone would round it to a float.

        Without a model, whole numbers come back exactly. Of two members of one name the last one counts. NaN,
        infinities, numbers that no float holds, halves of surrogate pairs, a byte order mark and invalid UTF-8 are
        refused. A pydantic model decides on NaN and infinities itself; a `msgspec.Struct` is several times as fast.

        Raises:
            PayloadError: It is not JSON, or a `msgspec.Struct` refuses it. The error quotes nothing of it.
            ValidationError: A pydantic model refuses it.
            TypeError: `data` is no longer bytes, and no model is given; or neither pydantic nor msgspec takes the
                type.
        """
        return payload.decoded(self.data) if model is None else payload.decoder(model)(self.data)

    def _copy(self) -> Message:
        new = Message(self.data, self._row, self._state)
        new.batcher, new.batch_key = self.batcher, self.batch_key
        return new

    def _but(self, **changed: Any) -> Message:
        new = self._copy()
        new._state = self._state._replace(**changed)
        return new

    def is_same(self, other: object) -> bool:
        """Whether `other` is this message, or was made from it by its methods."""
        return other.__class__ is Message and other._row == self._row and other._state.delivery is self._state.delivery

    def _checked(self, stage: str) -> Message:
        """A copy that later steps can take, with the callback as the stage of its failure, if it has failed.

        Raises:
            TypeError: The callback set an attribute to something else than text.
        """
        new = self._copy()
        for name, method in _ROUTE.items():
            value = getattr(self, name)
            if (text := _text(value)) is None:
                raise TypeError(f"{name} was set to a value of type {type(value).__name__}; {method} takes text")
            setattr(new, name, text)
        return new if new.failure is None else new._but(failure=new.failure.at(stage))

    def _rejected(self, failure: Failure) -> Message:
        """A failed copy, without anything that a callback set and later steps cannot take."""
        new = Message(getattr(self, "data", None), self._row, self._state._replace(failure=failure))
        for name in _ROUTE:
            if (text := _text(getattr(self, name, None))) is not None:
                setattr(new, name, text)
        return new

    def _failed_as(self, child: Message) -> Message:
        """This message, failed as its child did, and acknowledged as that one says."""
        new = self._but(failure=child.failure, actions=child.actions or self.actions, children=None)
        new.batcher, new.batch_key = child.batcher, child.batch_key
        return new

    def put(self, data: Any, *, batcher: str | None = None, batch_key: str | None = None) -> Message:
        """Replace the data and choose the batcher and batch key. Without them these stay as they were.

        Raises:
            TypeError: The key is not text.
        """
        new = Message(data, self._row, self._state)
        new.batcher = self.batcher if batcher is None else batcher
        new.batch_key = self.batch_key if batch_key is None else _key(batch_key)
        return new

    def put_data(self, data: Any) -> Message:
        """Replace the data."""
        return self.put(data)

    def update_data(self, function: Callable[[Any], Any]) -> Message:
        """Replace the data by the result of `function`, called with it."""
        return self.put(function(self.data))

    def put_batcher(self, batcher: str) -> Message:
        """Send it to that batcher; the message fails if the pipeline has no batcher of this name."""
        new = self._copy()
        new.batcher = batcher
        return new

    def put_batch_key(self, batch_key: str) -> Message:
        """Put it into batches of this key only.

        Raises:
            TypeError: The key is not text.
        """
        return self.put(self.data, batch_key=_key(batch_key))

    def put_batch_mode(self, batch_mode: BatchMode) -> Message:
        """Set `bulk` or `flush`.

        Raises:
            ValueError: It is neither.
        """
        mode = _text(batch_mode)
        if mode not in ("bulk", "flush"):
            raise ValueError(f"a batch mode is 'bulk' or 'flush', not {batch_mode!r}")
        return self._but(batch_mode=mode)

    def failed(self, reason: object, *, retry: bool = True) -> Message:
        """Mark it failed, for a reason that people will read. With `retry=False` it is dead: only people retry it.

        A message that has failed already keeps the kind, the traceback and the stage of its failure.
        """
        if isinstance(reason, Failure):
            kind, text, trace, stage = map(words, reason[:4])
            return self._but(failure=Failure(kind, text, trace, stage, bool(reason.retry and retry)))
        text = reason_of(reason) if isinstance(reason, BaseException) else words(reason, 2_000)
        before = self.failure or Failure("failed", text)
        return self._but(failure=before._replace(reason=text, retry=bool(retry)))

    def rescued(self) -> Message:
        """Take back its failure, in `handle_failed`. It stays failed unless the option `rescue` lets it."""
        return self._but(failure=None)

    def configure_ack(self, *, on_success: str | None = None, on_failure: str | None = None) -> Message:
        """Set how this one message is acknowledged, in the words of its source. An action that is not given stays.

        Raises:
            ValueError: The source lacks the word.
        """
        success, failure = self.actions or (None, None)
        checked = self._state.delivery.ack_policy.checked
        success = success if on_success is None else checked(on_success)
        failure = failure if on_failure is None else checked(on_failure)
        return self._but(actions=(success, failure))

    def ack_immediately(self) -> Message:
        """Acknowledge this message now, and not again; see the function `ack_immediately`."""
        return acknowledge_at_once([self])[0]

    def __repr__(self) -> str:
        """Show where it stands, without its payload."""
        return f"Message({self.message_id!r}, batcher={self.batcher!r}, status={self.status!r})"


def acknowledge_at_once(messages: Iterable[Message]) -> list[Message]:
    """Acknowledge messages now; see `ack_immediately`."""
    given = list(messages)
    if wrong := next((one for one in given if not isinstance(one, Message)), None):
        raise TypeError(f"ack_immediately takes messages, not {type(wrong).__name__}")
    by_delivery: dict[int, list[Message]] = {}
    for message in given:
        by_delivery.setdefault(id(message._state.delivery), []).append(message)
    for some in by_delivery.values():
        ack_policy = some[0]._state.delivery.ack_policy
        if ack_policy.at_once is None:
            raise RuntimeError(
                f"{ack_policy.source} is acknowledged at the end of the run: write acks_immediately = True in the "
                "pipeline's class, and its callbacks may acknowledge messages before; a splitter may not"
            )
        ack_policy.at_once(some)
    return given


def _key(value: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a batch key is text, not {value!r}; convert it with str()")
    return value


class BatchInfo(NamedTuple):
    """What `handle_batch` knows of its batch.

    Attributes:
        batcher: Name of the batcher.
        batch_key: The key that all its messages share.
        partition: The partition that they share, as `partition_by` returned it or the source named it; None without.
        size: Number of messages that `handle_batch` gets.
        trigger: Why it is delivered: `size` (`batch_size` or `batch_bytes` is reached, or the splitter ends it),
            `flush` (a message asks for it, or no more come in a backfill, a replay or a drain) or `timeout` (no more
            come in a run that pulls).
        batch_id: The same at each try of the same batch of one receive. A retry and a replay make new batches: key
            effects outside by `source`, `message_id` and `child` of each message.
    """

    batcher: str
    batch_key: str
    partition: int | str | None
    size: int
    trigger: Trigger
    batch_id: str
