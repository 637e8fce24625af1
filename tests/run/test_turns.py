"""Runs of a pipeline that keeps messages in order: each waits for its turn, or leases other partitions."""

from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from pipeline_platform import PipelineError, Processors, Producer
from pipeline_platform.control import quota
from pipeline_platform.control.demand import RUN_LASTS
from pipeline_platform.control.run_size import rate_of
from pipeline_platform.lake.failures.failure_events import Selection
from pipeline_platform.lake.replay import ReplayedMessages
from pipeline_platform.run.begin import begin
from pipeline_platform.run.intake import Intake
from tests.fixtures.flow import begun, flow_of, rows, run
from tests.fixtures.flow_pipelines import Obedient, Paced
from tests.fixtures.memory_sources import MEMORY, MemoryLog
from tests.fixtures.small_lake import WINDOW, Keeping, Memory, Run, numbered


class Lengths(Keeping):
    """In order by the length of a payload."""

    partition_by = lambda message: len(message.data)  # noqa: E731


class BySource(Keeping):
    """In order by the source's partition."""

    producer = Producer(source="log", max_runs=2)
    partition_by = "source"


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.setattr(Intake, "room_within_s", 0.0)
    return partial(flow_of, tmp_path)


def log(**options: bool) -> MemoryLog:
    log = MemoryLog(name="log", queue=MEMORY.create(), **options)
    log.send([b"%d" % n for n in range(6)])
    return log


def test_a_pull_beside_another_gets_nothing_until_that_has_ended(made):
    flow = made(Lengths, Memory())
    first = begun(flow, run_id="first", demand=5)
    second = begun(flow, run_id="second", demand=5)
    flow.control.end(first.receive_id)
    third = begun(flow, run_id="third", demand=5)
    assert [receive.demand for receive in (first, second, third)] == [5, 0, 5]


@pytest.mark.parametrize("pipeline", [Lengths, BySource])
def test_a_backfill_and_a_pull_take_turns_whatever_the_source(made, pipeline):
    flow = made(pipeline, log(one_receive_per_partition=True))
    Run(flow.tables, Memory(deliveries_=numbered(b"fail")), "failed").finish()
    pull = begun(flow, run_id="pull", demand=5)
    with pytest.raises(PipelineError, match="capacity for 0 of the 1 messages of this retry"):
        begun(flow, [WINDOW], origin="failed", run_id="backfill")
    with pytest.raises(PipelineError, match="capacity for 0 of the 1 messages of this replay"):
        begun(flow, [WINDOW], origin="messages", run_id="replay")
    flow.control.end(pull.receive_id)
    assert begun(flow, [WINDOW], origin="failed", run_id="backfill").demand == 1
    assert begun(flow, run_id="next", demand=5).demand == 0


def test_a_retry_of_due_failures_without_capacity_ends_and_is_requested_again(made):
    flow = made(Lengths, Memory())
    Run(flow.tables, Memory(deliveries_=numbered(b"fail")), "failed").finish()
    begun(flow, run_id="pull", demand=5)
    due = Selection(state="due", due_by=datetime.now(UTC))
    assert begun(flow, [WINDOW], origin="failed", run_id="retry", selection=due).demand == 0
    assert {claim.run_id for claim in flow.control.in_flight("keeping")} == {"pull"}


def test_pulls_at_once_from_a_source_that_leases_partitions_get_different_ones(made):
    flow = made(BySource, log(one_receive_per_partition=True))
    held = []
    for run_id, demand in ("first", 1), ("second", 5), ("third", 5):
        receive = begin(flow, origin="source", run_id=run_id, windows=[WINDOW], demand=demand)
        assert receive.demand == demand
        shares = flow.source.plan(demand, 1, receive.receive_id)
        held.append({span[0] for share in shares for span in share.at["spans"]})
    assert held == [{"0"}, {"1"}, set()]


def test_a_run_that_waited_for_a_dead_one_clears_up_after_it_before_it_receives(made, monkeypatch):
    monkeypatch.setattr(Intake, "room_within_s", 60.0)
    source = Memory(deliveries_=numbered(b"one"))
    interrupted: list[str] = []
    flow = made(Lengths, source)
    dead = begun(flow, run_id="dead")
    monkeypatch.setattr(
        "pipeline_platform.run.work.spark_work.SparkWork.interrupt", lambda w: interrupted.append(w.receive_id)
    )
    monkeypatch.setattr(quota.time, "sleep", lambda _: flow.control.let_go("dead"))

    receive = begun(flow, run_id="next")

    assert interrupted == [dead.receive_id]
    assert flow.ledger.unfinished() == [receive.receive_id]


def test_a_pull_that_nobody_sized_takes_on_what_the_rate_limit_gives_while_a_run_lasts(filled):
    flow = filled(Paced, [b"word"])
    receive = begun(flow)
    assert 0 < receive.demand <= 10 * (RUN_LASTS.total_seconds() + 1)


def test_what_a_pull_handled_tells_how_many_the_next_takes_on(filled, monkeypatch):
    processors = Processors(concurrency=2, target_run_time=timedelta(hours=1))
    monkeypatch.setattr(Obedient, "processors", processors)
    flow = filled(Obedient, [b"word"] * 300)
    assert run(flow).demand == 200, "nobody knows yet how fast it is"
    rate = rate_of(flow.control.ended("obedient"))
    assert rate is not None

    assert flow.quota.for_a_pull() == min(rate.within(3_600), processors.per_run) > 10_000


def test_a_replay_takes_its_windows_whole_or_not_at_all(filled, monkeypatch):
    monkeypatch.setattr(Intake, "room_within_s", 0.0)
    flow = filled(Obedient, [b"one", b"two", b"three"])
    run(flow)
    flow.control.claim("obedient", "another", "run", wanted=3_998, capacity=4_000, lease_s=60)
    with pytest.raises(PipelineError, match=r"capacity for 2 of the 3 messages of this replay.*pause the pipeline"):
        run(flow, "messages")
    flow.control.end("another")
    run(flow, "messages")
    assert sorted(rows(flow, "words")["word"]) == ["one", "three", "two"]


def test_a_replay_claims_its_room_last_for_nobody_renews_it_while_it_looks(filled, monkeypatch):
    flow = filled(Obedient, [b"one"])
    run(flow)
    held: list[int] = []
    look = ReplayedMessages.finished

    def finished(source: ReplayedMessages) -> tuple[str, ...]:
        held.append(len(flow.control.in_flight("obedient")))
        return look(source)

    monkeypatch.setattr(ReplayedMessages, "finished", finished)
    begun(flow, origin="messages")

    assert held == [0]
