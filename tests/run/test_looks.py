"""Reads of a run: how often it reads its ledger and opens a table. Each is a request to an object store."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from pipeline_platform import Message, Share
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Table
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.spark_work import SparkWork
from pipeline_platform.tasks.notify_author import NotifyAuthor
from tests.fixtures.flow import finish, flow_of, handled
from tests.fixtures.small_lake import Keeping, Memory, numbered, visible
from tests.fixtures.telemetry import run_tasks_here

ONCE_EACH = {"messages": 1, "outcomes": 1, "failed": 1, "kept": 1}


class Fresh(Memory):
    """A source of new messages only: nothing to look up."""

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        for batch in super().read(share, receive_id):
            index = batch.schema.get_field_index("redelivered")
            yield batch.set_column(index, batch.schema.field(index), pa.repeat(False, batch.num_rows))


@pytest.fixture
def looks(monkeypatch):
    """Count how often each table is opened and each manifest is read; tasks run in this process."""
    counts: Counter[str] = Counter()
    opened, read = Table.open, Lake.read

    def opening(table: Table) -> Any:
        handle = opened(table)  # not counted where there is no table yet
        counts[table.name] += 1
        return handle

    def reading(lake: Lake, path: str) -> bytes | None:
        content = read(lake, path)
        if content is not None and "/_receives/" in path and path.endswith(".parquet"):
            counts[path.rpartition("/")[2]] += 1
        return content

    monkeypatch.setattr(Table, "open", opening)
    monkeypatch.setattr(Lake, "read", reading)
    monkeypatch.setattr(SparkWork, "run", run_tasks_here)
    return counts


@pytest.fixture
def lake(tmp_path):
    return Lake(root=str(tmp_path / "lake"))


def in_a_new_process(lake: Lake, *payloads: bytes) -> Flow:
    return flow_of(Path(lake.root).parent, Keeping, Fresh(deliveries_=numbered(*payloads)))


def test_a_run_opens_each_table_once_and_reads_none_of_its_own_manifests(lake, looks):
    flow = in_a_new_process(lake, b"a", b"fail")
    finish(flow, handled(flow))
    assert looks == ONCE_EACH
    assert [row["text"] for row in visible(flow.tables, "kept")] == ["a"]


def test_a_run_that_goes_on_with_what_another_process_wrote_reads_each_manifest_once(lake, looks):
    receive = handled(in_a_new_process(lake, b"a", b"fail"))
    looks.clear()
    finish(in_a_new_process(lake), receive)
    assert looks == {**ONCE_EACH, "receive.parquet": 1, "handle.parquet": 1}


def test_a_handle_is_lent_to_one_at_a_time_and_shows_what_others_committed(lake):
    mine, theirs = (in_a_new_process(lake).tables["outcomes"] for _ in range(2))
    mine.ensure()
    assert mine.version() == 0
    theirs.swap(theirs.open(), "r1", [])
    assert mine.version() == 1
    with mine.look() as handle, mine.look() as other:
        assert handle is not other


class Hearing(Keeping):
    """A pipeline that is notified of decided messages; a message `later` is redelivered."""

    name = "hearing"
    heard: ClassVar[list[bytes]] = []

    def handle_message(self, message: Message, context: Any) -> Message:
        if message.data == b"later":
            return message.failed("not yet").configure_ack(on_failure="nack:5")
        return super().handle_message(message, context)

    def acknowledge(self, ack_ref: str, successful: list[Message], failed: list[Message], context: Any) -> None:
        self.heard.extend(message.data for message in (*successful, *failed))


@pytest.mark.parametrize(
    ("payloads", "told", "looks_at"), [([b"a", b"fail"], 2, False), ([b"a", b"fail", b"later"], 2, True)]
)
def test_acknowledge_looks_at_outcomes_only_where_some_are_undecided(
    lake, looks, monkeypatch, payloads, told, looks_at
):
    looked: set[bool] = set()
    here = NotifyAuthor.here
    monkeypatch.setattr(
        NotifyAuthor, "here", lambda task, *share: looked.add(bool(task.outcomes)) or here(task, *share)
    )
    monkeypatch.setattr(Hearing, "heard", [])
    flow = replace(in_a_new_process(lake, *payloads), producer=BoundProducer(Hearing))
    finish(flow, handled(flow))
    assert (Hearing.heard, looked) == (payloads[:told], {looks_at})
