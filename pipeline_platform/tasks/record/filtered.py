"""`Producer(only=...)`: messages that a pipeline does not handle are skipped before its other callbacks.

The pipeline's own `acknowledge` does not get them, so their positions are written.
"""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from pipeline_platform.lake.reader import RowRange, row_groups
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.writer import FILTERED_TABLE
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.message import Message
from pipeline_platform.model.partition import PARTITION_BY
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.tasks.record.block import Block
from pipeline_platform.tasks.record.recording import Recording

ONLY = "only"
"""Stage of messages for which a predicate raises."""
_BEFORE = (ONLY, "receive_messages", PARTITION_BY, "repair")
"""Stages of failures that perhaps no predicate has let through: too large, held, or with an unknown outcome."""
FILTERED = "filtered by `only`"
"""Reason of messages for which a predicate returns False."""
_POSITIONS = pa.schema([("position", pa.int64())])


class Filter:
    """The predicates `only` of a pipeline's producers; false if there are none.

    A predicate applies to messages of its producer's source; that of the only producer, to all messages. A failed
    message that is retried passes, if a predicate let it through before.
    """

    def __init__(self, pipeline: type[Pipeline]) -> None:
        producers = BoundProducer.all_of(pipeline)
        self._by_source = {producer.source: only for producer in producers if (only := producer.options.only)}
        self._of_all = None if pipeline.producers else pipeline.producer.only

    def __bool__(self) -> bool:
        """Whether a producer has a predicate."""
        return bool(self._by_source)

    def __call__(self, message: Message, context: Any) -> Message:
        """Return a message, skipped if the predicate returns False.

        Raises:
            TypeError: The predicate returned something else than True or False.
        """
        delivery = message._state.delivery
        only = self._of_all or self._by_source.get(message.source)
        is_retry = delivery.ack_policy.closes_failures  # its `ack_ref` is the stage of the failure
        if only is None or (is_retry and delivery.value("ack_ref", message._row) not in _BEFORE):
            return message
        if type(is_wanted := only(message)) is not bool:
            raise TypeError(f"only: must return True or False, got {type(is_wanted).__name__}. Use bool(...).")
        return message if is_wanted else message.skip(FILTERED)


def write_filtered(recording: Recording, block: Block, skipped: Sequence[int]) -> None:
    """Write the positions of the filtered messages among skipped messages, if the pipeline has an `acknowledge`."""
    if recording.step.pipeline.acknowledge is not Pipeline.acknowledge:
        filtered = [index for index in skipped if block.messages[index].reason == FILTERED]
        recording.stage(FILTERED_TABLE, block.window, block.take(_POSITIONS.names, filtered))


def filtered_positions(lake: Lake, files: Sequence[RowRange]) -> pa.Array:
    """Return all positions in files of `FILTERED_TABLE`."""
    tables = [rows for file in files for rows in row_groups(lake, file.path, _POSITIONS)]
    return pa.concat_tables([_POSITIONS.empty_table(), *tables])["position"].combine_chunks()
