"""The decision: however receives that hold the same messages interleave, die or stall, each is decided once."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline_platform.lake import writer
from pipeline_platform.lake.decisions import decision, rewriting
from pipeline_platform.lake.decisions.decision import FencedError, decide, fence, publish, state_of
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import DECIDED, Table, Tables
from tests.fixtures.small_lake import Keeping, Memory, Run, visible

SWAP = Table.swap

HOLDS = (("a", "b", "f1"), ("b", "c", "f1"), ("a", "c", "f2"))
"""Messages of three receives at the same time; `f...` fails."""
EVERY = sorted({name for names in HOLDS for name in names})


def holding(*names: str) -> Memory:
    return Memory(deliveries_=tuple((name, b"fail" if name.startswith("f") else name.encode()) for name in names))


class Others:
    """Receives that hold the same messages, and steps of theirs that happen right before one another's commits."""

    def __init__(self, root: Path) -> None:
        self.tables = Tables(Lake(root=str(root)), Keeping)
        self.runs = [Run(self.tables, holding(*names), f"r{number}") for number, names in enumerate(HOLDS)]
        self.pending: list[tuple[str, int]] = []

    def moved(self, root: Path) -> "Others":
        """The same in a copy of the lake."""
        shutil.copytree(self.tables.lake.root, root)
        other = object.__new__(Others)
        other.tables, other.pending = Tables(Lake(root=str(root)), Keeping), []
        other.runs = []
        for run in self.runs:
            copy = object.__new__(Run)
            copy.__dict__ = {**run.__dict__, "tables": other.tables}
            copy.ledger = type(run.ledger)(other.tables.lake, "keeping")
            other.runs.append(copy)
        return other

    def act(self, action: str, number: int) -> None:
        """One step of a receive, as `Flow` guards it."""
        run, receive_id = self.runs[number], f"r{number}"
        if action == "compact":
            for name in self.tables.names:
                self.tables[name].open().optimize.compact()
        elif run.ledger.get(receive_id) is None:
            return
        elif action == "decide":
            try:
                run.decide()
            except FencedError:
                return
        elif action == "fence":
            if fence(self.tables, run.receive) is None:
                run.ledger.remove(receive_id)
        elif state_of(self.tables["outcomes"], receive_id, run.receive) == DECIDED:
            run.publish()
            if action == "finish":
                run.ledger.remove(receive_id)

    def interleaved(self, patch: pytest.MonkeyPatch) -> None:
        """Take the pending steps, the next one always right before somebody's commit.

        Publish to the tables in turn: in threads, two steps of a receive would run at once, in an order that changes.
        """

        def swap(table: Table, *args: Any, **kwargs: Any) -> None:
            if self.pending:
                self.act(*self.pending.pop(0))
            SWAP(table, *args, **kwargs)

        def one_by_one(work: Callable[[Table], None], tables: Iterable[Table]) -> None:
            for table in tables:
                work(table)

        patch.setattr(Table, "swap", swap)
        patch.setattr(decision, "side_by_side", one_by_one)
        while self.pending:
            self.act(*self.pending.pop(0))

    def end(self) -> None:
        """Let the next run finish what is decided, give up the rest, and have everything delivered again."""
        for number in range(len(self.runs)):
            self.act("fence", number)
            self.act("finish", number)
        # From version 0 on: what the lookup would find is found by the swap.
        Run(self.tables, holding(*EVERY), "last", base=0).finish()

    def check(self) -> None:
        decisions = Counter(
            row["message_id"] for row in visible(self.tables, "outcomes") if row["outcome"] in ("handled", "failed")
        )
        kept = Counter(row["message_id"] for row in visible(self.tables, "kept"))
        failed = Counter(row["message_id"] for row in visible(self.tables, "failed"))
        assert decisions == Counter(EVERY)
        assert kept == Counter(name for name in EVERY if not name.startswith("f"))
        assert failed == Counter(name for name in EVERY if name.startswith("f"))
        decided_by = {
            row["message_id"]: row["receive_id"]
            for row in visible(self.tables, "outcomes")
            if row["outcome"] in ("handled", "failed")
        }
        for name in ("kept", "failed"):
            for row in visible(self.tables, name):
                assert row["receive_id"] == decided_by[row["message_id"]], "published by whoever decided"


@pytest.fixture(scope="module")
def worked(tmp_path_factory):
    """Three receives that have handled what they hold, and decided nothing."""
    others = Others(tmp_path_factory.mktemp("worked"))
    for run in others.runs:
        run.work()
    return others


@pytest.fixture
def others(worked, tmp_path):
    return worked.moved(tmp_path / "lake")


STEPS = st.lists(
    st.tuples(st.sampled_from(["decide", "decide", "publish", "finish", "fence", "compact"]), st.integers(0, 2)),
    min_size=2,
    max_size=10,
)


@settings(max_examples=8)
@example([("decide", 0), ("decide", 1), ("decide", 2)])
@example([("decide", 0), ("fence", 0), ("decide", 1)])
@example([("decide", 0), ("decide", 0), ("publish", 0), ("compact", 0), ("publish", 0), ("finish", 0)])
@example([("decide", 0), ("finish", 0), ("compact", 0), ("decide", 1), ("compact", 1), ("decide", 2)])
@given(STEPS)
def test_each_message_is_decided_once_in_every_table_whatever_the_interleaving(worked, tmp_path_factory, steps):
    others = worked.moved(tmp_path_factory.mktemp("lake") / "copy")
    others.pending = list(steps)
    with pytest.MonkeyPatch.context() as patch:
        others.interleaved(patch)
    others.end()

    others.check()


def blind(patch: pytest.MonkeyPatch) -> None:
    """Swaps that are rebased on what came in between, as `deltalake` does when left alone."""
    import deltalake

    real: Callable[..., Any] = deltalake.CommitProperties

    def properties(max_commit_retries: int | None = None, **others: Any) -> Any:
        return real(max_commit_retries=15, **others)

    patch.setattr(deltalake, "CommitProperties", properties)


def heedless(patch: pytest.MonkeyPatch) -> None:
    """Swaps that are tried again without a look at what came in between."""
    patch.setattr(Table, "added_since", lambda self, handle, version: [])


@pytest.mark.parametrize("without", [blind, heedless])
def test_the_compare_and_swap_is_what_keeps_decisions_single(others, without):
    others.pending = [("decide", 0), ("decide", 1), ("decide", 2)]
    with pytest.MonkeyPatch.context() as patch:
        without(patch)
        others.interleaved(patch)
        others.end()

    with pytest.raises(AssertionError):
        others.check()


def test_a_run_that_finds_itself_fenced_says_so(others):
    fence(others.tables, others.runs[0].receive)

    with pytest.raises(FencedError, match="receive r0: fenced"):
        others.runs[0].decide()


def test_a_fence_comes_too_late_for_what_is_decided(others):
    others.runs[0].decide()

    first, second, _ = (run.receive for run in others.runs)
    assert fence(others.tables, first) == first
    assert fence(others.tables, second) is None
    assert fence(others.tables, second) is None, "fencing twice is fencing once"


def test_a_receive_that_is_forgotten_may_not_decide(others):
    others.runs[0].ledger.remove("r0")

    with pytest.raises(FencedError):
        others.runs[0].decide()


def test_a_receive_whose_lease_cannot_be_renewed_decides_nothing(others):
    run = others.runs[0]

    with pytest.raises(FencedError, match="receive r0: its lease expired"):
        decide(others.tables, run.ledger, run.receive, lambda: False)

    assert visible(others.tables, "outcomes") == []


def test_deciding_tells_how_many_messages_others_had_decided_and_how_often_it_tried(others):
    others.runs[0].decide()
    run = others.runs[1]

    came_to = decide(others.tables, run.ledger, run.receive, on_success="noop")

    assert came_to == (2, 1)
    theirs = [row for row in visible(others.tables, "outcomes") if row["receive_id"] == "r1"]
    assert {row["message_id"]: (row["outcome"], row["action"]) for row in theirs} == {
        "b": ("duplicate", "noop"),
        "f1": ("duplicate", "noop"),
        "c": ("handled", "ack"),
    }, "the source is told of them all the same"


def test_what_others_decided_is_read_by_row_groups_and_own_keys_once_however_often_others_commit(tmp_path, monkeypatch):
    read, hashes = [], rewriting._hashes
    monkeypatch.setattr(writer, "ROW_GROUP_ROWS", 2)
    monkeypatch.setattr(rewriting, "_hashes", lambda keys: read.append(len(keys)) or hashes(keys))
    tables = Tables(Lake(root=str(tmp_path)), Keeping)
    held = ("abcde", "fgh", "ij")
    mine, *others = [Run(tables, holding(*names), f"r{number}").work() for number, names in enumerate(held)]
    committing = iter(others)

    def swap(table, *arguments, **options):
        monkeypatch.setattr(Table, "swap", SWAP)
        if other := next(committing, None):
            other.decide()
            monkeypatch.setattr(Table, "swap", swap)
        SWAP(table, *arguments, **options)

    monkeypatch.setattr(Table, "swap", swap)
    assert decide(tables, mine.ledger, mine.receive) == (0, 3)
    assert (max(read), sum(read)) == (2, 5 + 3 + 2 + (2 + 3)), "the last of the others reads the first, too"


@pytest.mark.parametrize("lived", [0, 2])
def test_a_publisher_that_dies_half_way_is_finished_by_another(others, lived):
    run = others.runs[0].decide()
    with pytest.MonkeyPatch.context() as patch:
        commits = iter(range(lived))

        def swap(table: Table, *args: Any, **kwargs: Any) -> None:
            if next(commits, None) is None:
                raise SystemExit
            SWAP(table, *args, **kwargs)

        patch.setattr(Table, "swap", swap)
        with pytest.raises(SystemExit):
            run.publish()

    run.publish()

    assert {name: len(visible(others.tables, name)) for name in ("messages", "failed", "kept")} == {
        "messages": 3,
        "failed": 1,
        "kept": 2,
    }


def test_nothing_is_visible_before_the_decision(others):
    assert all(visible(others.tables, name) == [] for name in others.tables.names)
    assert not any(others.tables[name].open().version() for name in others.tables.names)


def test_a_message_that_was_given_back_is_not_decided_and_the_next_receive_has_it(tmp_path):
    tables = Tables(Lake(root=str(tmp_path)), Keeping)
    back = Memory(deliveries_=(("f1", b"fail"),), on_failure="nack")
    first, second = Run(tables, back, "r1").work(), Run(tables, holding("f1"), "r2").work()
    first.decide().publish()
    second.decide().publish()

    assert {row["receive_id"]: row["outcome"] for row in visible(tables, "outcomes")} == {
        "r1": "returned",
        "r2": "failed",
    }


def test_one_id_at_two_sources_is_two_messages(tmp_path):
    tables = Tables(Lake(root=str(tmp_path)), Keeping)
    first = Run(tables, Memory(name="one", deliveries_=(("a", b"a"),)), "r1").work()
    second = Run(tables, Memory(name="two", deliveries_=(("a", b"a"),)), "r2").work()
    first.decide().publish()
    second.decide().publish()

    assert len(visible(tables, "kept")) == 2


@pytest.mark.parametrize("survived", [0, 1])
def test_a_run_that_dies_while_it_drops_what_others_decided_begins_again(others, survived):
    """Its manifests are rewritten step by step; the half that is done must not hide the other half."""
    others.runs[0].decide()
    run = others.runs[1]
    write = type(run.ledger).write
    with pytest.MonkeyPatch.context() as patch:
        left = iter(range(survived))

        def dying(*args: Any) -> None:
            if next(left, None) is None:
                raise RuntimeError("killed")
            write(*args)

        patch.setattr(type(run.ledger), "write", dying)
        with pytest.raises(RuntimeError, match="killed"):
            run.decide()
    others.end()

    others.check()


class Renamed(Keeping):
    """The same pipeline after an edit: its batcher has another name."""

    batchers = {"texts": Keeping.batchers["kept"]}


def test_what_was_decided_for_a_batcher_that_was_renamed_since_reaches_its_table(others):
    run = others.runs[0].decide()
    now = Tables(others.tables.lake, Renamed)
    now.ensure()

    assert publish(now, run.receive, run.ledger.manifest(run.receive))["kept"] == 2

    assert sorted(row["text"] for row in visible(others.tables, "kept")) == ["a", "b"]


def test_what_others_decided_is_dropped_from_a_batcher_that_was_renamed_since(others):
    others.runs[0].decide()
    run = others.runs[1]
    now = Tables(others.tables.lake, Renamed)
    now.ensure()

    decide(now, run.ledger, run.receive)
    publish(now, run.receive, run.ledger.manifest(run.receive))

    assert [row["text"] for row in visible(others.tables, "kept")] == ["c"]
