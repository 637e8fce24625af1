"""Message: a delivery of a source, and its state in the pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from itertools import repeat
from typing import Any, Literal, NamedTuple, TypeVar, cast, overload

import pyarrow as pa

from pipeline_platform.model.actions import AckPolicy
from pipeline_platform.model.failure import HELD, Failure, reason_of, words
from pipeline_platform.model.formats import payload
from pipeline_platform.model.formats.message_formats import MessageFormats

Status = Literal["ok", "skipped", "failed"]
BatchMode = Literal["bulk", "flush"]
Model = TypeVar("Model")

DEFAULT = "default"
"""Default batcher and batch key, as in Broadway."""

BULK: BatchMode = "bulk"
"""Default batch mode."""

DELIVERIES = pa.schema(
    [
        pa.field("source", pa.string(), metadata={"doc": "name of the source; ids are unique per source"}),
        pa.field("message_id", pa.string(), metadata={"doc": "the same for every redelivery"}),
        pa.field("data", pa.binary(), metadata={"doc": "payload, as delivered"}),
        pa.field("metadata", pa.string(), metadata={"doc": "JSON object, or null"}),
        pa.field("ack_ref", pa.string(), metadata={"doc": "group for acknowledgements"}),
        pa.field("ack_id", pa.string(), metadata={"doc": "id for the acknowledgement at the source"}),
        pa.field("attempt", pa.int32(), metadata={"doc": "1, plus 1 for each retry"}),
        pa.field("redelivered", pa.bool_(), metadata={"doc": "may have been delivered before"}),
        pa.field("published_at", pa.timestamp("us", "UTC"), metadata={"doc": "time of arrival at the source, or null"}),
        pa.field("partition", pa.string(), metadata={"doc": "ordered part of the source, or null"}),
        pa.field("sequence", pa.int64(), metadata={"doc": "order within the partition, or null"}),
    ]
)
"""Columns that `Source.read` yields: one row per delivery."""

MESSAGE_KEY = ("source", "message_id")
"""Columns that identify a message."""
ATTEMPT_KEY = (*MESSAGE_KEY, "attempt")
"""Columns that identify an attempt to handle a message."""
DELIVERY_KEY = (*ATTEMPT_KEY, "ack_ref", "ack_id")
"""Columns that identify a delivery. No delivery lacks one of them."""
SYSTEM_COLUMNS = (*ATTEMPT_KEY, "batch_key", "batch_id", "receive_id", "window", "child")
"""Columns that the platform adds to the table of a batcher, whose names a field cannot have."""
PAYLOAD = ("data", "metadata", "partition", "sequence")
"""Content of a delivery, and its order."""

MESSAGES = pa.schema(
    [
        *DELIVERIES,
        pa.field("received_at", pa.timestamp("us", "UTC")),
        pa.field("receive_id", pa.string()),
        pa.field("first_receive_id", pa.string(), metadata={"doc": "receive of its delivery, if it was replayed"}),
        pa.field("window", pa.string()),
    ]
)
"""Columns of the table `<pipeline>/messages`: every delivery as received, with the receive that leased it."""


def _text(value: Any) -> str | None:
    """Return value as a plain str, or None. A subclass of str could override comparison and hashing."""
    # A value could lie to isinstance about its class.
    return str.__str__(value) if issubclass(type(value), str) else None


ACK_POLICY = AckPolicy("a source")
"""Ack policy of messages without a source."""


class Delivery:
    """The Arrow batch of messages, with columns decoded on first access, and the ack policy of its source."""

    __slots__ = ("_decoded", "ack_policy", "batch")

    def __init__(self, batch: pa.RecordBatch, ack_policy: AckPolicy = ACK_POLICY) -> None:
        self.batch, self.ack_policy = batch, ack_policy
        self._decoded: dict[str, list[Any]] = {}

    def value(self, column: str, row: int) -> Any:
        """Return the value of a cell."""
        values = self._decoded.get(column)
        if values is None:
            values = self._decoded[column] = self.batch.column(column).to_pylist()
        return values[row]


class MessageState(NamedTuple):
    """State that messages of a batch share until a callback changes it for a message; see `Message`.

    `fetched` is the bytes of a payload that a callback fetched: the bytes of the delivery do not bound them.
    """

    delivery: Delivery
    batch_mode: BatchMode = BULK
    failure: Failure | None = None
    actions: tuple[str | None, str | None] | None = None
    child: int | None = None
    children: tuple[Message, ...] | None = None
    skip_reason: str | None = None
    fetched: int = 0


def _text_of(reason: object) -> str:
    return reason_of(reason) if isinstance(reason, BaseException) else words(reason, 2_000)


_ROUTE = {"batcher": "put_batcher", "batch_key": "put_batch_key"}
"""Attributes that user code can set without their methods, checked after the callback: it costs less."""


class Message(MessageFormats):
    """A message in a pipeline.

    Messages are immutable: every method returns a new message. Properties that the source delivered (`message_id`,
    `metadata`, `attempt`, ...) are read-only.

    Attributes:
        data: The payload: `bytes` as delivered, then the data that callbacks put.
        batcher: Name of its batcher, by default `default`.
        batch_key: Key of its batch: a batch contains messages of one key. Any text, by default `default`.
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
        """Yield the messages of an Arrow batch with the columns of `MESSAGES` (or at least `data`), in order."""
        state = MessageState(Delivery(batch, ack_policy), batch_mode)
        return map(cls, batch.column("data").to_pylist(), range(batch.num_rows), repeat(state))

    @property
    def batch_mode(self) -> BatchMode:
        """`bulk`, or `flush` to end its batch with this message."""
        return self._state.batch_mode

    @property
    def failure(self) -> Failure | None:
        """Its failure; None if it has not failed."""
        return self._state.failure

    @property
    def actions(self) -> tuple[str | None, str | None] | None:
        """Its ack actions `(on success, on failure)`; None for the defaults of the source."""
        return self._state.actions

    @property
    def child(self) -> int | None:
        """Its index in the list that `handle_message` returned for a message; None if it returned no list."""
        return self._state.child

    @property
    def status(self) -> Status:
        """`ok`, `skipped` or `failed`."""
        if self.failure is not None:
            return "failed"
        return "ok" if self._state.skip_reason is None else "skipped"

    @property
    def reason(self) -> str | None:
        """The reason for which it failed or is skipped, on one line; None if its status is `ok`."""
        return self._state.skip_reason if self.failure is None else self.failure.reason

    @property
    def _is_held(self) -> bool:
        """Whether its partition waits for an earlier failure."""
        return self.failure is not None and self.failure.kind == HELD

    @property
    def source(self) -> str:
        """Name of its source. `source`, `message_id` and `child` identify a message in other systems."""
        return str(self._state.delivery.value("source", self._row))

    @property
    def message_id(self) -> str:
        """Its id at the source, the same for every delivery."""
        return str(self._state.delivery.value("message_id", self._row))

    @property
    def metadata(self) -> dict[str, Any]:
        """Attributes, headers and times that the source delivered with the payload."""
        text = self._state.delivery.value("metadata", self._row)
        return dict(json.loads(text)) if text else {}

    @property
    def attempt(self) -> int:
        """1 for the first receive, plus 1 for each retry."""
        return int(self._state.delivery.value("attempt", self._row))

    @property
    def received_at(self) -> datetime:
        """Time at which its run read it."""
        return cast(datetime, self._state.delivery.value("received_at", self._row))

    @property
    def window(self) -> str:
        """Key of its window, the partition of the assets."""
        return str(self._state.delivery.value("window", self._row))

    @overload
    def json(self) -> Any: ...

    @overload
    def json(self, model: type[Model]) -> Model: ...

    @overload
    def json(self, model: Any) -> Any: ...

    def json(self, model: Any = None) -> Any:
        """Decode the payload: plain Python, or an instance of a model, by the rules of its `model_validate_json`.

        The model can also be `A | B`, `list[A]` or another type that pydantic's `TypeAdapter` accepts. A `Decimal`
        keeps all digits of its number; pydantic alone would round it to a float.

        Without a model, integers are exact, and the last of two members with the same name is used. NaN, infinities,
        numbers outside the range of a float, lone surrogates, a byte order mark and invalid UTF-8 are errors. A
        pydantic model decides on NaN and infinities itself; a `msgspec.Struct` is several times faster.

        Raises:
            PayloadError: The payload is not valid JSON, or does not fit a `msgspec.Struct`. It quotes no payload.
            ValidationError: The payload does not fit a pydantic model.
            TypeError: A callback has replaced `data`, which must be bytes, and no model is given; or neither pydantic
                nor msgspec accepts the type.
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
        """Whether `other` is this message or was derived from it."""
        return other.__class__ is Message and other._row == self._row and other._state.delivery is self._state.delivery

    def _checked(self, stage: str) -> Message:
        """Return a copy for later steps; the callback becomes the stage of a failure.

        Raises:
            TypeError: The callback set `batcher` or `batch_key` to something else than a str.
        """
        new = self._copy()
        for name, method in _ROUTE.items():
            value = getattr(self, name)
            if (text := _text(value)) is None:
                raise TypeError(f"{name} must be a str, got {type(value).__name__}. Use {method}(...).")
            setattr(new, name, text)
        return new if new.failure is None else new._but(failure=new.failure.at(stage))

    def _rejected(self, failure: Failure) -> Message:
        """Return a failed copy without invalid values that a callback set."""
        new = Message(getattr(self, "data", None), self._row, self._state._replace(failure=failure))
        for name in _ROUTE:
            if (text := _text(getattr(self, name, None))) is not None:
                setattr(new, name, text)
        return new

    def _failed_as(self, child: Message) -> Message:
        """Return a copy with the failure and the ack actions of its child."""
        new = self._but(failure=child.failure, actions=child.actions or self.actions, children=None)
        new.batcher, new.batch_key = child.batcher, child.batch_key
        return new

    def put(self, data: Any, *, batcher: str | None = None, batch_key: str | None = None) -> Message:
        """Replace the data and, if given, the batcher and the batch key.

        Raises:
            TypeError: The key is not a str.
        """
        new = Message(data, self._row, self._state)
        new.batcher = self.batcher if batcher is None else batcher
        new.batch_key = self.batch_key if batch_key is None else _key(batch_key)
        return new

    def put_data(self, data: Any) -> Message:
        """Replace the data."""
        return self.put(data)

    def update_data(self, function: Callable[[Any], Any]) -> Message:
        """Replace the data by `function(data)`."""
        return self.put(function(self.data))

    def put_batcher(self, batcher: str) -> Message:
        """Set the batcher; the message fails if the pipeline has no batcher of this name."""
        new = self._copy()
        new.batcher = batcher
        return new

    def put_batch_key(self, batch_key: str) -> Message:
        """Set the batch key.

        Raises:
            TypeError: The key is not a str.
        """
        return self.put(self.data, batch_key=_key(batch_key))

    def put_batch_mode(self, batch_mode: BatchMode) -> Message:
        """Set the batch mode, `bulk` or `flush`.

        Raises:
            ValueError: The mode is not valid.
        """
        mode = _text(batch_mode)
        if mode not in ("bulk", "flush"):
            raise ValueError(f"batch_mode must be 'bulk' or 'flush', got {batch_mode!r}")
        return self._but(batch_mode=mode)

    def failed(self, reason: object, *, retry: bool = True) -> Message:
        """Mark the message as failed. With `retry=False` it is dead: it is retried only on request.

        A message that has already failed keeps the kind, the traceback and the stage of its failure.
        """
        if isinstance(reason, Failure):
            kind, text, trace, stage = map(words, reason[:4])
            return self._but(failure=Failure(kind, text, trace, stage, bool(reason.retry and retry), reason.error))
        text, error = _text_of(reason), reason if isinstance(reason, BaseException) else None
        before = self.failure or Failure("failed", text, error=error)
        return self._but(failure=before._replace(reason=text, retry=bool(retry)))

    def skip(self, reason: object) -> Message:
        """Skip the message: it is acknowledged as successful and counted as `skipped`, and no table gets a row.

        Callbacks before batching are not called for it any more. A child that is skipped has no row, and does not
        change the outcome of its message. In `handle_failed` this requires the option `rescue`, like `rescued()`.
        """
        return self._but(failure=None, children=None, skip_reason=_text_of(reason))

    def rescued(self) -> Message:
        """Remove its failure, in `handle_failed`. Requires the option `rescue`; otherwise it stays failed."""
        return self._but(failure=None)

    def configure_ack(self, *, on_success: str | None = None, on_failure: str | None = None) -> Message:
        """Set the ack actions of this message. An action that is None is not changed.

        Raises:
            ValueError: The action is not valid for its source.
        """
        success, failure = self.actions or (None, None)
        checked = self._state.delivery.ack_policy.checked
        success = success if on_success is None else checked(on_success)
        failure = failure if on_failure is None else checked(on_failure)
        return self._but(actions=(success, failure))

    def ack_immediately(self) -> Message:
        """Acknowledge this message now; see the function `ack_immediately`."""
        return acknowledge_at_once([self])[0]

    def __repr__(self) -> str:
        """Return its id, batcher and status, without its payload."""
        return f"Message({self.message_id!r}, batcher={self.batcher!r}, status={self.status!r})"


def acknowledge_at_once(messages: Iterable[Message]) -> list[Message]:
    """Acknowledge messages now; see `ack_immediately`."""
    given = list(messages)
    for message in given:
        if not isinstance(message, Message):
            raise TypeError(f"ack_immediately requires messages, got {type(message).__name__}")
    by_delivery: dict[int, list[Message]] = {}
    for message in given:
        by_delivery.setdefault(id(message._state.delivery), []).append(message)
    for some in by_delivery.values():
        ack_policy = some[0]._state.delivery.ack_policy
        if ack_policy.at_once is None:
            raise RuntimeError(
                "ack_immediately requires acks_immediately = True in the pipeline's class, and a callback that is not "
                f"a splitter. Otherwise messages of {ack_policy.source} are acknowledged at the end of the run."
            )
        ack_policy.at_once(some)
    return given


def _key(value: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"batch_key must be a str, got {value!r}. Convert it with str().")
    return value
