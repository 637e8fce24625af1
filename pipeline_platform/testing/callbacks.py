"""Calls of a pipeline's callbacks with the code of Spark tasks, without Spark, Dagster and files."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypedDict, Unpack

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import DECISIONS
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.message import BULK, MESSAGES, BatchMode, Message
from pipeline_platform.model.pipeline import BatchInfo, Pipeline
from pipeline_platform.model.strict_options import PipelineError
from pipeline_platform.model.windows import EARLIEST, window_key
from pipeline_platform.source.contract import Source
from pipeline_platform.tasks.handle.handle_messages import READ
from pipeline_platform.tasks.notify_author import ROWS, ended
from pipeline_platform.tasks.record.filtered import FILTERED
from pipeline_platform.tasks.record.step import Step
from pipeline_platform.testing.dummy import DummySource
from pipeline_platform.testing.in_memory import EarlyCalls, Kept

Metadata = Mapping[str, Any]
AcknowledgeCallback = Callable[[str, list[Message], list[Message]], object]
_NAME = "test"
"""The receive and the `ack_ref` of the messages."""


class Given(TypedDict, total=False):
    """Optional properties of the messages and the run.

    Attributes:
        context: Fields of the context to override, as in the config of a run.
        attempt: 1 for the first receive (the default), plus 1 for each retry.
        redelivered: Whether the messages may have been delivered before. Default: False.
        source: Source that determines the valid ack actions, `on_success` and `on_failure`. It is not connected. A
            `DummySource` by default.
        acknowledger: Function that is called once at the end, with `(ack_ref, successful, failed)`. `ack_immediately`
            calls it, too; its messages are not passed again at the end.
    """

    context: Mapping[str, Any] | None
    attempt: int
    redelivered: bool
    source: Source | None
    acknowledger: AcknowledgeCallback | None


@dataclass(frozen=True)
class Acknowledged:
    """Result of the callbacks.

    Attributes:
        successful: Handled messages in the order of their data, as the last callback returned them. A message for
            which `handle_message` returned a list is replaced by the messages of the list.
        failed: Failed messages in the order of their data, as `handle_failed` returned them.
        skipped: Skipped messages in the order of their data. `acknowledger` gets them after the successful messages.
        batches: Batches that `handle_batch` got, batcher by batcher.
        actions: The ack action of each message, in the order of the data.
        early: Messages that `ack_immediately` acknowledged, in this order, in their state at that time.
        notes: Values that a run would report: counts, reasons, and the exceptions of `handle_failed` as
            `handle_failed_errors`.
    """

    successful: list[Message] = field(default_factory=list)
    failed: list[Message] = field(default_factory=list)
    skipped: list[Message] = field(default_factory=list)
    batches: list[BatchInfo] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    early: list[Message] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)


def test_message(
    pipeline: type[Pipeline] | Pipeline,
    data: bytes | str,
    metadata: Metadata | None = None,  # noqa: PT028 - not pytest's
    **given: Unpack[Given],
) -> Acknowledged:
    """Call a pipeline's callbacks for one message in mode `flush`; otherwise like `test_batch`."""
    return _test(pipeline, [data], [metadata], "flush", **given)


def test_batch(
    pipeline: type[Pipeline] | Pipeline,
    data: Iterable[bytes | str],
    batch_mode: BatchMode = BULK,  # noqa: PT028
    metadata: Metadata | Iterable[Metadata | None] | None = None,  # noqa: PT028
    **given: Unpack[Given],
) -> Acknowledged:
    """Call a pipeline's callbacks for messages, as a run does for a receive.

    Args:
        pipeline: The class, or an instance, for example with fake clients.
        data: Payloads as a source delivers them. A str is encoded.
        batch_mode: `bulk` fills batches, and ends incomplete batches after the last message. `flush` makes a batch of
            each message.
        metadata: Metadata of all messages, or a list of a dict or None for each message.
        given: See `Given`.

    Raises:
        PipelineError: The context is not valid, or the pipeline uses the Spark lane.
        TypeError: An argument has the wrong type.
        ValueError: The number of metadata differs from the number of messages, the batch mode is not valid, or the
            attempt is below 1.
    """
    if isinstance(data, bytes | str | Mapping) or not isinstance(data, Iterable):
        raise TypeError(f"data: must be a list of payloads, got {type(data).__name__}. Use test_message for one.")
    if batch_mode not in ("bulk", "flush"):
        raise ValueError(f"batch_mode: must be 'bulk' or 'flush', got {batch_mode!r}.")
    payloads = list(data)
    each = [metadata] * len(payloads) if metadata is None or isinstance(metadata, Mapping) else list(metadata)
    if len(each) != len(payloads):
        raise ValueError(
            f"metadata: must have an entry per message, got {len(each)} for {len(payloads)} messages. "
            "Use None for a message without metadata."
        )
    return _test(pipeline, payloads, each, batch_mode, **given)


# Otherwise pytest would collect them in modules that import them.
test_message.__test__ = test_batch.__test__ = False  # type: ignore[attr-defined]


def _test(
    pipeline: type[Pipeline] | Pipeline,
    data: Sequence[bytes | str],
    metadata: Sequence[Metadata | None],
    batch_mode: BatchMode,
    *,
    context: Mapping[str, Any] | None = None,
    attempt: int = 1,
    redelivered: bool = False,
    source: Source | None = None,
    acknowledger: AcknowledgeCallback | None = None,
) -> Acknowledged:
    kind = _kind(pipeline)
    if source is not None and not isinstance(source, Source):
        raise TypeError(f"source: must be a Source, got {type(source).__name__}. Do not use its key or its resource.")
    if source is None:
        source = DummySource(name=BoundProducer.all_of(kind)[0].source)
    deliveries = _deliveries(source, data, metadata, attempt, redelivered=redelivered)
    # A lake in which no file can be opened: nothing is written.
    step = Step(kind, kind.context_of(context), source.ack_policy, Lake(root=os.devnull), _NAME)
    if not data:
        return Acknowledged()
    window = window_key(kind.first_window or EARLIEST)
    acknowledge = acknowledger or (lambda *_: None)
    early_acks = EarlyCalls(step.ack_policy, acknowledge) if kind.acks_immediately else None
    instance = pipeline if isinstance(pipeline, Pipeline) else kind()
    kept = Kept(step, instance, early_acks)
    batches = kept.handle(_received(deliveries, window), window, batch_mode)
    ended = [kept.ended[position] for position in sorted(kept.ended)]
    successful = kept.successful
    failed, skipped = ([message for message in ended if message.status == status] for status in ("failed", "skipped"))
    early, known = (early_acks.messages, early_acks.actions) if early_acks else ([], {})
    by_id = {row["message_id"]: row["action"] for row in kept.written("outcomes").to_pylist()} | known
    late = [
        [message for message in some if message.message_id not in known] for some in ([*successful, *skipped], failed)
    ]
    _notify_author(step, instance, _received(deliveries, window), kept)
    if not early or any(late):
        acknowledge(_NAME, *late)
    actions = [by_id[message_id] for message_id in deliveries.column("message_id").to_pylist()]
    report = kept.report.bounded()
    notes: dict[str, Any] = {name: count for name, count in report.counts().items() if count}
    notes |= {"reasons": dict(report.reasons)} | ({"skip_reasons": dict(report.skip_reasons)} if skipped else {})
    return Acknowledged(successful, failed, skipped, batches, actions, early, notes)


def _notify_author(step: Step, instance: Pipeline, rows: pa.RecordBatch, kept: Kept) -> None:
    """Call the pipeline's callback `acknowledge`, as a run does before it acknowledges."""
    outcomes = kept.written("outcomes")
    ids = outcomes["message_id"].filter(pc.is_in(outcomes["outcome"], pa.array(DECISIONS)))
    decided = rows.filter(pc.is_in(rows["message_id"], ids.combine_chunks()))
    heard = [kept.ended[position].reason != FILTERED for position in decided["position"].to_pylist()]
    decided = decided.filter(pa.array(heard, pa.bool_()))
    for first in range(0, decided.num_rows, ROWS):
        some = decided.slice(first, ROWS)
        ends = (kept.ended[position] for position in some["position"].to_pylist())
        failures = {
            place: {**message.failure._asdict(), "batcher": message.batcher, "batch_key": message.batch_key}
            for place, message in enumerate(ends)
            if message.failure is not None
        }
        instance.acknowledge(_NAME, *ended(list(Message.each(some, step.ack_policy)), failures), step.context)


def _kind(pipeline: object) -> type[Pipeline]:
    kind = pipeline if isinstance(pipeline, type) else type(pipeline)
    if not issubclass(kind, Pipeline) or not hasattr(kind, "name"):
        raise TypeError(f"pipeline: must be a subclass of Pipeline or its instance, got {kind.__qualname__}.")
    if kind.uses_columns():
        raise PipelineError(
            f"{kind.__qualname__}.handle_messages: needs Spark, which this function does not start. Call it with a "
            "DataFrame of your own Spark session."
        )
    return kind


def _deliveries(
    source: Source, data: Sequence[bytes | str], metadata: Sequence[Metadata | None], attempt: int, *, redelivered: bool
) -> pa.RecordBatch:
    """Return the messages as a source delivers them."""
    if type(attempt) is not int or not 1 <= attempt < 2**31:
        raise ValueError(f"attempt: must be 1 for the first receive, plus 1 for each retry, got {attempt!r}.")
    for entry in metadata:
        if entry is not None and not isinstance(entry, Mapping):
            raise TypeError(
                f"metadata: must be a dict, or a list of a dict or None for each message, got {type(entry).__name__}."
            )
    ids = [str(number) for number in range(len(data))]
    return source.deliveries(
        message_id=ids,
        data=[_payload(payload) for payload in data],
        ack_id=ids,
        ack_ref=_NAME,
        metadata=metadata,
        attempt=[attempt] * len(data),
        redelivered=redelivered,
    )


def _payload(data: object) -> bytes:
    if isinstance(data, str):
        return data.encode()
    if not isinstance(data, bytes):
        raise TypeError(
            f"data: must be bytes or a str, which is encoded, got {type(data).__name__}. "
            "Use json.dumps(...) for a dict or a list."
        )
    return data


def _received(deliveries: pa.RecordBatch, window: str) -> pa.RecordBatch:
    """Return the columns that handling reads, for messages received now."""
    stamps = {"received_at": datetime.now(UTC), "receive_id": _NAME, "window": window}
    columns = {name: deliveries.column(name) for name in deliveries.schema.names}
    columns |= {
        name: pa.repeat(pa.scalar(value, MESSAGES.field(name).type), deliveries.num_rows)
        for name, value in stamps.items()
    }
    columns["position"] = pa.array(range(deliveries.num_rows), pa.int64())
    return pa.RecordBatch.from_pydict({name: columns[name] for name in READ.names})
