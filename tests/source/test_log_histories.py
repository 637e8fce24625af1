"""Generated histories of a log: receives of several runs that finish, crash and stall, resets, a lost control store."""

import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline_platform.control.store import ControlStore
from tests.fixtures.log import Journal, PaperLog, paper_log

PARTITIONS = st.sampled_from("pqr")
Message = tuple[str, int]


def held(messages: set[Message]) -> list[tuple[str, list[str]]]:
    return [(partition, [str(offset)]) for partition, offset in messages]


class Histories(RuleBasedStateMachine):
    """Counts acknowledged messages: a redelivery must be marked, and no message may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.stores = 0
        self.journal = Journal()
        self.journal.add("p", 5)
        self.open: dict[str, set[Message]] = {}
        self.finished: list[str] = []
        self.delivered: Counter[Message] = Counter()
        self.acknowledged: set[Message] = set()
        self.skipped: set[Message] = set()
        self.source = self.begin()

    def begin(self) -> PaperLog:
        self.stores += 1
        return paper_log(ControlStore(f"sqlite:///{Path(self.folder.name)}/{self.stores}.sqlite"), self.journal)

    def teardown(self) -> None:
        for receive_id in [*self.open]:
            self.finish(receive_id)
        while self.receive(1_000):
            self.finish(next(iter(self.open)))
        everything = {(partition, at) for partition, past in self.journal.past.items() for at in range(past)}
        assert everything <= self.acknowledged | self.skipped
        assert all(self.journal.at(partition) == past for partition, past in self.journal.past.items())
        assert all(not place.spans for place in self.source.positions.places("log").values())
        self.source.positions.close()  # type: ignore[attr-defined]
        self.folder.cleanup()

    @rule(partition=PARTITIONS, messages=st.integers(1, 9))
    def publish(self, partition: str, messages: int) -> None:
        self.journal.add(partition, messages)

    @rule(demand=st.integers(1, 12))
    def receive_some(self, demand: int) -> None:
        self.receive(demand)

    def receive(self, demand: int) -> int:
        receive_id = f"r{len(self.open) + len(self.finished)}-{self.delivered.total()}"
        mine: set[Message] = set()
        for share in self.source.plan(demand, 2, receive_id):
            for batch in self.source.read(share, receive_id):
                columns = (batch.column(name).to_pylist() for name in ("ack_ref", "sequence", "redelivered"))
                for partition, offset, redelivered in zip(*columns, strict=True):
                    message = (partition, offset)
                    assert redelivered or not self.delivered[message], "what comes again is marked"
                    assert not any(message in held for held in self.open.values()), "one receive at a time"
                    mine.add(message)
        self.delivered.update(mine)
        if mine:
            self.open[receive_id] = mine
        return len(mine)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def finish_one(self, data: st.DataObject) -> None:
        self.finish(data.draw(st.sampled_from(sorted(self.open))))

    def finish(self, receive_id: str) -> None:
        self.acknowledged |= self.open.pop(receive_id)
        self.finished.append(receive_id)
        self.source.finish(receive_id)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def finish_in_part(self, data: st.DataObject) -> None:
        receive_id = data.draw(st.sampled_from(sorted(self.open)))
        mine = sorted(self.open[receive_id])
        begun = set(data.draw(st.lists(st.sampled_from(mine), unique=True)))
        for _ in range(data.draw(st.integers(1, 2))):
            self.source.give_back(receive_id, lambda: held(set(mine) - begun), lambda: held(begun))
        self.open[receive_id] = begun
        self.finish(receive_id)

    @precondition(lambda self: self.finished)
    @rule(data=st.data())
    def finish_again(self, data: st.DataObject) -> None:
        self.source.finish(data.draw(st.sampled_from(self.finished)))

    @precondition(lambda self: len(self.open) > 1)
    @rule(data=st.data())
    def finish_two_at_once(self, data: st.DataObject) -> None:
        receive, other = data.draw(st.permutations(sorted(self.open)))[:2]
        self.journal.meanwhile = lambda: self.finish(other)
        self.finish(receive)
        if self.journal.meanwhile is not None:  # there was nothing to commit
            self.journal.meanwhile = None
            self.finish(other)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        receive_id = data.draw(st.sampled_from(sorted(self.open)))
        del self.open[receive_id]
        self.source.abandon(receive_id, list)

    @rule(partition=PARTITIONS, back=st.integers(0, 10))
    def set_back(self, partition: str, back: int) -> None:
        at = self.journal.at(partition)
        if at is not None:
            self.source.backlog()
            self.journal.set_to(partition, max(0, at - back))

    @rule(partition=PARTITIONS, forward=st.integers(1, 5))
    def set_forward(self, partition: str, forward: int) -> None:
        at = self.journal.at(partition)
        if at is not None:
            to = min(at + forward, self.journal.past[partition])
            self.skipped |= {(partition, offset) for offset in range(to)}
            self.journal.set_to(partition, to)
            self.receive(1)  # otherwise a run that finishes now would continue at the old position

    @rule()
    def forget(self) -> None:
        """Remove the control store between runs; the sensor looks afterwards."""
        for receive_id in [*self.open]:
            self.finish(receive_id)
        self.source.backlog()
        self.source.positions.close()  # type: ignore[attr-defined]
        self.source = self.begin()

    @rule()
    def expire(self) -> None:
        self.source.backlog()  # known by now
        self.journal.committed.clear()

    @invariant()
    def nothing_is_committed_that_is_not_acknowledged(self) -> None:
        places = self.source.positions.places("log")
        for partition in self.journal.past:
            offset, is_ours = self.journal.committed.get(partition, (0, False))
            if is_ours and partition in places:
                assert {(partition, at) for at in range(offset)} <= self.acknowledged | self.skipped
                assert offset == places[partition].acknowledged_to


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=20, stateful_step_count=30)
