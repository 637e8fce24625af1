"""A receive under a rate limit is handled in portions: messages that wait for permits occupy no core of Spark."""

import logging
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline_platform import Message, Pipeline, Processors, Producer, RateLimiting, TableBatcher
from pipeline_platform.control.pace import Pace
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.task_report import TaskReport
from pipeline_platform.run.handling import in_portions
from pipeline_platform.run.steps import handle_messages, receive_messages
from tests.fixtures.flow import begun, finish, rows
from tests.fixtures.kafka_source import until
from tests.fixtures.small_lake import Row

START = 1_000_000.0
STEP_S = 0.15
"""Fixed cost of a step, in seconds."""


class Simulated:
    """Steps of a single task with a constant time per message, on a simulated clock."""

    def __init__(self, store: ControlStore, limit: RateLimiting | None, message_s: float) -> None:
        self.store, self.limit, self.message_s = store, limit, message_s
        self.now = START
        self.sizes: list[int] = []
        self.begun = Counter[int]()
        self.waited = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def pace(self) -> Pace:
        return Pace(self.store, "told", self.limit, sleep=self.sleep, monotonic=lambda: self.now, jitter=lambda: 0.0)

    def step(self, first: int, end: int) -> Manifest:
        self.now += STEP_S
        self.sizes.append(end - first)
        pace, began = self.pace(), self.now
        for _ in pace.each(range(first, end)):
            if self.limit:
                self.begun[timedelta(seconds=round(self.now, 6)) // self.limit.interval] += 1
            self.now += self.message_s
        self.waited += pace.waited
        return Manifest(reports=[TaskReport(waited=pace.waited, seconds=self.now - began)])

    def handle(self, messages: int) -> None:
        in_portions(self.pace(), messages, self.step)
        assert sum(self.sizes) == messages


@pytest.fixture
def simulated(tmp_path):
    stores = []

    def simulate(allowed: int, interval_s: float, message_s: float) -> Simulated:
        limit = RateLimiting(allowed_messages=allowed, interval=timedelta(seconds=interval_s)) if allowed else None
        made: list[Simulated] = []
        store = ControlStore(f"sqlite:///{tmp_path}/{len(stores)}.sqlite", now=lambda: made[0].now)
        stores.append(store)
        made.append(Simulated(store, limit, message_s))
        return made[0]

    yield simulate
    for store in stores:
        store.close()


def test_a_step_takes_what_the_interval_permits_and_none_of_its_tasks_waits(simulated):
    run = simulated(100, 5, 0.001)
    run.handle(350)
    assert (run.sizes, run.waited) == ([100, 100, 100, 50], 0)
    assert sorted(run.begun.values()) == [50, 100, 100, 100]


def test_a_run_says_that_it_waits_for_long(simulated, caplog):
    caplog.set_level(logging.INFO)
    simulated(100, 60, 0.001).handle(250)
    waits = [record.getMessage().partition(" s ")[0] for record in caplog.records]
    assert waits == ["Waiting 20", "Waiting 60"]
    caplog.clear()
    simulated(100, 2, 0.001).handle(250)
    assert not caplog.records


def test_tasks_as_fast_as_their_permits_come_get_more_at_once_and_all_permits_are_used(simulated):
    """A step per second would spend 0.15 s on its start, and leave a tenth of the permits unused."""
    run = simulated(100, 1, 0.0095)
    run.handle(3_000)
    assert len(run.sizes) < 20
    assert run.now - START < 33


def test_a_run_that_gave_messages_back_begins_none_that_follow_though_the_stop_is_lifted(simulated):
    """The messages could be of one partition, and released messages are redelivered later."""
    run, begun = simulated(10, 5, 0.0), list[int]()
    pace = Pace(run.store, "told", run.limit, None, ["told"], sleep=run.sleep, monotonic=lambda: run.now)

    def step(first: int, end: int) -> Manifest:
        if first == 10:
            run.store.drain("told", "moves", timedelta(0))
        rebuild, given = pace.__reduce__()
        task = rebuild(*given, sleep=run.sleep, monotonic=lambda: run.now)
        mine = list(task.each(range(first, end)))
        run.store.resume("told")
        begun.extend(mine)
        return Manifest(reports=[TaskReport(released=end - first - len(mine))])

    manifest = in_portions(pace, 50, step)

    assert begun == list(range(10))
    assert manifest.totals.released == 40


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    allowed=st.integers(3, 200),
    interval_s=st.sampled_from([0.25, 1.0, 2.0, 7.5, 60.0]),
    message_s=st.sampled_from([0.0001, 0.01, 0.05, 1.3]),
    messages=st.integers(1, 300),
)
def test_whatever_the_speed_no_interval_is_exceeded_and_few_are_left_unused(
    simulated, allowed, interval_s, message_s, messages
):
    run = simulated(allowed, interval_s, message_s)
    run.handle(messages)
    assert max(run.begun.values()) <= allowed
    ideal = max(math.ceil(messages / allowed) * interval_s, messages * message_s)
    assert run.now - START <= 1.3 * ideal + 3 * interval_s + 2


class Held(Pipeline):
    """Four messages a day."""

    name = "held"
    producer = Producer(source="queue", rate_limiting=RateLimiting(allowed_messages=4, interval=timedelta(days=1)))
    processors = Processors(concurrency=2)
    batchers = {"lines": TableBatcher(schema=Row)}

    def handle_message(self, message: Message, context: Any) -> Message:
        return message.put_data({"text": message.data.decode()}).put_batcher("lines")


class Free(Held):
    """Any number of messages."""

    name = "free"
    producer = Producer(source="queue")


def test_a_pipeline_that_waits_for_permits_holds_up_no_other(filled_on_spark):
    held = filled_on_spark(Held, (b"%d" % number for number in range(12)))
    waiting = begun(held, run_id="held", demand=12)
    assert receive_messages(held, waiting).totals.received == 12
    free = filled_on_spark(Free, (b"%d" % number for number in range(12, 32)))
    receive = begun(free, run_id="free", demand=20)
    receive_messages(free, receive)

    with ThreadPoolExecutor() as threads:
        handling = threads.submit(handle_messages, held, waiting)
        limit = Held.producer.rate_limiting
        try:
            until(lambda: held.control.spare(Held.name, limit, timedelta(0)) == 0)
            assert handle_messages(free, receive).totals.handled.total() == 20
            assert not handling.done()
        finally:  # else a failure would wait for a day
            more = RateLimiting(allowed_messages=100, interval=timedelta(days=1))
            held.control.set_rate_limiting(Held.name, more)
        assert handling.result().totals.handled.total() == 12

    finish(held, waiting)
    assert sorted(rows(held, "lines")["text"]) == sorted(f"{number}" for number in range(12))
