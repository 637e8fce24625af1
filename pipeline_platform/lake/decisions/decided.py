"""Look-up of decided messages in outcomes."""

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.reader import Bounds, RowRange, keys_of, only, read_ranges
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import DECISIONS, OUTCOMES
from pipeline_platform.model.message import MESSAGE_KEY

_ROWS = 65_536
_COLUMNS = only(OUTCOMES, *MESSAGE_KEY, "outcome")


def are_decided(lake: Lake, messages: pa.Table, outcomes: Iterable[RowRange]) -> pa.Array:
    """Return whether each message is decided in some outcomes. Memory is bounded by the messages."""
    ids, decisions = messages["message_id"].combine_chunks(), [pa.array([], pa.string())]
    # Ids of logs and files are in order: few row groups of the outcomes are near, however many outcomes there are.
    near = Bounds("message_id", *pc.min_max(ids).as_py().values()) if len(ids) else None
    for _, rows in read_ranges(lake, outcomes if near else (), _COLUMNS, _ROWS, near=near):
        same = rows.filter(pc.is_in(rows["message_id"], value_set=ids))
        decided = same.filter(pc.is_in(same["outcome"], value_set=pa.array(DECISIONS)))
        decisions.append(pc.unique(keys_of(decided, *MESSAGE_KEY)))
    return pc.is_in(keys_of(messages, *MESSAGE_KEY), value_set=pa.concat_arrays(decisions))
