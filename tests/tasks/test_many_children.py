"""Many children: a task holds those of some messages at a time, and never more than one message may have beside."""

from typing import Any

import pytest

from pipeline_platform import Batcher, Message, Processors, TableBatcher
from pipeline_platform.tasks.host.fork import Written
from pipeline_platform.tasks.record.outcomes import Outcomes
from tests.fixtures.families import Families, Word
from tests.fixtures.small_lake import handled, outcomes, rows_of
from tests.tasks.test_given_back import Stopped


class Litters(Families):
    """Has as many children as the payload says; `fat` ones hold a MiB each, `huge` ones half a GiB."""

    name = "litters"
    processors = Processors(chunk_size=20)
    batchers = {"lake": TableBatcher(schema=Word), "plain": Batcher()}

    def prepare_messages(self, messages: list[Message], context: Any) -> list[Message]:
        PREPARED.extend(message.message_id for message in messages)
        return messages

    def handle_message(self, message: Message, context: Any) -> Any:
        CALLED.append(message.message_id)
        count, _, kind = message.data.decode().partition(" ")
        if kind:
            return [message.put(SIZED[kind], batcher="plain")] * int(count)
        return [message.put({"word": "a"}, batcher="lake")] * int(count)


SIZED = {"fat": bytes(2**20), "huge": bytes(2**29)}
CALLED: list[str] = []
PREPARED: list[str] = []


@pytest.fixture
def held(monkeypatch) -> list[int]:
    """How many children a task held each time that it recorded messages."""
    counts: list[int] = []
    real = Outcomes.handled

    def counting(self: Outcomes, batch: Any, window: str, messages: list[Message]) -> None:
        counts.append(sum(len(message._state.children or ()) for message in messages))
        real(self, batch, window, messages)

    monkeypatch.setattr(Outcomes, "handled", counting)
    CALLED.clear()
    PREPARED.clear()
    return counts


@pytest.mark.parametrize("threads", [1, 3])
def test_children_are_recorded_as_they_come_and_each_callback_is_called_once(lake, held, threads):
    kind = type("Threaded", (Litters,), {"name": "litters", "processors": Processors(chunk_size=20, threads=threads)})
    manifest = handled(lake, kind, *[b"5000"] * 24, b"0", b"1")
    assert max(held) <= 16_384 + threads * 5_000
    assert manifest.rows("lake") == sum(held) == 24 * 5_000 + 1
    ids = [f"m{number}" for number in range(26)]
    assert (sorted(CALLED), PREPARED) == (sorted(ids), ids)
    assert outcomes(lake, "litters", manifest) == dict.fromkeys(ids, "handled")


def test_messages_without_children_are_recorded_together(lake, held):
    handled(lake, Litters, *[b"3"] * 100)
    assert held == [300]


def test_a_fork_gives_back_what_it_has_before_the_next_goes_on(lake, monkeypatch):
    rows: list[int] = []
    real = Written.load

    def counting(file: Any) -> Written:
        written = real(file)
        rows.append(sum(batch.num_rows for table, _, batch in written.batches if table == "lake"))
        return written

    monkeypatch.setattr(Written, "load", counting)

    manifest = handled(lake, Litters, *[b"5000"] * 12, careful=True)

    assert max(rows) <= 16_384 + 5_000
    assert manifest.rows("lake") == sum(rows) == 12 * 5_000
    assert outcomes(lake, "litters", manifest) == {f"m{number}": "handled" for number in range(12)}


def test_children_that_hold_much_are_fewer_at_a_time(lake, held):
    handled(lake, Litters, *[b"5 fat"] * 9)
    assert max(held) <= 20


def test_a_message_whose_children_hold_more_than_a_task_can_write_fails_alone(lake):
    manifest = handled(lake, Litters, b"1", b"3 huge", b"1")
    assert outcomes(lake, "litters", manifest) == {"m0": "handled", "m1": "failed", "m2": "handled"}
    (failure,) = rows_of(lake, "litters", manifest, "failed")
    assert failure["reason"] == (
        "handle_message returned 1,610,612,736 bytes for one message, whose 3 children may hold 1,073,741,824 "
        "together: put into each what is its own"
    )


@pytest.mark.parametrize("careful", [False, True])
@pytest.mark.parametrize("begun", [0, 4, 12])
def test_what_may_not_begin_any_more_is_given_back_whole(lake, careful, begun):
    manifest = handled(lake, Litters, *[b"5000"] * 12, careful=careful, pace=Stopped(begun))
    ends = outcomes(lake, "litters", manifest)
    handled_ = [name for name, end in ends.items() if end == "handled"]
    assert set(handled_) <= {f"m{number}" for number in range(begun)}
    assert len(ends) == manifest.rows("outcomes") == 12
    assert manifest.rows("lake") == 5_000 * len(handled_)
    assert careful or len(handled_) == begun, "where forks hold many children, permits that they took are lost"


def test_forks_that_hold_many_children_ask_for_few_permits(lake):
    permits = Stopped(10_000)
    handled(lake, Litters, *[b"5000"] * 60, careful=True, pace=permits)
    assert 10_000 - permits.left <= 20 + 2 * 60
