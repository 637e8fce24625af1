"""Search for messages that are returned by `nack` again and again."""

import pytest

from pipeline_platform.lake.failures.inspection import ComingBack, coming_back
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import DECISIONS, OUTCOMES, Table
from tests.fixtures.small_lake import put

EARLY, LATE = "2026-11-23T0100", "2026-11-23T0200"


@pytest.fixture
def outcomes(tmp_path):
    return Table(Lake(root=str(tmp_path)), "p", "outcomes", OUTCOMES)


def decided(outcomes: Table, number: int, window: str, source: str = "queue", **by_id: str) -> None:
    """Commit a receive's outcomes, by message id."""
    outcomes.ensure()
    rows = [{"source": source, "message_id": message_id, "outcome": outcome} for message_id, outcome in by_id.items()]
    put(outcomes, str(number), *rows, window=window)


def test_undecided_messages_that_are_returned_repeatedly_are_found(outcomes):
    assert coming_back(outcomes) is None, "there is no table yet"

    decided(outcomes, 1, EARLY, poison="returned", late="returned", fine="handled", once="returned")
    decided(outcomes, 2, LATE, poison="returned", late="returned")
    decided(outcomes, 3, LATE, poison="returned", late="handled")

    assert coming_back(outcomes) == ComingBack(messages=1, deliveries=3, oldest=EARLY)


def test_decided_messages_are_not_reported_as_returned(outcomes):
    for number in (1, 2):
        decided(outcomes, number, EARLY, **dict.fromkeys(DECISIONS, "returned"))
    decided(outcomes, 3, LATE, **{decision: decision for decision in DECISIONS})

    assert coming_back(outcomes) is None


def test_messages_of_two_sources_with_the_same_id_are_counted_separately(outcomes):
    decided(outcomes, 1, EARLY, "first", once="returned", handled="returned")
    decided(outcomes, 2, LATE, "second", once="returned", handled="returned")
    assert coming_back(outcomes) is None

    decided(outcomes, 3, LATE, "second", handled="returned")
    decided(outcomes, 4, LATE, "first", handled="handled")
    assert coming_back(outcomes) == ComingBack(messages=1, deliveries=2, oldest=LATE)
