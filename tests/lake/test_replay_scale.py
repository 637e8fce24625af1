"""A replay of many messages: in Spark tasks, of which each holds a part, and past the driver."""

import tracemalloc
from contextlib import closing
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake import replay
from pipeline_platform.lake.failed import FailedMessages
from pipeline_platform.lake.replay import ReplayedMessages
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.run import steps
from pipeline_platform.run.begin import begin
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.spark_work import FEW
from pipeline_platform.source.contract import Share
from tests.fixtures.flow_pipelines import Obedient
from tests.fixtures.small_lake import WINDOW, Memory, Run
from tests.fixtures.spark import WarmSpark

LATER = "2026-01-01T0100"


def source_of(tables: Tables, *windows: str) -> ReplayedMessages:
    version = tables["outcomes"].open().version()
    return ReplayedMessages(name="memory", lake=tables.lake, pipeline="keeping", windows=windows, version=version)


def receive(tables: Tables, count: int, receive_id: str, window: str = WINDOW, payload: bytes = b"x") -> None:
    source = Memory(deliveries_=tuple((f"{window}-{number}", payload) for number in range(count)))
    Run(tables, source, receive_id, windows=(window,)).finish()


def ids(source: ReplayedMessages, share: Share) -> list[str]:
    return [row["message_id"] for batch in source.read(share, "r") for row in batch.to_pylist()]


def test_a_plan_tells_how_many_messages_a_share_has_at_the_most(tables: Tables) -> None:
    receive(tables, 30, "r1")
    receive(tables, 5, "r2", LATER)

    shares = source_of(tables, WINDOW, LATER).plan(1, 4, "r")

    assert [(share.window, share.messages) for share in shares] == [(WINDOW, 30), (LATER, 5)]


def test_a_large_window_is_given_out_in_buckets_each_message_in_one(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "BUCKET_ROWS", 10)
    receive(tables, 25, "r1", payload=b"fail")
    failures = FailedMessages(name="memory", lake=tables.lake, pipeline="keeping")
    Run(tables, failures, "r2", origin="failed").finish()
    source = source_of(tables, WINDOW)

    shares = source.plan(1, 2, "r")

    assert len(shares) == 5, "of fifty outcomes, two of each message"
    assert sorted(each for share in shares for each in ids(source, share)) == sorted(
        f"{WINDOW}-{number}" for number in range(25)
    )


def test_a_task_holds_the_ids_of_its_bucket_and_no_others(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    receive(tables, 40_000, "r1")
    source = source_of(tables, WINDOW)
    monkeypatch.setattr(replay, "_BATCH_ROWS", 1_000)

    def peak(of: int) -> int:
        monkeypatch.setattr(replay, "BUCKET_ROWS", 40_000 // of)
        share, *_ = source.plan(1, 1, "r")
        tracemalloc.start()
        try:
            assert sum(batch.num_rows for batch in source.read(share, "r"))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(of=20) < peak(of=1) / 5


def test_a_replay_of_more_than_a_hundred_messages_is_read_in_spark_tasks(
    tmp_path: Path, warm_spark: WarmSpark, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_the_driver(*_: Any) -> None:
        raise AssertionError("the driver read messages")

    queue = TableQueue(name="queue", url=f"sqlite:///{tmp_path}/queue.sqlite")
    queue.create()
    queue.enqueue(b"%d" % number for number in range(FEW + 1))
    lake, control = Lake(root=str(tmp_path / "lake")), ControlStore(f"sqlite:///{tmp_path}/control.sqlite")
    with closing(warm_spark.resource()) as spark, closing(control):
        flow = Flow(Obedient, queue, lake, control, lambda: spark.spark_session)
        for origin in ("source", "messages"):
            receive = begin(flow, origin=origin, run_id="test", windows=[WINDOW])  # type: ignore[arg-type]
            steps.receive_messages(flow, receive)
            steps.handle_messages(flow, receive)
            steps.decide(flow, receive)
            steps.publish(flow, receive)
            steps.acknowledge(flow, receive)
            monkeypatch.setattr(ReplayedMessages, "read", in_the_driver)

    words = pl.read_delta(flow.tables["words"].uri)
    assert sorted(map(int, words["word"])) == list(range(FEW + 1))
    assert set(words["receive_id"]) == {receive.receive_id}
