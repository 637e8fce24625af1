"""Draining of pipelines and producers."""

import math
from collections import Counter
from datetime import timedelta

import pytest

from pipeline_platform.control.drain import DrainCancelledError, drain
from pipeline_platform.control.pace import Pace
from pipeline_platform.model.bound_producer import BoundProducer
from tests.fixtures.control import TEN_A_MINUTE, on_both_databases
from tests.fixtures.pipelines_under_test import Coasts, Told

SOON = timedelta(seconds=30)


def paced(store, clock, limit=None, stops=("told", "r")):
    def sleep(seconds: float) -> None:
        clock.now += seconds

    return Pace(store, "told", limit, None, stops, sleep=sleep, monotonic=clock, jitter=lambda: 0.0)


def test_messages_start_until_the_drain_deadline_and_not_later(store, clock):
    pace = paced(store, clock)
    store.drain("told", "why", SOON)
    ends = clock.now + 30

    begun = 0
    for _ in pace.each(range(1_000)):
        begun += 1
        clock.now += 1

    assert (begun, clock.now) == (30, ends)
    assert pace.permitted(5)[0] == 0
    store.resume("told")
    assert pace.permitted(5)[0] == 0, "what this task gave back must not be begun by it"
    assert paced(store, clock).permitted(5)[0] == 5, "the next run is another"


def test_a_second_drain_postpones_nothing_and_a_shorter_one_holds(store, clock):
    store.drain("told", "why", SOON)
    ends = store.draining("told")
    clock.now += 20
    store.drain("told", "once more", SOON)
    assert (store.draining("told"), store.paused("told")) == (ends, "once more")
    store.drain("told", "now", timedelta(seconds=1))
    assert store.draining("told") == ends - timedelta(seconds=9)
    store.resume("told")
    store.drain("told", "later", SOON)
    assert store.draining("told") == ends + timedelta(seconds=20)


def test_a_task_without_a_limit_notices_a_drain_within_seconds(store, clock):
    begun = 0
    for _ in paced(store, clock).each(range(1_000)):
        begun += 1
        clock.now += 1
        if begun == 2:
            store.drain("told", "why", timedelta(microseconds=1))
    assert begun == 5


def test_a_task_that_waits_for_its_interval_gives_up_when_the_drain_s_time_is_over(store, clock):
    store.take({"told": TEN_A_MINUTE}, 10)
    store.drain("told", "why", timedelta(seconds=12))
    ends = clock.now + 12
    assert paced(store, clock, TEN_A_MINUTE).permitted(5)[0] == 0
    assert clock.now == ends, "the next interval begins later"
    assert store.spare("told", TEN_A_MINUTE, timedelta(minutes=1)) == 10, "no permit is taken for nothing"


def test_messages_that_begin_in_a_drain_keep_to_the_limit_and_to_their_order(store, clock):
    store.drain("told", "why", timedelta(seconds=90))
    begun = []
    for number in paced(store, clock, TEN_A_MINUTE).each(range(1_000)):
        begun.append((number, clock.now // 60))
        clock.now += 0.1
    assert [number for number, _ in begun] == [*range(20)]
    assert [*Counter(minute for _, minute in begun).values()] == [10, 10]


@pytest.mark.parametrize(("stops", "begins"), [(("told", "r"), 0), (("told", "other"), 9), ((), 9)])
def test_a_run_that_is_stopped_stops_alone(store, clock, stops, begins):
    store.stop("r", timedelta(microseconds=1))
    clock.now += 1
    assert paced(store, clock, stops=stops).permitted(9)[0] == begins


@on_both_databases
def test_a_drain_pauses_and_is_lifted_by_a_pause_a_resume_or_the_end_of_the_receive(store, clock):
    store.drain("told", "why", SOON)
    assert store.paused("told") == "why"
    assert (store.draining("told").timestamp(), store.draining("other")) == (clock.now + 30, None)
    store.pause("told", "still")
    assert (store.paused("told"), store.draining("told")) == ("still", None)
    store.drain("told", "", SOON)
    store.resume("told")
    assert (store.paused("told"), store.draining("told")) == (None, None)

    store.claim("told", "r", "run", wanted=1, capacity=1, lease_s=60)
    store.stop("r", SOON)
    store.end("r")
    assert store.take({"told": None}, 1, ["r"]).stop_s == math.inf


def test_a_drain_applies_to_all_producers_or_to_one(store, clock):
    store.drain("coasts/east", "moves", timedelta(microseconds=1))
    clock.now += 1
    east, west, backfill = ("coasts", "coasts/east"), ("coasts", "coasts/west"), ("coasts",)
    assert [paced(store, clock, stops=stops).permitted(1)[0] for stops in (east, west, backfill)] == [0, 1, 1]
    store.drain("coasts", "all", timedelta(microseconds=1))
    clock.now += 1
    assert [paced(store, clock, stops=stops).permitted(1)[0] for stops in (east, west, backfill)] == [0, 0, 0]


def test_a_drain_waits_for_active_runs_and_logs_them(store, clock):
    store.claim("told", "a", "run", wanted=7, capacity=100, lease_s=6_000)
    store.claim("told", "b", "another run", wanted=5, capacity=100, lease_s=6_000)
    said = []

    def sleep(seconds: float) -> None:
        clock.now += seconds
        store.end("ab"[len(said) - 1])

    assert (
        drain(store, BoundProducer(Told), "moves", log=said.append, sleep=sleep) == "told is drained and paused: moves"
    )
    assert said[0].startswith("Draining told: 12 messages in 2 runs; they may start ")
    assert said[1].startswith("Draining told: 5 messages in 1 run; they may start ")
    assert (store.paused("told"), store.draining("told")) == ("moves", None)


def test_a_drain_counts_a_continuous_run_once_and_waits_for_its_end(store):
    store.stand_by("told", "run", 6_000)
    store.claim("told", "a", "run", wanted=7, capacity=100, lease_s=6_000)
    said = []

    def sleep(_: float) -> None:
        store.end("a" if len(said) == 1 else "run")

    drain(store, BoundProducer(Told), "moves", log=said.append, sleep=sleep)
    counts = ["7 messages in 1 run", "0 messages in 1 run"]
    assert [line.partition(": ")[2].partition(";")[0] for line in said] == counts


def test_a_drain_reports_crashed_runs_and_ends_on_resume(store, clock):
    store.claim("coasts/east", "dead", "run", wanted=3, capacity=100, lease_s=-1)
    said = drain(store, BoundProducer(Coasts, "east"), "moves", log=print)
    assert said.endswith("; 3 messages in 1 run crashed; the first run after `resume` finishes their receives")
    store.claim("coasts/west", "live", "run", wanted=2, capacity=100, lease_s=60)
    with pytest.raises(DrainCancelledError, match="by a resume or a pause; 2 messages in 1 run still active"):
        drain(store, BoundProducer(Coasts), "moves", log=print, sleep=lambda _: store.resume("coasts"))


def test_a_resume_during_the_last_run_is_kept(store):
    store.claim("told", "a", "run", wanted=7, capacity=100, lease_s=6_000)

    def sleep(_: float) -> None:
        store.resume("told")
        store.end("a")

    with pytest.raises(DrainCancelledError, match="told: no active runs, but it was resumed during the drain"):
        drain(store, BoundProducer(Told), "moves", log=print, sleep=sleep)
    assert store.paused("told") is None
