"""Conversion of messages to the columns of their batchers. A message that does not fit fails alone."""

import json
from base64 import b64encode
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
from pydantic_core import to_json

from pipeline_platform.model.columns.crossing import encode
from pipeline_platform.model.columns.fields import MODELS
from pipeline_platform.model.failure import Failure
from pipeline_platform.model.message import Message
from pipeline_platform.model.options import Batcher
from pipeline_platform.model.partition import PARTITION_BY, SOURCE, partition_of
from pipeline_platform.tasks.callback_process.progress import Watch
from pipeline_platform.tasks.record.block import Block
from pipeline_platform.tasks.record.recording import Recording
from pipeline_platform.tasks.record.staging import handled_columns


def must_wait(recording: Recording, name: str, batch_id: str | None = None) -> bool:
    """Return whether messages of a batcher have to wait for their batch."""
    return batch_id is None and isinstance(recording.step.pipeline.batchers[name], Batcher)


def build_columns(
    recording: Recording, name: str, block: Block, indexes: list[int], batch_id: str | None = None
) -> tuple[list[pa.Array], list[int]]:
    """Build the columns of the messages that fit, and return their indexes."""
    if must_wait(recording, name, batch_id):
        return _staged_columns(recording, name, block, indexes)
    row_type = recording.row_types.get(name)

    def build(some: list[int]) -> list[pa.Array]:
        data = [block.messages[index].data for index in some]
        columns = row_type.columns(data) if row_type else [pa.array(map(_json, data), pa.string())]
        columns = [*columns, pa.array([block.messages[index].batch_key for index in some], pa.string())]
        ids = block.take(["message_id"], some)
        names = [*(row_type.casts if row_type else ["data"]), "batch_key", *ids.schema.names]
        recording.step.check_sink(name, names, [*columns, *ids.columns])
        return columns

    return _fitting(recording.watch, build, block, indexes)


def _staged_columns(
    recording: Recording, name: str, block: Block, indexes: list[int]
) -> tuple[list[pa.Array], list[int]]:
    """Build `handled_columns` and the column of partitions."""
    pipeline, partitions = recording.step.pipeline, None
    model, partition_by = pipeline.batchers[name].table_schema, pipeline.partitioning(name)
    if partition_by is not None and partition_by != SOURCE:
        indexes, partitions = _partitioned(recording.watch, partition_by, block, indexes)

    def build(some: list[int]) -> list[pa.Array]:
        return handled_columns([block.messages[index] for index in some], model)

    columns, fitting = _fitting(recording.watch, build, block, indexes)
    if partitions is not None:
        own = partitions.take(pa.array(fitting, pa.int64()))
    else:
        own = block.take(["partition"], fitting).column(0) if partition_by else pa.nulls(len(fitting), pa.string())
    return [*columns, own], fitting


def _partitioned(watch: Watch, function: Any, block: Block, indexes: list[int]) -> tuple[list[int], pa.Array]:
    """Return the indexes of the messages that have a partition, and the partitions by index."""
    messages, found = partitioned(function, [block.messages[index] for index in indexes], watch)
    by_index: list[str | None] = [None] * len(block.messages)
    kept = []
    for index, message, partition in zip(indexes, messages, found, strict=True):
        by_index[index] = partition
        if message.failure is None:
            kept.append(index)
        else:
            block.fail(index, message.failure)
    return kept, pa.array(by_index, pa.string())


def _fitting(
    watch: Watch, build: Callable[[list[int]], list[pa.Array]], block: Block, indexes: list[int]
) -> tuple[list[pa.Array], list[int]]:
    """Build the columns of the messages that fit. Messages are built singly only if the whole block fails.

    Building runs user code of models, which may raise any exception.
    """
    messages = [block.messages[index] for index in indexes]
    if not watch.exact:
        busy = messages if block.at is None else [*{message._row: message for message in messages}.values()]
        with watch.busy("lake", busy), suppress(BaseException):
            return build(indexes), indexes
    fitting, built = [], []
    for index, message in zip(indexes, messages, strict=True):
        with watch.busy("lake", [message]):
            try:
                built.append(build([index]))
            except BaseException as error:
                block.fail(index, Failure.of(error, "lake"))
            else:
                fitting.append(index)
    return [pa.concat_arrays(column) for column in zip(*built, strict=True)], fitting


def partitioned(
    function: Callable[[Message], object], messages: Sequence[Message], watch: Watch
) -> tuple[list[Message], list[str | None]]:
    """Return messages and their partitions. A message fails if `function` raises or returns an invalid partition."""
    given, found = list[Message](), list[str | None]()
    for message in messages:
        partition = None
        if message.status == "ok":
            with watch.busy(PARTITION_BY, [message]):
                try:
                    partition = partition_of(function, message)
                except BaseException as error:
                    message = message._rejected(Failure.of(error, PARTITION_BY))  # noqa: PLW2901
        given.append(message)
        found.append(partition)
    return given, found


def _json(data: Any) -> str:
    """Return data as JSON. NaN and infinity become null, as in pydantic."""
    if isinstance(data, bytes):
        try:
            return json.dumps(data.decode())
        except UnicodeDecodeError:  # the batch is handled already: binary data must not fail it now
            return json.dumps({"base64": b64encode(data).decode()})
    if isinstance(data, MODELS):
        return encode(data)[0].decode()
    return to_json(data, inf_nan_mode="null").decode()
