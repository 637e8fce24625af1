"""Runs of a pipeline whose messages keep an order: each waits for its turn, or gets other partitions."""

from pathlib import Path
from typing import NoReturn

import pytest

from pipeline_platform.control import quota
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.options import Batcher, PipelineError, Producer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.run.begin import begin, resume
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import Intake
from pipeline_platform.source.contract import Source
from tests.fixtures.memory_sources import MEMORY, MemoryLog
from tests.fixtures.small_lake import WINDOW, Keeping, Memory, Run, numbered


class Lengths(Keeping):
    """By the length of a payload."""

    partition_by = lambda message: len(message.data)  # noqa: E731


class BySource(Keeping):
    """By the source's own partition."""

    producer = Producer(source="log", max_runs=2)
    partition_by = "source"


class InBatches(Keeping):
    """Only its batches are in order."""

    batchers = {"kept": Batcher(partition_by="source")}

    def handle_batch(self, batcher, messages, batch_info, context):
        return messages


class Place:
    """A lake and a control store, and what runs there."""

    def __init__(self, folder: Path) -> None:
        self.lake = Lake(root=str(folder / "lake"))
        self.control = ControlStore(f"sqlite:///{folder}/control.sqlite")

    def flow(self, pipeline: type[Pipeline], source: Source) -> Flow:
        def no_spark() -> NoReturn:
            raise AssertionError("this needs no Spark")

        return Flow(pipeline, source, self.lake, self.control, no_spark)

    def failed(self, pipeline: type[Pipeline]) -> None:
        """Leave an open failure."""
        Run(Tables(self.lake, pipeline), Memory(deliveries_=numbered(b"fail")), "failed").finish()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(Intake, "room_within_s", 0.0)
    return Place(tmp_path)


def log(**options: bool) -> MemoryLog:
    log = MemoryLog(name="log", queue=MEMORY.create(), **options)
    log.send([b"%d" % n for n in range(6)])
    return log


@pytest.mark.parametrize("pipeline", [Lengths, BySource, InBatches])
def test_a_pull_beside_another_gets_nothing_until_that_has_ended(place: Place, pipeline: type[Pipeline]) -> None:
    flow = place.flow(pipeline, Memory())
    first = begin(flow, origin="source", run_id="first", windows=[WINDOW], demand=5)

    second = begin(flow, origin="source", run_id="second", windows=[WINDOW], demand=5)
    flow.control.end(first.receive_id)
    third = begin(flow, origin="source", run_id="third", windows=[WINDOW], demand=5)

    assert [one.demand for one in (first, second, third)] == [5, 0, 5]


@pytest.mark.parametrize("pipeline", [Lengths, BySource])
def test_a_backfill_and_a_pull_take_turns_whatever_the_source(place: Place, pipeline: type[Pipeline]) -> None:
    place.failed(pipeline)
    flow = place.flow(pipeline, log(one_receive_per_partition=True))
    pull = begin(flow, origin="source", run_id="pull", windows=[WINDOW], demand=5)

    with pytest.raises(PipelineError, match="room for 0 of the 1 messages of this backfill"):
        begin(flow, origin="failed", run_id="backfill", windows=[WINDOW])
    with pytest.raises(PipelineError, match="room for 0 of the 1 messages of this replay"):
        begin(flow, origin="messages", run_id="replay", windows=[WINDOW])
    flow.control.end(pull.receive_id)
    assert begin(flow, origin="failed", run_id="backfill", windows=[WINDOW]).demand == 1
    assert begin(flow, origin="source", run_id="next", windows=[WINDOW], demand=5).demand == 0


def test_pulls_at_once_from_a_source_that_leases_partitions_get_different_ones(place: Place) -> None:
    flow = place.flow(BySource, log(one_receive_per_partition=True))

    held = []
    for run_id, demand in ("first", 1), ("second", 5), ("third", 5):
        receive = begin(flow, origin="source", run_id=run_id, windows=[WINDOW], demand=demand)
        assert receive.demand == demand
        shares = flow.source.plan(demand, 1, receive.receive_id)
        held.append({span[0] for share in shares for span in share.at["spans"]})

    assert held == [{"0"}, {"1"}, set()]


def test_without_the_source_s_option_its_pulls_take_turns(place: Place) -> None:
    flow = place.flow(BySource, log())

    demands = [begin(flow, origin="source", run_id=n, windows=[WINDOW], demand=2).demand for n in ("first", "second")]

    assert demands == [2, 0]


def test_a_run_that_waited_for_a_dead_one_clears_up_after_it_before_it_receives(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Intake, "room_within_s", 60.0)
    source = Memory(deliveries_=numbered(b"one"))
    interrupted: list[str] = []
    flow = place.flow(Lengths, source)
    dead = begin(flow, origin="source", run_id="dead", windows=[WINDOW])
    monkeypatch.setattr(
        "pipeline_platform.run.spark_work.SparkWork.interrupt", lambda w: interrupted.append(w.receive_id)
    )
    monkeypatch.setattr(quota.time, "sleep", lambda _: flow.control.let_go("dead"))

    receive = begin(flow, origin="source", run_id="next", windows=[WINDOW])

    assert interrupted == [dead.receive_id]
    assert flow.ledger.unfinished() == [receive.receive_id]


def test_a_re_execution_waits_for_its_turn(place: Place) -> None:
    flow = place.flow(Lengths, Memory(deliveries_=numbered(b"one")))
    begin(flow, origin="source", run_id="other", windows=[WINDOW], demand=1)
    run = Run(flow.tables, flow.source, "old").work()

    with pytest.raises(PipelineError, match="no room for the 1 messages of receive old while other runs are under way"):
        resume(flow, run.receive, "again")
