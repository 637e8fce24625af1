"""A pipeline with two producers: whole runs in Dagster, each from one queue, and what concerns both of them."""

import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import dagster as dg
import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.run import steps
from tests.fixtures.dagster import NEXT, WINDOW, Location, figures
from tests.fixtures.pipelines_under_test import Coasts

SUCCESS, FAILURE = dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE
TAGS = RunTags.of(Coasts)


@pytest.fixture
def west(location: Location) -> TableQueue:
    """The other queue; the location's own is that of the east. Ids of both begin with 1."""
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


def test_a_run_is_from_one_queue_and_says_which(location: Location, west: TableQueue) -> None:
    fill(location, west, "one", "two")

    run = pull(location, "west")

    assert texts(location) == ["one west", "two west"]
    assert left(location.queue, west) == [2, 0]
    assert run.tags[TAGS.producer] == "west"
    (received,) = location.materialisations(run, "messages", "coasts")
    (lines,) = location.materialisations(run, "lines", "coasts")
    assert figures(received)["producer"] == figures(lines)["producer"] == "west"
    assert location.checks(run)["acknowledged"].passed

    pull(location, "east")

    assert texts(location) == ["one east", "one west", "two east", "two west"], (
        "equal ids of two queues are two messages"
    )
    assert left(location.queue, west) == [0, 0]


def test_the_producer_may_be_named_by_the_tag_where_no_config_can(location: Location, west: TableQueue) -> None:
    fill(location, west, "one")

    run = location.run("coasts_pull", tags={TAGS.producer: "west"})

    assert run.status == SUCCESS
    assert texts(location) == ["one west"]


@pytest.mark.parametrize(
    ("job", "producer", "words"),
    [
        ("coasts_pull", "", "a pull is from one producer, and there is east, west: name it in the run config"),
        ("coasts_pull", "wets", "no producer has the name 'wets'; did you mean 'west'?"),
        ("coasts_backfill", "west", "a backfill is of all producers: leave `producer` (west) out"),
        ("told_pull", "west", "no producer has the name 'west'; its only one has no name: give none"),
    ],
)
def test_a_producer_that_cannot_be_meant_is_refused_before_anything_is_leased(
    location: Location, west: TableQueue, job: str, producer: str, words: str
) -> None:
    fill(location, west, "one")

    run = location.run(job, producer=producer)

    assert run.status == FAILURE
    assert words in location.log(run)
    assert left(location.queue, west) == [1, 1]


def test_a_backfill_drives_the_failures_of_both(location: Location, west: TableQueue) -> None:
    fill(location, west, "fail", "one")
    pull(location, "east")
    pull(location, "west", NEXT)
    assert location.open_failures(pipeline=Coasts) == {WINDOW: 1, NEXT: 1}

    run = location.run("coasts_backfill", WINDOW, NEXT, context={"forgiving": True})

    assert run.status == SUCCESS
    assert TAGS.producer not in run.tags
    assert texts(location) == ["fail east", "fail west", "one east", "one west"]
    assert location.open_failures(pipeline=Coasts) == {}


def test_a_replay_takes_the_place_of_what_came_of_both(location: Location, west: TableQueue) -> None:
    fill(location, west, "one", "fail")
    pull(location, "east")
    pull(location, "west")

    run = location.run("coasts_replay", context={"forgiving": True})

    assert run.status == SUCCESS
    lines = location.rows("lines", "coasts")
    assert sorted(lines["text"]) == ["fail east", "fail west", "one east", "one west"]
    assert lines["receive_id"].unique().to_list() == [run.tags[TAGS.receive_id]]
    assert location.open_failures(pipeline=Coasts) == {}


def test_a_run_goes_on_where_it_failed_with_the_source_that_it_began_with(
    location: Location, west: TableQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# A run of one dies


def kill_in_mid_handling(location: Location, producer: str) -> str:
    """Kill a run with SIGKILL while it handles; return its receive, whose lease is over then."""
    key = Coasts.limits_key(producer)
    process = location.start("coasts_pull", producer=producer)
    until(location.flow(Coasts).ledger.unfinished, process)
    (receive_id,) = location.flow(Coasts).ledger.unfinished()
    until(lambda: _received(location, receive_id), process)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    location.control.beat(receive_id, 0)  # a minute later
    assert [claim.receive_id for claim in location.control.over(key)] == [receive_id]
    return receive_id


def _received(location: Location, receive_id: str) -> bool:
    ledger = location.flow(Coasts).ledger
    receive = ledger.get(receive_id)
    return receive is not None and bool(ledger.manifest(receive, "receive").files)


def until(found: Callable[[], Any], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 90
    while not found():
        assert time.monotonic() < deadline, "it never came to that"
        assert process.poll() is None, "the run ended before it could be hit"
        time.sleep(0.05)


def test_what_a_killed_run_left_waits_for_its_own_producer_and_holds_up_no_other(
    location: Location, west: TableQueue
) -> None:
    gate = location.root / "gate"
    location.enqueue("one", f"wait for {gate}")
    west.enqueue([b"two"])
    receive_id = kill_in_mid_handling(location, "east")
    gate.touch()

    other = pull(location, "west")
    assert texts(location) == ["two"]
    assert location.flow(Coasts).ledger.unfinished() == [receive_id], "the source it came from is not this run's"
    assert "cleared up" not in location.log(other)

    own = pull(location, "east")

    assert f"cleared up after runs that died or left something unacknowledged: receives {receive_id}" in location.log(
        own
    )
    assert texts(location) == ["one", "two", f"wait for {gate}"]
    assert left(location.queue, west) == [0, 0]
    assert location.flow(Coasts).ledger.unfinished() == []
    assert location.control.over("coasts/east") == []


def test_what_a_run_decided_and_did_not_tell_its_source_is_published_by_any_run_and_told_by_its_own_producer_s(
    location: Location, west: TableQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    location.enqueue("one")

    def full(*args: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(steps, "publish", full)
        assert location.run("coasts_pull", producer="east").status == FAILURE
    (receive_id,) = location.flow(Coasts).ledger.unfinished()

    pull(location, "west")
    assert texts(location) == ["one"]
    assert location.flow(Coasts).ledger.unfinished() == [receive_id]
    replay = location.run("coasts_replay")
    assert replay.status == SUCCESS, "all of it is published"
    assert location.flow(Coasts).ledger.unfinished() == [receive_id]

    pull(location, "east")

    assert location.flow(Coasts).ledger.unfinished() == []
    assert (texts(location), left(location.queue)) == (["one"], [0])
