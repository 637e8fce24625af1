"""Messages that may not begin any more, in a task and in its forks."""

from collections import Counter
from typing import ClassVar

import pytest

from pipeline_platform import Message, Processors
from pipeline_platform.lake.storage import Lake
from pipeline_platform.tasks.handle import handle_messages
from tests.fixtures.obedient import Obedient
from tests.fixtures.small_lake import Shared, handled, outcomes, rows_of


class Stopped:
    """Permits some messages, and then none for ever."""

    waited = 0.0

    def __init__(self, left: int) -> None:
        self._left = Shared(left)

    @property
    def left(self) -> int:
        return self._left.value

    def each(self, messages):
        count = min(len(messages), self.left)
        self._left.value -= count
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


class Transforms(Obedient):
    """Counts what it sees before anything is handled."""

    name = "obedient"
    seen: ClassVar[list[bytes]] = []

    def transform(self, event: Message) -> Message:
        self.seen.append(event.data)
        return event


def test_no_callback_sees_more_than_the_block_in_which_a_task_was_stopped(tmp_path, monkeypatch):
    """A slow one would hold up the drain."""
    monkeypatch.setattr(handle_messages, "BLOCK_ROWS", 4)
    monkeypatch.setattr(Transforms, "processors", Processors(chunk_size=2))
    lake, payloads = Lake(root=str(tmp_path)), [b"%d" % number for number in range(12)]
    manifest = handled(lake, Transforms, *payloads, pace=Stopped(3))
    assert Transforms.seen == payloads[:4]
    assert Counter(outcomes(lake, "obedient", manifest).values()) == {"handled": 3, "returned": 9}
