"""A pipeline with two producers: whole runs in Dagster, each from one queue, and features of both together."""

import sqlite3
from typing import Any, ClassVar

import dagster as dg
import pytest

from pipeline_platform import Producer
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.orchestration.rounds.rounds import Rounds
from pipeline_platform.run import steps
from tests.fixtures.dagster import NEXT, WINDOW, Location, figures
from tests.fixtures.pipelines_under_test import PIPELINES, Coasts

SUCCESS, FAILURE = dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE
TAGS = RunTags.of(Coasts)


class Shores(Coasts):
    """The pipeline with continuous runs."""

    name = "shores"
    producers: ClassVar[dict[str, Producer]] = {
        "east": Producer(source="queue"),
        "west": Producer(source="beside_queue"),
    }


@pytest.fixture
def west(location):
    """The other queue; the location's own queue belongs to `east`. Ids of both start with 1."""
    queue = TableQueue(name="beside_queue", url=f"sqlite:///{location.root}/beside.sqlite", created_column="created_at")
    queue.create()
    return queue


def fill(location: Location, west: TableQueue, *payloads: str) -> None:
    """Put messages into both queues."""
    location.enqueue(*(f"{payload} east" for payload in payloads))
    west.enqueue(f"{payload} west".encode() for payload in payloads)


def pull(location: Location, producer: str, *windows: str) -> dg.DagsterRun:
    run = location.run("coasts_pull", *windows, producer=producer)
    assert run.status == SUCCESS
    return run


def texts(location: Location) -> list[str]:
    return sorted(location.rows("lines", "coasts")["text"])


def left(*queues: TableQueue) -> list[int | None]:
    return [queue.backlog().messages for queue in queues]


def test_a_run_is_from_one_queue_and_says_which(location, west):
    fill(location, west, "one", "two")

    run = pull(location, "west")

    assert texts(location) == ["one west", "two west"]
    assert left(location.queue, west) == [2, 0]
    assert run.tags[TAGS.producer] == "west"
    (received,) = location.materialisations(run, "messages", "coasts")
    assert figures(received)["producer"] == "west"
    assert location.checks(run)["acknowledged"].passed

    by_tag = location.run("coasts_pull", tags={TAGS.producer: "east"})

    assert by_tag.status == SUCCESS, "where no config can name it, as from an asset page"
    assert texts(location) == ["one east", "one west", "two east", "two west"], (
        "equal ids of two queues are two messages"
    )
    assert left(location.queue, west) == [0, 0]


def test_a_pull_that_names_no_producer_takes_the_one_with_the_most_waiting_and_says_so(location, west):
    location.enqueue("one east")
    west.enqueue([b"one west", b"two west"])

    run = location.run("coasts_pull")

    assert run.status == SUCCESS
    assert run.tags[TAGS.producer] == "west"
    assert texts(location) == ["one west", "two west"]
    assert "Chose producer 'west'" in location.log(run)
    assert {"backlog_east", "backlog_west"} <= location.checks(run).keys()


def test_the_rounds_of_a_pull_that_names_no_producer_read_the_queue_of_its_first_receive(location, west, monkeypatch):
    rounds_of: list[str] = []
    monkeypatch.setitem(PIPELINES, Shores.name, Shores)
    monkeypatch.setattr(Rounds, "perform", lambda rounds: rounds_of.append(rounds.flow.producer.name))
    west.enqueue([b"one west"])

    assert location.run("shores_pull", rounds=True).status == SUCCESS
    assert rounds_of == ["west"]


def test_a_source_that_does_not_answer_is_not_chosen(location, west):
    west.enqueue([b"one west"])
    with sqlite3.connect(location.root / "queue.sqlite") as database:
        database.execute("DROP TABLE messages")

    run = location.run("coasts_pull")

    assert run.tags[TAGS.producer] == "west"
    assert not location.checks(run)["backlog_east"].passed


def test_a_producer_that_cannot_be_meant_is_refused_before_anything_is_leased(location, west):
    fill(location, west, "one")

    run = location.run("coasts_retry", producer="west")

    assert run.status == FAILURE
    assert "got producer 'west'" in location.log(run)
    assert left(location.queue, west) == [1, 1]


def test_a_retry_handles_the_failures_of_both_and_a_replay_replaces_the_rows_of_both(location, west):
    fill(location, west, "fail", "one")
    pull(location, "east")
    pull(location, "west", NEXT)
    assert location.open_failures(pipeline=Coasts) == {WINDOW: 1, NEXT: 1}

    retry = location.run("coasts_retry", WINDOW, NEXT, context={"forgiving": True})

    assert retry.status == SUCCESS
    assert TAGS.producer not in retry.tags
    assert texts(location) == ["fail east", "fail west", "one east", "one west"]
    assert location.open_failures(pipeline=Coasts) == {}

    replay = location.run("coasts_replay", WINDOW, NEXT, context={"forgiving": True})

    assert replay.status == SUCCESS
    assert texts(location) == ["fail east", "fail west", "one east", "one west"]
    receives = location.rows("lines", "coasts")["receive_id"].unique().to_list()
    assert receives == [replay.tags[TAGS.receive_id]]


def test_a_run_goes_on_where_it_failed_with_the_source_that_it_began_with(location, west, monkeypatch):
    fill(location, west, "one")

    def full(*args: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(steps, "decide", full)
        failed = location.run("coasts_pull", producer="west")
    assert failed.status == FAILURE

    run = location.again(failed, from_failure=True, copied_tags=False)

    assert run.status == SUCCESS
    assert (texts(location), left(location.queue, west)) == (["one west"], [1, 0])
