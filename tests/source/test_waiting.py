"""Waiting for messages by looks at the backlog."""

from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest

from pipeline_platform import Backlog, Backoff
from tests.fixtures.memory_sources import MEMORY, MemoryChannel, MemoryQueue


class Scripted(MemoryQueue):
    """Reports one backlog after another, and looks again at once."""

    poll_pauses = Backoff(first=timedelta(milliseconds=1), most=timedelta(milliseconds=2))

    def backlog_up_to(self, most: int) -> Backlog:
        looks.append(most)
        return Backlog(next(backlogs))


backlogs: Any = iter(())
looks: list[int] = []


@pytest.fixture
def scripted(monkeypatch):
    def build(*found: int | None) -> Scripted:
        monkeypatch.setattr(f"{__name__}.backlogs", iter(found))
        looks.clear()
        return Scripted(name="memory", queue=MEMORY.create())

    return build


def test_a_wait_ends_at_the_first_look_that_finds_a_message(scripted):
    assert scripted(0, 0, 0, 1).wait(60) is True
    assert looks == [1] * 4, "counted no further than needed"


def test_a_wait_of_no_time_looks_once(scripted):
    source = scripted(0, 1)
    assert [source.wait(0), source.wait(0)] == [False, True]


def test_a_wait_without_messages_ends_in_time():
    source = MemoryQueue(name="memory", queue=MEMORY.create())
    assert [source.wait(0.3), source.wait(0.05)] == [False, False]


def test_messages_that_other_runs_take_are_ignored(scripted):
    assert scripted(2, 3, 4).wait(60, taken=3) is True
    assert looks == [4] * 3


def test_a_backlog_that_includes_leased_messages_is_compared_with_their_number():
    queue = MEMORY.create()
    other, source = MemoryChannel(name="other", queue=queue), MemoryChannel(name="memory", queue=queue)
    source.send([b"1", b"2"])
    with closing(other):
        list(other.read(other.plan(2, 1, "r1")[0], "r1"))
        assert [source.wait(0), source.wait(0, taken=2)] == [True, False]
        source.send([b"3"])
        assert source.wait(0, taken=2) is True


def test_messages_may_always_wait_at_a_source_that_does_not_report_its_backlog(scripted):
    source = scripted(None, None)
    assert [source.wait(60), source.wait(0, taken=3)] == [True, True]
