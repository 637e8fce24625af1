"""Runs of a pipeline with two producers: which run finishes a crashed run, and limits of a retry or replay."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from pipeline_platform import Pipeline, Producer, RateLimiting
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.run.begin import begin
from pipeline_platform.run.finish import finish_others
from pipeline_platform.run.flow import Flow, no_source
from tests.fixtures.flow import begun, flow_of
from tests.fixtures.small_lake import WINDOW, Keeping, Memory, Run, visible

A_DAY = RateLimiting(allowed_messages=5, interval=timedelta(days=1))


class Coasts(Keeping):
    """A pipeline with two sources; `west` may handle five messages a day."""

    name = "coasts"
    producer = None
    producers = {
        "east": Producer(source="east_queue", concurrency=3),
        "west": Producer(source="west_queue", max_runs=2, rate_limiting=A_DAY),
    }


class Spark:
    """Spark work that records which receives it interrupted."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def interruptTag(self, tag: str) -> None:  # noqa: N802
        self.ended.append(tag)


class Place:
    """A lake, a control store and a source for each producer, with flows."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lake = folder, Lake(root=f"{folder}/lake")
        self.sources = {name: Memory(name=name) for name in ("east", "west")}
        self.tables = Tables(self.lake, Coasts)
        self.control = self.flow().control

    def flow(self, producer: str = "", pipeline: type[Pipeline] = Coasts) -> Flow:
        source = self.sources.get(producer) or no_source(pipeline, self.lake)
        return flow_of(self.folder, pipeline, source, producer=producer)

    def left(self, receive_id: str, producer: str, *, origin: str = "source", decided: bool = True) -> Run:
        """Leave the receive of a run that crashed before it published anything."""
        source = Memory(name=producer or "east", deliveries_=((f"{receive_id} 1", receive_id.encode()),))
        run = Run(self.tables, source, receive_id, origin=origin, producer=producer).work()
        return run.decide() if decided else run

    def begin(self, producer: str = "", pipeline: type[Pipeline] = Coasts) -> list[str]:
        """Begin a run of a producer, or a retry of all producers; return its log."""
        said: list[str] = []
        flow = self.flow(producer, pipeline)
        receive = begin(
            flow, origin="source" if producer else "failed", run_id="next", windows=[WINDOW], log=said.append
        )
        flow.control.end(receive.receive_id)
        flow.ledger.remove(receive.receive_id)
        return said

    def texts(self) -> list[str]:
        return sorted(row["text"] for row in visible(self.tables, "kept"))


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def unfinished(place: Place) -> list[str]:
    return place.flow().ledger.unfinished()


@pytest.mark.parametrize("another", ["west", ""], ids=["the other's run", "a backfill"])
def test_what_a_dead_run_decided_is_published_by_any_and_acknowledged_by_its_own_producer_s_next(place, another):
    place.left("dead", "east")
    place.begin(another)
    assert (place.texts(), unfinished(place)) == (["dead"], ["dead"])
    assert place.sources["east"].told == place.sources["west"].told == []
    place.begin("east")
    assert (place.texts(), unfinished(place)) == (["dead"], [])
    assert place.sources["east"].told == [("ack", "q", ["ack-dead 1"])]


@pytest.mark.parametrize("another", ["west", ""], ids=["the other's run", "a backfill"])
def test_what_a_dead_run_did_not_decide_is_given_up_by_its_own_producer_s_next(place, another):
    place.left("dead", "east", decided=False)
    place.begin(another)
    assert unfinished(place) == ["dead"]
    place.begin("east")
    assert (place.texts(), unfinished(place)) == ([], [])


@pytest.mark.parametrize("next_one", ["east", "west", ""])
def test_what_a_dead_backfill_left_is_finished_by_any(place, next_one):
    place.left("dead", "", origin="failed")
    said = place.begin(next_one)
    assert "receive dead" in said[0]
    assert (place.texts(), unfinished(place)) == (["dead"], [])


@pytest.mark.parametrize(
    ("gone", "pipeline", "option"),
    [("north", Coasts, "producers['north']"), ("", Coasts, "producer"), ("east", Keeping, "producers['east']")],
    ids=["one of several", "the only one", "all but one without a name"],
)
def test_what_a_producer_left_that_is_gone_is_published_and_reported_each_time(place, gone, pipeline, option):
    place.tables = Tables(place.lake, pipeline)
    place.left("dead", gone)
    for _ in range(2):
        (report,) = [said for said in place.begin("", pipeline) if "dead" in said]
        assert "receive dead" in report
        assert f"from `{option}`, which {pipeline.name} no longer has" in report
    assert place.texts() == ["dead"]


def test_what_lives_is_left_alone_whosever_it_is(place):
    place.left("alive", "north", decided=False)
    place.control.claim("coasts/north", "alive", "run", wanted=1, capacity=1, lease_s=60)
    assert not [said for said in place.begin("west") if "alive" in said]
    assert unfinished(place) == ["alive"]


@pytest.mark.parametrize("producer", ["west", ""])
def test_spark_work_of_the_dead_is_ended_whosever_it_is(place, producer):
    """It would delay this run's receive, and its own producer may be paused."""
    place.left("dead", "east", decided=False)
    place.control.claim("coasts/east", "dead", "run", wanted=1, capacity=1, lease_s=60)
    place.control.let_go("run")
    spark = Spark()
    assert finish_others(replace(place.flow(producer), session=lambda: spark)) == []  # type: ignore[arg-type,return-value]
    assert spark.ended == ["receive-dead"]
    assert unfinished(place) == [claim.receive_id for claim in place.control.over("coasts/east")] == ["dead"]


def test_a_run_is_limited_by_its_producer_and_a_run_of_none_by_all(place):
    per_run = Coasts.processors.per_run
    east, west, neither = (place.flow(name) for name in ("east", "west", ""))
    assert east.rate_limits == {"coasts/east": None}
    assert west.rate_limits == {"coasts/west": A_DAY}
    assert neither.rate_limits == {"coasts/east": None, "coasts/west": A_DAY}
    assert [flow.quota.capacity for flow in (east, west, neither)] == [per_run, 2 * per_run, 3 * per_run]
    assert [flow.concurrency for flow in (east, west, neither)] == [3, 2, 3]
    assert neither.pace().permitted(20)[0] == 1, "a task takes one permit until it knows how fast it is"
    assert place.control.spare("coasts/west", A_DAY, timedelta(0)) == 4


def test_a_pull_takes_on_what_its_own_limit_gives(place):
    demands = {}
    for name in ("east", "west"):
        receive = begun(place.flow(name), run_id="r")
        demands[name] = receive.demand
        assert receive.producer == name
        assert [claim.receive_id for claim in place.control.in_flight(f"coasts/{name}")] == [receive.receive_id]
    assert demands["east"] == Coasts.processors.per_run
    assert demands["west"] in (5, 10), "of the days that begin while a run lasts"
