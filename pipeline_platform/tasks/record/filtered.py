"""Positions of messages that `only` filtered: the pipeline's own `acknowledge` does not get them."""

from collections.abc import Sequence

import pyarrow as pa

from pipeline_platform.lake.reader import RowRange, row_groups
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.filter import FILTERED
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.tasks.record.block import Block
from pipeline_platform.tasks.record.recording import Recording

_POSITIONS = pa.schema([("position", pa.int64())])


def filtered_table(receive_id: str) -> str:
    """Return the table of the positions. No batcher can have this name."""
    return f"_receives/{receive_id}/_filtered"


def write_filtered(recording: Recording, block: Block, skipped: Sequence[int]) -> None:
    """Write the positions of the filtered messages among skipped messages, if the pipeline has an `acknowledge`."""
    if recording.step.pipeline.acknowledge is not Pipeline.acknowledge:
        filtered = [index for index in skipped if block.messages[index].reason == FILTERED]
        table = filtered_table(recording.step.receive_id)
        recording.write(table, block.window, block.take(_POSITIONS.names, filtered))


def filtered_positions(lake: Lake, files: Sequence[RowRange]) -> pa.Array:
    """Return all positions in files of `filtered_table`."""
    tables = [rows for file in files for rows in row_groups(lake, file.path, _POSITIONS)]
    return pa.concat_tables([_POSITIONS.empty_table(), *tables])["position"].combine_chunks()
