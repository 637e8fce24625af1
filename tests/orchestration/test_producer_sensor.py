"""The producer sensor: ticks on a real instance, with a real queue and control store."""

import re
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.events import DagsterEvent

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.claims import Ended
from pipeline_platform.control.demand import Waiting
from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.options import Batcher, Processors, Producer
from pipeline_platform.orchestration.asset_windows import window_now
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.orchestration.sensors import producers, timely_calls
from pipeline_platform.orchestration.sensors.producers import producer_sensor
from pipeline_platform.source.backlog import Backlog
from tests.fixtures.pipelines_under_test import Told
from tests.fixtures.sensor import TAGS, Asked, Limited, Place, tags

ROOT = Path(__file__).parents[2]


# Asking


@pytest.mark.parametrize("knows_its_backlog", [True, False])
def test_no_tick_filters_all_runs_by_their_tags(place, monkeypatch, knows_its_backlog):
    """SQLite would read every run of the pipeline that Dagster keeps."""
    source = place.queue if knows_its_backlog else Mute(name="queue", url=place.queue.url)
    place.enqueue(170)
    queries = []
    for name in ("get_runs", "get_run_records"):
        query = getattr(type(place.instance), name)

        def asked(self: Any, filters: Any = None, *given: Any, query: Any = query, **options: Any) -> Any:
            queries.append(filters)
            return query(self, filters, *given, **options)

        monkeypatch.setattr(type(place.instance), name, asked)

    assert place.tick(source=source).run_requests
    assert place.tick(source=source)

    assert len(queries) > 4
    assert [filters for filters in queries if filters and filters.tags] == []


def test_it_asks_for_runs_by_demand_on_the_open_window(place):
    place.enqueue(170)

    requests = place.tick().run_requests

    assert [request.tags[TAGS.demand] for request in requests] == ["100", "70"]
    for request in requests:
        config = request.run_config["ops"]["asked"]["ops"]["receive_messages"]["config"]
        assert config == {"origin": "source", "demand": int(request.tags[TAGS.demand])}
        assert request.partition_key == window_now(Asked)
        assert request.tags["dagster/max_retries"] == "0"


def test_it_looks_as_often_as_its_producer_says():
    class Often(Told):
        name = "often"
        producer = Producer(source="queue", idle_timeout=None, interval=timedelta(seconds=10))

    assert producer_sensor(Told).minimum_interval_seconds == 4, "due when Dagster passes after 4.99 s"
    assert producer_sensor(Often).minimum_interval_seconds == 9, "due at its second pass, not at its first"


def test_what_is_not_worth_a_run_waits_for_patience_and_no_longer(place, at):
    place.enqueue(3)

    assert place.skips() == "3 messages wait; a run starts at 50, or after 30 s (waited 0 s)"
    at(timedelta(seconds=31))
    assert place.asked() == [3]


def test_messages_wait_for_their_batches_no_longer_than_the_shortest_batch_timeout(place, at, monkeypatch):
    timeouts = {"slow": timedelta(seconds=20), "fast": timedelta(seconds=10), "patient": None}
    monkeypatch.setattr(Asked, "batchers", {name: Batcher(batch_timeout=span) for name, span in timeouts.items()})
    place.enqueue(3)

    assert place.skips() == "3 messages wait; a run starts at 50, or after 10 s (waited 0 s)"
    at(timedelta(seconds=11))
    assert place.asked() == [3]


def test_a_tick_that_may_request_no_run_reads_no_failed_runs(place, monkeypatch):
    place.enqueue(900)
    assert place.asked() == [100, 100], "max_runs is 2"
    monkeypatch.setattr(producers, "reason_to_wait", lambda *_, **__: pytest.fail("it reads the failed runs"))
    assert "max_runs allows 2" in place.skips()


def test_where_runs_have_a_time_to_take_it_asks_for_what_the_last_ones_handled_in_so_long(place, monkeypatch):
    processors = Processors(concurrency=2, target_run_time=timedelta(seconds=30))
    monkeypatch.setattr(Asked, "processors", processors)
    monkeypatch.setattr(Asked, "producer", Producer(source="queue", idle_timeout=None, max_runs=1))
    place.enqueue(900)
    assert place.asked() == [200], "nobody knows yet how fast it is"

    for run in place.instance.get_runs():
        place.instance.delete_run(run.run_id)
    now = datetime.now(UTC)
    slow = Ended("r", "run", 600, now - timedelta(seconds=30), now)
    monkeypatch.setattr(ControlStore, "ended", lambda store, key, **_: [slow] if key == "asked" else [])
    assert place.asked() == [600]


def left_by_a_dead_run(place: Place, messages: int) -> None:
    """Make a claim that expires; the next run releases its messages."""
    place.control.claim("asked", "r", "dead", wanted=messages, capacity=200, lease_s=0.01)
    time.sleep(0.05)


def test_what_a_dead_run_left_and_the_source_counts_again_is_asked_for_once(place):
    left_by_a_dead_run(place, 70)
    place.enqueue(80)

    assert place.asked() == [80]
    assert "will lease them" in place.skips(), "one is enough"


# Holding back


def test_a_pause_is_a_reason_until_it_ends(place):
    place.enqueue(100)
    place.control.pause("asked", "new schema on Monday")

    assert place.skips() == "paused: new schema on Monday"
    place.control.resume("asked")
    assert place.asked() == [100]


def test_no_more_is_asked_for_than_the_rate_limit_will_give(place):
    place.enqueue(500)

    asked = place.asked(Limited)
    assert asked == [10], "of the current interval: the next run starts before the next one is over"
    assert "the rate limit" in place.skips(Limited)


FAILURE, SUCCESS, STARTED = dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.STARTED


def test_runs_that_fail_in_a_row_are_asked_for_with_a_growing_pause(place, at):
    place.enqueue(60)
    place.queued(tags(60), FAILURE)
    assert len(place.tick().run_requests) == 1, "one failure is no row"

    runs = [place.queued(tags(60), FAILURE) for _ in range(3)]
    said = place.skips()
    at(timedelta(seconds=18))
    assert place.skips() == said
    at(timedelta(seconds=22))

    assert re.fullmatch(rf"the last 4 runs failed; next run at ..:..:.. UTC; see run {runs[-1].run_id}", said)
    assert place.asked() == [60]


def test_runs_that_fail_together_are_one_failure(place):
    place.enqueue(60)
    runs = [place.queued(tags(60), dg.DagsterRunStatus.STARTED) for _ in range(6)]
    for run in runs:
        place.instance.report_run_failed(run)

    assert place.asked() == [60]


def test_one_success_ends_the_pause(place):
    place.enqueue(60)
    for _ in range(4):
        place.queued(tags(60), FAILURE)

    place.queued(tags(60), SUCCESS)

    assert place.asked() == [60]


def test_runs_of_others_and_red_ones_that_published_all_are_no_failures_in_a_row(place):
    place.enqueue(60)
    for _ in range(4):
        place.queued({RunTags.of(Limited).origin: "source", RunTags.of(Limited).demand: "60"}, FAILURE)
        place.queued({**tags(60), TAGS.origin: "failed"}, FAILURE)
        red = place.queued(tags(60), FAILURE)
        place.instance.add_run_tags(red.run_id, {TAGS.published: red.run_id})

    assert place.asked() == [60]


def test_a_source_that_stays_away_is_asked_less_and_less_often(place):
    away = TableQueue(name="queue", url=f"sqlite:///{place.folder}/elsewhere.sqlite")
    place.enqueue(170)
    place.tick(source=away)
    place.tick(source=away)

    waiting = Waiting.from_json(place.cursor)
    assert (waiting.unanswered, waiting.again_at is not None) == (1, True), "the second tick did not ask"
    assert "queue did not answer once; next attempt at" in place.skips()

    place.cursor = waiting.model_copy(update={"again_at": None}).to_json()
    assert sum(place.asked()) == 170, "it is back"
    assert Waiting.from_json(place.cursor).unanswered == 0


class Mute(TableQueue):
    """A source that does not report its backlog."""

    def backlog(self) -> Backlog:
        return Backlog(None)

    def backlog_up_to(self, most: int) -> Backlog:
        return self.backlog()


def test_a_source_that_cannot_tell_its_backlog_is_asked_less_often_while_it_gives_nothing(place):
    mute = Mute(name="queue", url=place.queue.url)
    for _ in range(3):
        place.queued({**tags(60), TAGS.received: "0"}, SUCCESS)
    place.cursor = Waiting(since=datetime.now(UTC) - 2 * Asked.producer.patience).to_json()

    assert "after 240 s" in str(place.tick(source=mute).skip_message)

    place.queued({**tags(60), TAGS.received: "5"}, SUCCESS)
    assert place.tick(source=mute).run_requests


def test_a_source_that_cannot_tell_its_backlog_is_asked_at_once_after_a_run_that_it_filled(place):
    mute = Mute(name="queue", url=place.queue.url)
    (first,) = place.tick(source=mute).run_requests
    run = place.queued(first.tags, STARTED)
    assert "after 30 s" in str(place.tick(source=mute).skip_message), "nobody knows what the first run gets"

    place.instance.add_run_tags(run.run_id, {TAGS.received: first.tags[TAGS.demand]})
    (second,) = place.tick(source=mute).run_requests
    run = place.queued(second.tags, STARTED)
    assert "2 runs active; max_runs allows 2" in str(place.tick(source=mute).skip_message)

    for under_way in place.instance.get_runs():
        ended = DagsterEvent(dg.DagsterEventType.RUN_SUCCESS.value, under_way.job_name)
        place.instance.report_dagster_event(ended, under_way.run_id)
    assert "after 30 s" in str(place.tick(source=mute).skip_message), "the second run has not said what it got"
    place.instance.add_run_tags(run.run_id, {TAGS.received: "99"})
    assert "after 30 s" in str(place.tick(source=mute).skip_message), "the source seems empty"


def test_a_source_that_cannot_tell_its_backlog_is_asked_after_a_run_by_hand_that_never_came_to_receive(place):
    place.queued({TAGS.origin: "source"}, FAILURE)  # as of `asked_pull` from its page: nobody asked it for so many

    assert place.tick(source=Mute(name="queue", url=place.queue.url)).run_requests


@pytest.mark.parametrize(("old_s", "asked_times"), [(300.0, 1), (0.0, 2)])
def test_a_source_that_hangs_delays_a_tick_for_a_short_time_and_a_late_answer_counts_for_some_minutes(
    place, monkeypatch, old_s, asked_times
):
    monkeypatch.setattr(timely_calls, "WITHIN_S", 0.2)
    monkeypatch.setattr(timely_calls, "OLD_S", old_s)
    released, asked = threading.Event(), []

    class Hung(TableQueue):
        def backlog_up_to(self, most: int | None) -> Backlog:
            asked.append(released.wait(30))
            return super().backlog_up_to(most)

    hung = Hung(name="queue", url=place.queue.url)
    place.enqueue(170)

    def tick() -> tuple[bool, bool]:
        place.cursor, started = Waiting(reported=datetime.now(UTC)).to_json(), time.monotonic()
        requests = place.tick(source=hung).run_requests
        return bool(requests), time.monotonic() - started < 5

    assert [tick(), tick()] == [(False, True)] * 2
    released.set()
    while not all(call.answer.done() for call in timely_calls._CALLS.values()):
        time.sleep(0.01)
    assert tick() == (True, True)
    assert len(asked) == asked_times, "the source is not called again while a call has not returned"


def test_what_a_source_lost_is_said_by_one_tick_and_again_where_more_is_lost(place):
    class Lossy(TableQueue):
        lost: str

        def backlog(self) -> Backlog:
            return Backlog(0, lost=self.lost)

        def backlog_up_to(self, most: int) -> Backlog:
            return self.backlog()

    def said(lost: str) -> str:
        return str(place.tick(source=Lossy(name="queue", url=place.queue.url, lost=lost)).skip_message).partition(
            ". Now: "
        )[0]

    first, more = "p has lost its messages from offset 0 up to 5", "p has lost its messages from offset 0 up to 9"
    assert [said(first), said(first), said(more), said(""), said(first)] == [
        f"the queue is empty; queue: {first}",
        "the queue is empty",
        f"the queue is empty; queue: {more}",
        "the queue is empty",
        f"the queue is empty; queue: {first}",
    ]


class InTurn(Told):
    """In order by the source's partition. By default, a table queue leases a partition to several runs."""

    name = "in_turn"
    producer = Producer(source="queue", idle_timeout=None, max_runs=3)
    partition_by = "source"


def claim(place: Place, **options: Any) -> None:
    place.control.claim("in_turn", "a", "other", wanted=1, capacity=300, lease_s=60, **options)


@pytest.mark.parametrize("alone", [True, False])
def test_no_run_is_asked_for_beside_another(place, alone):
    place.enqueue(70)
    claim(place, alone=alone)

    assert place.skips(InTurn) == "run other is active, and runs take turns to keep messages in order"
    place.control.end("a")
    assert place.asked(InTurn) == [70]


def test_one_run_is_asked_for_at_a_time(place):
    place.enqueue(250)

    assert place.asked(InTurn) == [100]


def test_a_source_that_leases_partitions_is_pulled_from_side_by_side_but_not_beside_a_backfill(place):
    options = {"partition_column": "customer", "one_receive_per_partition": True}
    apart = place.queue.model_copy(update={"name": "apart", "table": "apart", **options})
    apart.create()
    apart.enqueue((b"x" for _ in range(250)), ({"customer": str(n)} for n in range(250)))

    claim(place, alone=True)
    assert "runs take turns" in str(place.tick(InTurn, apart).skip_message)
    place.control.end("a")
    claim(place)
    assert len(place.tick(InTurn, apart).run_requests) == 2
