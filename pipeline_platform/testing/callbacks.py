"""Try a pipeline's callbacks on some messages, by the functions that tasks run: no Spark, no Dagster, no files."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypedDict, Unpack

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.message import BULK, MESSAGES, BatchInfo, BatchMode, Message
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.strict_options import PipelineError
from pipeline_platform.model.windows import EARLIEST, window_key
from pipeline_platform.source.contract import Source
from pipeline_platform.tasks.acknowledge.notify_author import ENDED, ROWS, ended
from pipeline_platform.tasks.handle.handle_messages import READ
from pipeline_platform.tasks.host.step import Step
from pipeline_platform.testing.dummy import DummySource
from pipeline_platform.testing.in_memory import EarlyCalls, Kept

Metadata = Mapping[str, Any]
Acknowledger = Callable[[str, list[Message], list[Message]], object]
_NAME = "test"
"""The receive and the `ack_ref` of the messages."""


class Given(TypedDict, total=False):
    """What messages are handled with; all of it may be left out.

    Attributes:
        context: Fields of the pipeline's context that differ from its own, as in a run's config.
        attempt: 1 when first received (the default), one more each time a message is retried.
        redelivered: Whether the messages may have been delivered before; by default they were not.
        source: Whose words `configure_ack` takes, and whose `on_success` and `on_failure` hold. Nothing connects to
            it. A `DummySource` by default.
        acknowledger: Called once with `(ack_ref, successful, failed)`, when all is done. `ack_immediately` calls it
            too, with its messages, which are left out in the end.
    """

    context: Mapping[str, Any] | None
    attempt: int
    redelivered: bool
    source: Source | None
    acknowledger: Acknowledger | None


@dataclass(frozen=True)
class Acknowledged:
    """What would be acknowledged.

    Attributes:
        successful: Messages that are handled, in the order of their data, as the last callback left them; in the place
            of one of which `handle_message` made a list, those of the list.
        failed: Messages that failed, in the order of their data, as `handle_failed` left them.
        batches: The batches that were made for `handle_batch`, batcher by batcher.
        actions: The word for each message, in the order of the data.
        early: The messages that `ack_immediately` acknowledged, in that order, as they were then.
        notes: What a run would report: counts, reasons, and as `handle_failed_errors` how often that one raised.
    """

    successful: list[Message] = field(default_factory=list)
    failed: list[Message] = field(default_factory=list)
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
    """Give one message to a pipeline's callbacks, and deliver its batch at once; otherwise as `test_batch`."""
    return _test(pipeline, [data], [metadata], "flush", **given)


def test_batch(
    pipeline: type[Pipeline] | Pipeline,
    data: Iterable[bytes | str],
    batch_mode: BatchMode = BULK,  # noqa: PT028
    metadata: Metadata | Iterable[Metadata | None] | None = None,  # noqa: PT028
    **given: Unpack[Given],
) -> Acknowledged:
    """Give messages to a pipeline's callbacks, as a run does with those of one receive.

    Args:
        pipeline: The class; or an instance, which a test may have given clients of its own.
        data: The payloads, as a source delivers them. Text is encoded.
        batch_mode: `bulk` fills batches, and delivers what is left in the end. `flush` delivers each message at once,
            in a batch of its own.
        metadata: For all messages; or one or None for each.
        given: See `Given`.

    Raises:
        PipelineError: The context does not fit, or `handle_messages` takes Spark's columns.
        TypeError: An argument is of another type.
        ValueError: Metadata are fewer or more than messages, the batch mode is unknown, or the attempt is below 1.
    """
    if isinstance(data, bytes | str | Mapping) or not isinstance(data, Iterable):
        raise TypeError(f"data is {type(data).__name__}: test_batch takes a list of payloads, test_message takes one")
    if batch_mode not in ("bulk", "flush"):
        raise ValueError(f"batch_mode is {batch_mode!r}: it is 'bulk' or 'flush'")
    payloads = list(data)
    each = [metadata] * len(payloads) if metadata is None or isinstance(metadata, Mapping) else list(metadata)
    if len(each) != len(payloads):
        raise ValueError(f"metadata has {len(each)} entries for {len(payloads)} messages: give one or None for each")
    return _test(pipeline, payloads, each, batch_mode, **given)


# Or pytest would collect them where they are imported.
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
    acknowledger: Acknowledger | None = None,
) -> Acknowledged:
    kind = _kind(pipeline)
    if source is not None and not isinstance(source, Source):
        raise TypeError(f"source is {type(source).__name__}: give a source itself, no name or resource of one")
    if source is None:
        source = DummySource(name=next(iter(kind.producers_of().values())).source)
    deliveries = _deliveries(source, data, metadata, attempt, redelivered=redelivered)
    # Nothing can be opened in this lake, and nothing is.
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
    failed = [message for message in ended if message.status == "failed"]
    early, known = (early_acks.messages, early_acks.actions) if early_acks else ([], {})
    by_id = {row["message_id"]: row["action"] for row in kept.written("outcomes").to_pylist()} | known
    late = [[message for message in some if message.message_id not in known] for some in (successful, failed)]
    _notify_author(step, instance, _received(deliveries, window), kept)
    if not early or any(late):
        acknowledge(_NAME, *late)
    actions = [by_id[one] for one in deliveries.column("message_id").to_pylist()]
    return Acknowledged(successful, failed, batches, actions, early, kept.tally.notes())


def _notify_author(step: Step, instance: Pipeline, rows: pa.RecordBatch, kept: Kept) -> None:
    """Call the pipeline's own `acknowledge`, as a run does before it acknowledges."""
    outcomes = kept.written("outcomes")
    ids = outcomes["message_id"].filter(pc.is_in(outcomes["outcome"], pa.array(ENDED)))
    decided = rows.filter(pc.is_in(rows["message_id"], ids.combine_chunks()))
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
        raise TypeError(f"{kind.__qualname__} is no pipeline: give a class that is built on Pipeline, or its instance")
    if kind.uses_columns():
        raise PipelineError(
            f"{kind.__qualname__}.handle_messages needs Spark, which is not started here: call it with a DataFrame of "
            "your own Spark session"
        )
    return kind


def _deliveries(
    source: Source, data: Sequence[bytes | str], metadata: Sequence[Metadata | None], attempt: int, *, redelivered: bool
) -> pa.RecordBatch:
    """The messages as a source delivers them."""
    if type(attempt) is not int or not 1 <= attempt < 2**31:
        raise ValueError(f"attempt is {attempt!r}: it is 1 when first received, and one more each time")
    for one in metadata:
        if one is not None and not isinstance(one, Mapping):
            raise TypeError(f"metadata is {type(one).__name__}: give a dict, or a list of one or None for each message")
    ids = [str(number) for number in range(len(data))]
    return source.deliveries(
        message_id=ids,
        data=[_payload(one) for one in data],
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
            f"data is {type(data).__name__}: a source delivers bytes (or text, which is encoded); "
            "json.dumps(...) makes text of a dict or a list"
        )
    return data


def _received(deliveries: pa.RecordBatch, window: str) -> pa.RecordBatch:
    """What handling reads of messages that were received just now."""
    stamps = {"received_at": datetime.now(UTC), "receive_id": _NAME, "window": window}
    columns = {name: deliveries.column(name) for name in deliveries.schema.names}
    columns |= {
        name: pa.repeat(pa.scalar(value, MESSAGES.field(name).type), deliveries.num_rows)
        for name, value in stamps.items()
    }
    columns["position"] = pa.array(range(deliveries.num_rows), pa.int64())
    return pa.RecordBatch.from_pydict({name: columns[name] for name in READ.names})
