"""Receives: what one run leased, as its record in the lake tells the next."""

from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline_platform.lake.decisions.ledger import Ledger, Receive, ReceiveError
from pipeline_platform.lake.manifest import File, Manifest
from pipeline_platform.lake.task_report import TaskReport


@pytest.fixture
def ledger(lake):
    return Ledger(lake, "flights")


RECEIVE = Receive(
    receive_id="r1",
    pipeline="flights",
    origin="failed",
    run_id="run",
    windows=("2026-01-01T0000", "2026-01-01T0100"),
    demand=10,
    context={"cancelled_is_valid": True},
    base=3,
    started_at=datetime(2026, 1, 1, tzinfo=UTC),
)


def test_a_receive_comes_back_as_it_was_kept(ledger):
    ledger.begin(RECEIVE)
    assert ledger.get("r1") == RECEIVE
    assert ledger.unfinished() == ["r1"]


def test_there_is_none_before_it_begins_and_after_its_end(ledger):
    assert ledger.get("r1") is None
    ledger.begin(RECEIVE)
    ledger.remove("r1")
    assert ledger.get("r1") is None
    assert ledger.unfinished() == []


def test_a_removal_that_dies_half_way_leaves_nothing_to_finish(lake, ledger, monkeypatch):
    """A record without its manifests would be taken for a receive of no messages."""
    ledger.begin(RECEIVE)
    ledger.write(RECEIVE, "receive", Manifest())

    remove_file = type(lake).remove_file

    def die(lake, path):
        remove_file(lake, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(lake), "remove_file", die)
    with pytest.raises(KeyboardInterrupt):
        ledger.remove("r1")

    assert ledger.get("r1") is None
    assert ledger.unfinished() == ["r1"], "the next run removes the rest"


@pytest.mark.parametrize("record", [b"", b"{", b"{}", b"\xff"])
def test_a_record_that_cannot_be_read_is_named_with_the_way_out(lake, ledger, record):
    lake.write("flights/_receives/r1/receive.json", record)
    error = rf"_receives/r1/receive\.json: not a valid record.*\({len(record)} byte.*Restore it, or remove its folder"
    with pytest.raises(ReceiveError, match=error):
        ledger.get("r1")


def test_a_manifest_of_an_earlier_release_with_more_columns_is_read(lake, ledger):
    file = File("messages", "2026-01-01T0000", "window=2026-01-01T0000/r1.parquet", rows=3, bytes=100)
    written = Manifest([file], [TaskReport(letters=1)])
    earlier = written.to_arrow().add_column(5, "stats", pa.array(['{"numRecords": 3}', None]))
    with lake.open_output("flights/_receives/r1/handle.parquet") as sink:
        pq.write_table(earlier, sink)

    assert ledger.manifest(RECEIVE, "handle") == written


def test_manifests_of_other_processes_are_read_again(lake, ledger):
    another = Ledger(lake, "flights")
    another.begin(RECEIVE)
    for number in (1, 2):
        written = Manifest(reports=[TaskReport(letters=number)])
        another.write(RECEIVE, "letters", written)
        assert ledger.unfinished() == ["r1"]
        assert ledger.manifest(RECEIVE) == written
    another.remove("r1")
    assert (ledger.unfinished(), ledger.manifest(RECEIVE, "letters")) == ([], Manifest())
