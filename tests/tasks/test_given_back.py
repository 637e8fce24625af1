"""Messages that may not begin any more, in a task and in its forks."""

import math

import pytest

from pipeline_platform.lake.storage import Lake
from tests.fixtures.obedient import Obedient
from tests.fixtures.small_lake import handled, outcomes, rows_of


class Stopped:
    """Permits some messages, and then none for ever."""

    unlimited_until = math.inf

    def __init__(self, left: int) -> None:
        self.left = left

    def permitted(self, wanted: int) -> tuple[int, float]:
        count = min(wanted, self.left)
        self.left -= count
        return count, math.inf

    def each(self, messages):
        count, _ = self.permitted(len(messages))
        yield from messages[:count]


@pytest.mark.parametrize("careful", [False, True])
@pytest.mark.parametrize("begun", [0, 2, 5])
def test_what_was_not_begun_is_given_back_and_what_was_is_kept(tmp_path, careful, begun):
    lake, payloads = Lake(root=str(tmp_path)), [b"%d" % number for number in range(5)]

    manifest = handled(lake, Obedient, *payloads, careful=careful, pace=Stopped(begun))

    expected = {f"m{number}": "handled" if number < begun else "returned" for number in range(5)}
    assert outcomes(lake, "obedient", manifest) == expected
    back = [row for row in rows_of(lake, "obedient", manifest, "outcomes") if row["outcome"] == "returned"]
    assert {row["action"] for row in back} <= {"nack"}
    assert rows_of(lake, "obedient", manifest, "failed") == []
    assert (manifest.total("given_back"), manifest.total("returned")) == (5 - begun, 5 - begun)


def test_a_message_that_kills_its_fork_fails_and_those_after_it_are_given_back(tmp_path):
    lake = Lake(root=str(tmp_path))

    manifest = handled(lake, Obedient, b"die", b"1", careful=True, pace=Stopped(3))

    assert outcomes(lake, "obedient", manifest) == {"m0": "failed", "m1": "returned"}
