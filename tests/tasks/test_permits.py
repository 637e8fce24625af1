"""Handling in callback processes under a rate limit: a message that kills its process fails alone."""

import time
from collections import Counter
from datetime import timedelta
from typing import ClassVar

import pytest

from pipeline_platform import Message, Processors
from pipeline_platform.control.pace import Pace
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.options import RateLimiting
from pipeline_platform.tasks.handle import handle_messages
from tests.fixtures.obedient import Obedient, ObedientBlocks
from tests.fixtures.small_lake import Shared, handled, outcomes, rows_of


class Permits(Pace):
    """A rate limit that counts requests."""

    def __init__(self):
        super().__init__(None, "permits")
        self._asked = Shared(0)

    @property
    def asked(self):
        return self._asked.value

    def permitted(self, wanted, until=float("inf")):
        count = min(wanted, 2)
        self._asked.value += count
        return count, until


class Diary(Obedient):
    """Logs the start of each message, in all processes."""

    name = "diary"

    def handle_message(self, message, context):
        with open(context, "a") as diary:
            diary.write(f"{message.data.decode()} {time.time()} {time.monotonic()}\n")
        return super().handle_message(message, context)


def begun(diary) -> list[tuple[str, float, float]]:
    lines = [line.split() for line in diary.read_text().splitlines()]
    return [(text, float(clock), float(monotonic)) for text, clock, monotonic in lines]


def test_every_try_of_a_message_takes_its_permit(lake, tmp_path):
    permits, diary = Permits(), tmp_path / "begun"
    manifest = handled(lake, Diary, b"1", b"2", b"kill", b"4", b"5", careful=True, pace=permits, context=str(diary))
    assert outcomes(lake, "diary", manifest)["m2"] == "failed"
    tries = [text for text, *_ in begun(diary)]
    assert tries.count("kill") == 2, "with the other message, and alone"
    assert len(tries) <= permits.asked


def test_tries_keep_the_rate_limit(lake, tmp_path):
    """A culprit is tried with the messages before it, and alone."""
    limit = RateLimiting(allowed_messages=10, interval=timedelta(seconds=0.25))
    store, diary = ControlStore(f"sqlite:///{tmp_path}/control.db"), tmp_path / "begun"
    payloads = [b"kill" if index % 16 == 15 else b"%d" % index for index in range(48)]
    manifest = handled(lake, Diary, *payloads, careful=True, pace=Pace(store, "diary", limit), context=str(diary))
    store.close()
    assert manifest.totals.failed.total() == 3
    intervals = Counter(int(clock / 0.25) for _, clock, _ in begun(diary))
    assert sum(intervals.values()) <= 2 * 48, "a killer costs one more try of its block"
    assert max(intervals.values()) <= 10 + 1, "a start at the end of an interval may be logged after it"


class Brief(Permits):
    """Permits for two messages that are valid for 0.5 s."""

    def __init__(self, book):
        super().__init__()
        self._book = book

    def permitted(self, wanted, until=float("inf")):
        count, _ = super().permitted(wanted)
        since = time.monotonic()
        with self._book.open("a") as book:
            book.write(f"{since} {since + 0.5}\n")
        return count, since + 0.5

    @property
    def held(self):
        return [tuple(map(float, line.split())) for line in self._book.read_text().splitlines()]


class Slow(Diary):
    name = "slow"
    preparing = 0.0

    def prepare_messages(self, messages, context):
        time.sleep(self.preparing)
        return messages

    def handle_message(self, message, context):
        handled = super().handle_message(message, context)
        time.sleep(0.6)
        return handled


def test_a_try_starts_no_message_after_its_permits_expired(lake, tmp_path):
    permits, diary = Brief(tmp_path / "held"), tmp_path / "begun"
    manifest = handled(lake, Slow, b"1", b"2", b"3", b"4", careful=True, pace=permits, context=str(diary))
    assert set(outcomes(lake, "slow", manifest).values()) == {"handled"}
    tries = begun(diary)[:4]
    assert [text for text, *_ in tries] == ["1", "2", "3", "4"], "each once"
    assert all(any(since <= at <= until for since, until in permits.held) for _, _, at in tries)


def test_a_task_continues_if_preparing_outlasts_the_permits(lake, tmp_path):
    class Slower(Slow):
        name = "slow"
        preparing = 0.6

    permits, diary = Brief(tmp_path / "held"), tmp_path / "begun"

    manifest = handled(lake, Slower, b"1", b"2", careful=True, pace=permits, context=str(diary))

    assert set(outcomes(lake, "slow", manifest).values()) == {"handled"}
    assert permits.asked >= len(begun(diary)), "the mean rate keeps the limit"


def test_the_rate_limit_is_asked_for_every_message_once(lake):
    permits = Permits()
    handled(lake, Obedient, b"1", b"2", b"3", pace=permits)
    assert permits.asked == 3


class Stopped:
    """Permits some messages, and no more later."""

    waited = 0.0

    def __init__(self, left: int) -> None:
        self._left = Shared(left)

    @property
    def left(self) -> int:
        return self._left.value

    def permitted(self, wanted):
        count = min(wanted, self.left)
        self._left.value -= count
        return count, float("inf")

    def each(self, messages):
        yield from messages[: self.permitted(len(messages))[0]]


both_lanes = pytest.mark.parametrize("pipeline", [Obedient, ObedientBlocks])


@both_lanes
@pytest.mark.parametrize("careful", [False, True])
@pytest.mark.parametrize("begun", [0, 2])
def test_unstarted_messages_are_returned_and_started_messages_are_kept(tmp_path, pipeline, careful, begun):
    lake, payloads = Lake(root=str(tmp_path)), [b"%d" % number for number in range(5)]
    manifest = handled(lake, pipeline, *payloads, careful=careful, pace=Stopped(begun))
    expected = {f"m{number}": "handled" if number < begun else "returned" for number in range(5)}
    assert outcomes(lake, "obedient", manifest) == expected
    back = [row for row in rows_of(lake, "obedient", manifest, "outcomes") if row["outcome"] == "returned"]
    assert {row["action"] for row in back} <= {"nack"}
    assert rows_of(lake, "obedient", manifest, "failed") == []
    assert (manifest.totals.released, manifest.totals.returned.total()) == (5 - begun, 5 - begun)


@both_lanes
def test_a_message_that_kills_its_fork_fails_and_later_messages_are_returned(tmp_path, pipeline):
    lake = Lake(root=str(tmp_path))
    manifest = handled(lake, pipeline, b"kill", b"1", careful=True, pace=Stopped(3))
    assert outcomes(lake, "obedient", manifest) == {"m0": "failed", "m1": "returned"}


class Transforms(Obedient):
    """Counts the messages passed to `transform`."""

    name = "obedient"
    seen: ClassVar[list[bytes]] = []

    def transform(self, event: Message) -> Message:
        self.seen.append(event.data)
        return event


def test_no_callback_sees_more_than_the_block_in_which_a_task_was_stopped(tmp_path, monkeypatch):
    """A slow `transform` would delay the drain."""
    monkeypatch.setattr(handle_messages, "BLOCK_ROWS", 4)
    monkeypatch.setattr(Transforms, "processors", Processors(chunk_size=2))
    lake, payloads = Lake(root=str(tmp_path)), [b"%d" % number for number in range(12)]
    manifest = handled(lake, Transforms, *payloads, pace=Stopped(3))
    assert Transforms.seen == payloads[:4]
    assert Counter(outcomes(lake, "obedient", manifest).values()) == {"handled": 3, "returned": 9}
