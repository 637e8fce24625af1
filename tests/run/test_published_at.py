"""The look-up of decided messages goes back to the publication of the oldest message, and no further."""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import polars as pl
import pyarrow as pa
import pytest

from pipeline_platform.connectors.sqs import SqsSource
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.decisions import decided
from pipeline_platform.lake.reader import RowRange
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.run import handling
from pipeline_platform.run.flow import Flow
from pipeline_platform.source.contract import Share
from tests.fixtures.flow import finish, handled, no_spark
from tests.fixtures.flow_pipelines import Obedient
from tests.fixtures.small_lake import Keeping, Memory, Run, received

SENT = datetime(2026, 3, 1, tzinfo=UTC)


class Dated(Memory):
    """A source of messages that were published at these times."""

    times: tuple[datetime | None, ...]
    again: tuple[bool, ...]

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        ids = [f"m{number}" for number in range(len(self.times))]
        told = {"data": [b""] * len(ids), "ack_id": ids, "ack_ref": "q"}
        yield self.deliveries(message_id=ids, redelivered=self.again, published_at=self.times, **told)


LATER = SENT + timedelta(hours=1)


@pytest.mark.parametrize(
    ("times", "again", "since"),
    [
        ((LATER, SENT), (True, True), SENT),
        ((LATER, SENT), (True, False), LATER),
        ((LATER, None), (True, False), LATER),
        ((LATER, None), (True, True), None),
        ((LATER, SENT), (False, False), None),
    ],
)
def test_a_receive_notes_when_the_oldest_came_that_may_have_come_before(tmp_path, times, again, since):
    source = Dated(times=tuple(times), again=tuple(again))
    manifest = received(Lake(root=str(tmp_path)), "keeping", source)
    assert handling._oldest(manifest) == since
    assert [report.published_until for report in manifest.reports] == [LATER]


@pytest.mark.parametrize(
    ("ahead", "time"),
    [
        (timedelta(hours=-1), timedelta()),
        (timedelta(minutes=20), timedelta(minutes=20)),
        (timedelta(days=9), timedelta(days=1)),
        (None, timedelta()),
    ],
    ids=["published before", "clock behind", "clock wrong", "unknown"],
)
def test_a_decision_is_not_older_than_its_messages_whatever_the_clock_of_its_host(tmp_path, ahead, time):
    tables, start = Tables(Lake(root=str(tmp_path)), Keeping), datetime.now(UTC)
    published = None if ahead is None else start + ahead
    Run(tables, Dated(times=(SENT if published else None, published), again=(False, False)), "r1").finish()

    with tables["outcomes"].look() as handle:
        (file,) = tables["outcomes"].files(handle)
    assert start - timedelta(seconds=1) <= file.committed_at - time <= datetime.now(UTC)


def test_a_file_is_not_older_than_the_file_that_it_replaces(tmp_path):
    tables, later = Tables(Lake(root=str(tmp_path)), Keeping), datetime.now(UTC) + timedelta(hours=1)
    Run(tables, Dated(times=(later, None), again=(False, False)), "r1").finish()
    outcomes = tables["outcomes"]
    with outcomes.look() as handle:
        (old,) = outcomes.files(handle)
        new = old._replace(path=old.path.replace("r1", "r2"))
        shutil.copy(tables.lake.uri(outcomes.path(old.path)), tables.lake.uri(outcomes.path(new.path)))
        outcomes.swap(handle, "r2", [new], removed=[old])
    with outcomes.look() as handle:
        (file,) = outcomes.files(handle)
    assert file.path == new.path
    assert file.committed_at >= later


def test_a_time_that_is_not_by_the_sources_own_clock_bounds_no_look_up(tmp_path):
    class Displayed(Dated):
        dates_by_own_clock = False

    manifest = received(Lake(root=str(tmp_path)), "keeping", Displayed(times=(SENT,), again=(True,)))
    assert handling._oldest(manifest) is None


@pytest.fixture
def start(tmp_path, local_worker, sqs_queue, monkeypatch):
    """A pipeline over one SQS queue, with different options each time. It has no Spark."""
    monkeypatch.setattr(handling, "CLOCKS", timedelta(0))  # server and run are on one machine
    url, control = sqs_queue(), ControlStore(f"sqlite:///{tmp_path}/control.sqlite")
    with closing(control):

        def flow(**options: str) -> Flow:
            source = SqsSource(name="queue", queue_url=url, endpoint_url=url.rsplit("/", 2)[0], **options)  # type: ignore[arg-type]
            lake = Lake(root=str(tmp_path / "lake"))
            return Flow(BoundProducer(Obedient), source, lake, control, no_spark, worker=local_worker)

        yield flow


def send(flow: Flow, body: str) -> None:
    assert isinstance(flow.source, SqsSource)
    client = boto3.client("sqs", endpoint_url=flow.source.endpoint_url, region_name="us-east-1")
    client.send_message(QueueUrl=flow.source.queue_url, MessageBody=body)


def run(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run once; return the files of outcomes that were read."""
    looked_at: list[str] = []
    read_ranges = decided.read_ranges

    def spy(lake: Lake, ranges: Sequence[RowRange], *limits: Any, **options: Any) -> object:
        looked_at.extend(each.path for each in ranges if "/outcomes/" in each.path)
        return read_ranges(lake, ranges, *limits, **options)

    with monkeypatch.context() as patch:
        patch.setattr(decided, "read_ranges", spy)
        receive = handled(flow)
    assert finish(flow, receive).acknowledged
    return looked_at


def test_a_run_of_a_fresh_message_opens_no_older_file_of_outcomes(start, monkeypatch):
    flow = start()
    send(flow, "old")
    run(flow, monkeypatch)
    time.sleep(1.1)  # times of files are in milliseconds; a server may keep whole seconds
    send(flow, "fresh")
    assert run(flow, monkeypatch) == []
    assert sorted(pl.read_delta(flow.tables["words"].uri)["word"]) == ["fresh", "old"]
    times = pl.read_delta(flow.tables["messages"].uri)["published_at"]
    assert all(abs(time - datetime.now(UTC)) < timedelta(minutes=10) for time in times)


def test_a_redelivered_old_message_is_found_decided_however_much_came_since(start, monkeypatch):
    send(start(), "old")
    run(start(on_success="nack"), monkeypatch)
    time.sleep(1.1)
    send(start(), "fresh")
    looked_at = run(start(), monkeypatch)
    assert len(looked_at) == 1
    assert sorted(pl.read_delta(start().tables["words"].uri)["word"]) == ["fresh", "old"]
