"""Full replay: all messages of some windows are handled again, and their rows are replaced."""

import tracemalloc
from typing import Any

import pytest

from pipeline_platform.lake import replay as replaying
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.replay import ReplayedMessages
from pipeline_platform.lake.tables import Tables
from pipeline_platform.run.work.spark_work import FEW
from pipeline_platform.source.contract import Share, SourceError
from tests.fixtures.flow import rows, run
from tests.fixtures.flow_pipelines import Obedient
from tests.fixtures.small_lake import WINDOW, Keeping, Memory, Row, Run, visible

LATER = "2026-01-01T0100"


class Upper(Keeping):
    """The same pipeline after an edit."""

    def handle_message(self, message, context):
        return message.put_batcher("kept").put_data(Row(text=message.data.decode().upper()))


def source_of(tables: Tables, *windows: str) -> ReplayedMessages:
    version = tables["outcomes"].open().version()
    return ReplayedMessages(
        name="memory", lake=tables.lake, pipeline="keeping", windows=windows or (WINDOW,), version=version
    )


def replay(tables: Tables, receive_id: str, *windows: str) -> Run:
    windows = windows or (WINDOW,)
    source = source_of(tables, *windows)
    return Run(
        Tables(tables.lake, Upper),
        source,
        receive_id,
        origin="messages",
        windows=windows,
        replaces=source.finished(),
        base=source.version,
    )


def texts(tables: Tables) -> list[str]:
    return sorted(row["text"] for row in visible(tables, "kept"))


def given_out(source: ReplayedMessages, concurrency: int = 3) -> list[dict[str, Any]]:
    return [
        row
        for share in source.plan(1, concurrency, "r")
        for batch in source.read(share, "r")
        for row in batch.to_pylist()
    ]


def test_a_replay_replaces_the_rows_of_its_windows(tables):
    Run(tables, Memory(deliveries_=(("a", b"a"), ("b", b"fail b"))), "r1").finish()
    replay(tables, "r2").finish()
    assert texts(tables) == ["A", "FAIL B"]
    assert {row["receive_id"] for name in tables.names for row in visible(tables, name)} == {"r2"}
    failures = FailedMessages(name="memory", lake=tables.lake, pipeline="keeping")
    assert failures.backlog().messages == 0, "what failed before did not fail again"


def test_a_replay_fails_without_changes_if_another_replay_came_first(tables):
    Run(tables, Memory(deliveries_=(("a", b"a"), ("b", b"b"))), "r1").finish()
    late = replay(tables, "r2")
    replay(tables, "r3").finish()

    with pytest.raises(SourceError, match="another replay has replaced messages"):
        late.work()
    assert {row["receive_id"] for row in visible(tables, "kept")} == {"r3"}


def test_a_replay_keeps_the_time_and_the_receive_of_the_first_delivery(tables):
    Run(tables, Memory(deliveries_=(("a", b"a"),)), "r1").finish()
    (before,) = visible(tables, "messages")
    for receive_id in ("r2", "r3"):
        replay(tables, receive_id).finish()
    (after,) = visible(tables, "messages")
    assert (before["receive_id"], before["first_receive_id"]) == ("r1", None)
    assert (after["receive_id"], after["first_receive_id"]) == ("r3", "r1")
    assert after["received_at"] == before["received_at"]


def test_other_windows_are_left_alone(tables):
    Run(tables, Memory(deliveries_=(("a", b"a"),)), "r1").finish()
    Run(tables, Memory(deliveries_=(("b", b"b"),)), "r2", windows=(LATER,)).finish()
    replay(tables, "r3", LATER).finish()
    assert texts(tables) == ["B", "a"]


def test_each_decided_message_is_given_out_once_in_one_of_the_shares(tables):
    Run(tables, Memory(deliveries_=tuple((f"m{n}", b"%d" % n) for n in range(50))), "r1").finish()
    Run(tables, Memory(deliveries_=(("m0", b"again"), ("m1", b"again"))), "r2", base=0).finish()
    rows = given_out(source_of(tables))
    assert sorted(row["message_id"] for row in rows) == sorted(f"m{n}" for n in range(50))
    assert {row["data"] for row in rows if row["message_id"] in ("m0", "m1")} == {b"0", b"1"}, "the decided copies"


def test_a_message_received_twice_by_one_receive_is_given_out_once(tables):
    Run(tables, Memory(deliveries_=(("a", b"a"), ("b", b"b"))), "r1").finish()
    Run(tables, Memory(deliveries_=(("c", b"c"), ("c", b"c"))), "r2").finish()
    assert sorted(row["message_id"] for row in given_out(source_of(tables))) == ["a", "b", "c"]


def test_a_retried_failure_is_replayed_at_its_last_attempt(tables):
    Run(tables, Memory(deliveries_=(("a", b"fail"),)), "r1").finish()
    failures = FailedMessages(name="memory", lake=tables.lake, pipeline="keeping")
    Run(tables, failures, "r2", origin="failed").finish()
    (row,) = given_out(source_of(tables))
    assert row["attempt"] == 2
    replay(tables, "r3").finish()
    assert [(row["attempt"], row["text"]) for row in visible(tables, "kept")] == [(2, "FAIL")]
    assert failures.backlog().messages == 0


def test_returned_messages_are_not_replayed(tables):
    returning = Memory(deliveries_=(("a", b"a"), ("b", b"fail")), on_failure="nack")
    Run(tables, returning, "r1").finish()
    assert [row["message_id"] for row in given_out(source_of(tables))] == ["a"]


@pytest.mark.parametrize("step", ["before work", "before decide", "before publish"])
def test_compaction_at_any_time_changes_nothing(tables, step):
    Run(tables, Memory(deliveries_=(("a", b"a"), ("b", b"fail b"))), "r1").finish()
    Run(tables, Memory(deliveries_=(("c", b"c"),)), "r2").finish()

    def compact(now: str) -> None:
        if now == step:
            for name in tables.names:
                tables[name].open().optimize.compact()

    run = replay(tables, "r3")
    Run(tables, Memory(deliveries_=(("d", b"d"),)), "r4").finish()
    compact("before work")
    run.work()
    compact("before decide")
    run.decide()
    compact("before publish")
    run.publish()

    assert texts(tables) == ["A", "C", "FAIL B", "d"]
    assert sorted(row["message_id"] for row in visible(tables, "outcomes")) == ["a", "b", "c", "d"]


def test_a_replay_that_dies_half_way_is_finished_by_publishing_again(tables, monkeypatch):
    Run(tables, Memory(deliveries_=(("a", b"a"), ("b", b"b"))), "r1").finish()
    run = replay(tables, "r2").work().decide()
    real = tables["kept"].swap.__func__
    calls = []

    def die(self, *args, **kwargs):
        calls.append(self.name)
        if len(calls) == 2:
            raise RuntimeError("killed")
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("pipeline_platform.lake.tables.Table.swap", die)
        with pytest.raises(RuntimeError, match="killed"):
            run.publish()
    run.publish()

    assert texts(tables) == ["A", "B"]
    assert len(visible(tables, "messages")) == 2


def test_a_replay_of_removed_messages_is_refused_by_window(tables):
    Run(tables, Memory(deliveries_=(("a", b"a"), ("b", b"b"))), "r1").finish()
    source = source_of(tables)
    raw = tables["messages"]
    handle = raw.open()
    raw.swap(handle, "retention", [], removed=raw.files(handle))
    with pytest.raises(SourceError, match=rf"window {WINDOW}: 2 decided messages are missing"):
        given_out(source, 1)


def receive(tables: Tables, count: int, receive_id: str, window: str = WINDOW, payload: bytes = b"x") -> None:
    source = Memory(deliveries_=tuple((f"{window}-{number}", payload) for number in range(count)))
    Run(tables, source, receive_id, windows=(window,)).finish()


def ids(source: ReplayedMessages, share: Share) -> list[str]:
    return [row["message_id"] for batch in source.read(share, "r") for row in batch.to_pylist()]


def test_a_plan_tells_how_many_messages_a_share_has_at_the_most(tables):
    receive(tables, 30, "r1")
    receive(tables, 5, "r2", LATER)
    shares = source_of(tables, WINDOW, LATER).plan(1, 4, "r")
    assert [(share.window, share.messages) for share in shares] == [(WINDOW, 30), (LATER, 5)]


def test_a_large_window_is_given_out_in_buckets_each_message_in_one(tables, monkeypatch):
    monkeypatch.setattr(replaying, "BUCKET_ROWS", 10)
    receive(tables, 25, "r1", payload=b"fail")
    failures = FailedMessages(name="memory", lake=tables.lake, pipeline="keeping")
    Run(tables, failures, "r2", origin="failed").finish()
    source = source_of(tables, WINDOW)
    shares = source.plan(1, 2, "r")
    assert len(shares) == 5, "of fifty outcomes, two of each message"
    assert sorted(each for share in shares for each in ids(source, share)) == sorted(
        f"{WINDOW}-{number}" for number in range(25)
    )


def test_a_task_holds_the_ids_of_its_bucket_and_no_others(tables, monkeypatch):
    receive(tables, 10_000, "r1")
    source = source_of(tables, WINDOW)
    monkeypatch.setattr(replaying, "_BATCH_ROWS", 250)

    def peak(of: int) -> int:
        monkeypatch.setattr(replaying, "BUCKET_ROWS", 10_000 // of)
        share, *_ = source.plan(1, 1, "r")
        tracemalloc.start()
        try:
            assert sum(batch.num_rows for batch in source.read(share, "r"))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(of=20) < peak(of=1) / 5


def test_a_replay_of_more_than_a_hundred_messages_is_read_in_spark_tasks(filled_on_spark, monkeypatch):
    def in_the_driver(*_: Any) -> None:
        raise AssertionError("the driver read messages")

    flow = filled_on_spark(Obedient, (b"%d" % number for number in range(FEW + 1)))
    run(flow)
    monkeypatch.setattr(ReplayedMessages, "read", in_the_driver)
    replayed = run(flow, "messages")

    words = rows(flow, "words")
    assert sorted(map(int, words["word"])) == list(range(FEW + 1))
    assert set(words["receive_id"]) == {replayed.receive_id}
