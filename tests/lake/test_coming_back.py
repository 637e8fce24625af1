"""Search for messages that are returned by `nack` again and again."""

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline_platform.lake.failures.inspection import ComingBack, coming_back
from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import DECISIONS, OUTCOMES, Table

EARLY, LATE = "2026-11-23T0100", "2026-11-23T0200"


@pytest.fixture
def outcomes(tmp_path):
    return Table(Lake(root=str(tmp_path)), "p", "outcomes", OUTCOMES)


def decided(outcomes: Table, number: int, window: str, **by_id: str) -> None:
    """Commit a receive's outcomes, by message id."""
    rows = [{"message_id": message_id, "outcome": outcome} for message_id, outcome in by_id.items()]
    stored = OUTCOMES.remove(OUTCOMES.get_field_index("window"))
    path = f"window={window}/{number}.parquet"
    target = outcomes.lake.uri(outcomes.path(path))
    os.makedirs(os.path.dirname(target), exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=stored), target)
    outcomes.ensure()
    with outcomes.look() as handle:
        file = File("outcomes", window, path, len(rows), os.path.getsize(target))
        outcomes.swap(handle, str(number), [file])


def test_undecided_messages_that_are_returned_repeatedly_are_found(outcomes):
    assert coming_back(outcomes) is None, "there is no table yet"

    decided(outcomes, 1, EARLY, poison="returned", late="returned", fine="handled", once="returned")
    decided(outcomes, 2, LATE, poison="returned", late="returned")
    decided(outcomes, 3, LATE, poison="returned", late="handled")

    assert coming_back(outcomes) == ComingBack(messages=1, deliveries=3, oldest=EARLY)


@pytest.mark.parametrize("decision", DECISIONS)
def test_decided_messages_are_not_reported_as_returned(outcomes, decision):
    decided(outcomes, 1, EARLY, slow="returned")
    decided(outcomes, 2, LATE, slow="returned")
    decided(outcomes, 3, LATE, slow=decision)

    assert coming_back(outcomes) is None
