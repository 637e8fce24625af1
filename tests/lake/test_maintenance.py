"""Maintenance: compaction, retention and vacuum, without loss of files in use."""

import os
import threading
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

from pipeline_platform.lake import log_length, writer
from pipeline_platform.lake.decisions.ledger import Ledger
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.maintenance import compaction, maintenance
from pipeline_platform.lake.maintenance.compaction import compact
from pipeline_platform.lake.maintenance.maintenance import SAFE_AGE, is_crowded, maintain, over_before
from pipeline_platform.lake.replay import ReplayedMessages
from pipeline_platform.lake.table_properties import KEEP_LOG
from pipeline_platform.lake.tables import Table, Tables
from pipeline_platform.lake.writer import Writer
from pipeline_platform.model.options import Producer, Retention
from pipeline_platform.model.windows import window_key
from tests.fixtures.small_lake import WINDOW, Keeping, Memory, Mended, Run, put, visible

NOW = datetime(2026, 6, 1, tzinfo=UTC)
FOR_EVER = Retention(messages=None, batchers=None, failed=None)


def day(number: int) -> str:
    """Return the window that started a number of days ago."""
    return window_key(NOW - timedelta(days=number))


def finish(tables: Tables, receive_id: str, *names: str, window: str = WINDOW, decided: datetime | None = None) -> None:
    """Finish a receive, decided at the start of its window by default."""
    deliveries = tuple((name, b"fail" if name.startswith("f") else name.encode()) for name in names)
    then = (decided or datetime.strptime(window, "%Y-%m-%dT%H%M").replace(tzinfo=UTC)).timestamp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline_platform.lake.tables.time.time", lambda: then)
        Run(tables, Memory(deliveries_=deliveries), receive_id, windows=(window,)).finish()


def windows(tables: Tables, table: str) -> set[str]:
    return {file.window for file in tables[table].files(tables[table].open())}


def age(path: Path, by: timedelta) -> None:
    """Set the age of a file."""
    then = time.time() - by.total_seconds()
    os.utime(path, (then, then))


# Compaction


def test_many_small_files_of_a_window_become_one_that_every_reader_finds(tables):
    for number in range(5):
        finish(tables, f"r{number}", f"m{number}")
    finish(tables, "later", "x", window="2026-01-02T0000")
    report = maintain(tables, FOR_EVER)
    assert report["kept"] == {"compacted": 5, "dropped": 0, "vacuumed": 0}
    frame = pl.scan_delta(tables["kept"].uri)
    assert frame.filter(pl.col("window") == WINDOW).collect().height == 5
    assert sorted(row["text"] for row in visible(tables, "kept")) == ["m0", "m1", "m2", "m3", "m4", "x"]
    by_hive = pl.read_parquet(tables["kept"].open().file_uris(), hive_schema={"window": pl.String})
    assert set(by_hive["window"]) == {WINDOW, "2026-01-02T0000"}


def test_an_interrupted_compaction_is_continued_by_the_next(tables, monkeypatch):
    later = "2026-01-02T0000"
    for number in range(6):
        finish(tables, f"r{number}", f"m{number}", window=later if number % 2 else WINDOW)
    compact_window = compaction.compact_window

    def dies(table: Table, window: str) -> int:
        if window == later:
            raise KeyboardInterrupt
        return compact_window(table, window)

    monkeypatch.setattr(compaction, "compact_window", dies)
    with pytest.raises(KeyboardInterrupt):
        maintain(tables, FOR_EVER)
    monkeypatch.undo()
    messages = tables["messages"]

    assert Counter(file.window for file in messages.files(messages.open())) == {WINDOW: 1, later: 3}, "oldest first"
    assert maintain(tables, FOR_EVER)["messages"]["compacted"] == 3
    assert sorted(row["text"] for row in visible(tables, "kept")) == [f"m{number}" for number in range(6)]


def test_a_table_is_crowded_by_files_that_could_be_fewer(tables, monkeypatch):
    monkeypatch.setattr(maintenance, "CROWDED", 3)
    assert not is_crowded(tables), "there is none yet"
    for number, window in enumerate([WINDOW, WINDOW, "2026-01-02T0000", "2026-01-03T0000"]):
        finish(tables, f"r{number}", f"m{number}", window=window)
    assert not is_crowded(tables), "two windows have one each"

    finish(tables, "last", "x", window=WINDOW)
    assert is_crowded(tables)
    maintain(tables, FOR_EVER)
    assert not is_crowded(tables)


def test_files_that_are_too_large_to_be_merged_do_not_crowd_a_table(tables, monkeypatch):
    monkeypatch.setattr(maintenance, "CROWDED", 2)
    for number in range(2):
        finish(tables, f"r{number}", f"m{number}")
    sizes = {file.bytes for name in tables.names for file in tables[name].files(tables[name].open())}
    monkeypatch.setattr(compaction, "compact_window", pytest.fail)

    for full in (min(sizes) + 1, min(sizes)):  # each file is a group of its own, or full
        monkeypatch.setattr(compaction, "FULL", full)
        assert not is_crowded(tables)
        assert {done["compacted"] for done in maintain(tables, FOR_EVER).values()} == {0}


def test_compacted_files_keep_row_groups_small(lake, monkeypatch):
    monkeypatch.setattr(writer, "ROW_GROUP_ROWS", 100)
    table = Table(lake, "keeping", "kept", pa.schema([("n", pa.int64()), ("window", pa.string())]))
    table.ensure()
    for number in range(3):
        put(table, f"r{number}", *({"n": n} for n in range(200)))
    compact(table, errors := [])
    assert errors == []
    (path,) = table.open().file_uris()
    assert max(pl.scan_parquet(path).collect().height, 1) == 600
    metadata = pa.parquet.read_metadata(path)
    assert max(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)) <= 100


def test_live_runs_commit_while_tables_are_compacted(tables):
    tables.ensure()
    runs = [Run(tables, Memory(deliveries_=((f"m{n}", b"x"), (f"f{n}", b"fail"))), f"r{n}").work() for n in range(12)]
    errors: list[BaseException] = []

    def live(mine: list[Run]) -> None:
        try:
            for run in mine:
                run.decide().publish()
                run.ledger.remove(run.receive.receive_id)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=live, args=(runs[start::2],)) for start in range(2)]
    for thread in threads:
        thread.start()
    compacted = 0
    while any(thread.is_alive() for thread in threads):
        compacted += sum(done["compacted"] for done in maintain(tables, FOR_EVER).values())
    for thread in threads:
        thread.join()

    assert errors == []
    assert compacted > 0
    assert sorted(row["message_id"] for row in visible(tables, "kept")) == sorted(f"m{n}" for n in range(12))
    assert sorted(row["message_id"] for row in visible(tables, "outcomes")) == sorted(
        f"{kind}{n}" for kind in "mf" for n in range(12)
    )


def test_compaction_leaves_transactions_so_that_nothing_is_published_twice(tables):
    run = Run(tables, Memory(deliveries_=(("a", b"a"),)), "r1").work().decide().publish()
    finish(tables, "r2", "b")
    maintain(tables, FOR_EVER)
    run.decide().publish()
    assert sorted(row["text"] for row in visible(tables, "kept")) == ["a", "b"]


def test_transactions_beyond_the_tables_property_are_forgotten(tables, monkeypatch):
    tables.ensure()
    table = tables["kept"]
    with monkeypatch.context() as patch:
        long_ago = time.time() - timedelta(days=40).total_seconds()
        patch.setattr("pipeline_platform.lake.tables.time.time", lambda: long_ago)
        table.swap(table.open(), "old", [])
    table.swap(table.open(), "new", [])
    maintain(tables, FOR_EVER)
    assert table.open().transaction_version("old") is None
    assert table.open().transaction_version("new") == 1


def test_commits_that_are_old_enough_are_removed_from_the_log_and_the_table_stays_as_it_was(tables):
    for number in range(4):
        finish(tables, f"r{number}", f"m{number}")
    maintain(tables, FOR_EVER)  # commits before the last checkpoint that is old enough are removed
    for path in Path(tables.lake.root).rglob("_delta_log/*"):
        age(path, KEEP_LOG * 2)
    finish(tables, "r4", "m4")
    before = {name: tables[name].version() for name in tables.names}

    maintain(tables, FOR_EVER)

    for name in ("messages", "outcomes", "kept"):
        log = Path(tables[name].uri, "_delta_log")
        versions = sorted(int(path.name[:20]) for path in log.glob("*.json"))
        assert (versions[0], len(versions)) == (before[name] - 1, 3), "the checkpoint, the last round, its compaction"
    assert sorted(row["text"] for row in visible(tables, "kept")) == [f"m{number}" for number in range(5)]


@pytest.mark.parametrize(("needed_from", "first"), [(None, 8), (5, 4), (2, 0)])
def test_a_long_log_on_a_disk_is_limited_to_a_checkpoint_that_is_not_needed(tables, monkeypatch, needed_from, first):
    monkeypatch.setattr(log_length, "MOST_COMMITS", 2)
    tables.ensure()
    kept = tables["kept"]
    for number in range(10):
        put(kept, f"r{number}", {"text": str(number)})
        if number in (3, 7):
            kept.open().create_checkpoint()

    log_length.limit_log(kept, needed_from)

    names = sorted(path.name for path in Path(kept.uri, "_delta_log").glob("0*"))
    assert (int(names[0][:20]), names[0].endswith(".checkpoint.parquet") or not first) == (first, True)
    assert sorted(row["text"] for row in visible(tables, "kept")) == [str(number) for number in range(10)]


# Retention


@pytest.mark.parametrize(
    ("time", "over"),
    [
        ("2025-12-31T2359", []),
        ("2026-01-01T0030", []),
        ("2026-01-01T0100", ["2026-01-01T0000"]),
        ("2026-01-01T0230", ["2026-01-01T0000", "2026-01-01T0100"]),
        ("2026-02-01T0000", ["2026-01-01T0000", "2026-01-01T0100", "2026-01-01T0200"]),
    ],
)
def test_a_window_has_ended_once_the_next_has_started(time, over):
    known = ["2026-01-01T0100", "2026-01-01T0000", "2026-01-01T0200", "2026-01-01T0300"]
    at = datetime.strptime(time, "%Y-%m-%dT%H%M").replace(tzinfo=UTC)
    assert over_before(at, known) == over


def test_whole_windows_are_dropped_once_they_are_older_than_they_are_kept(lake):
    class Careful(Keeping):
        producer = Producer(source="memory", deduplicate_for=timedelta(days=15))

    tables = Tables(lake, Careful)
    for number in (30, 20, 12, 0):
        finish(tables, f"r{number}", f"m{number}", window=day(number))

    for retention, left in (
        (FOR_EVER, {"messages": 4, "outcomes": 4, "kept": 4}),
        (Retention(messages=None, batchers=timedelta(days=15), failed=None), {"messages": 4, "outcomes": 4, "kept": 3}),
        (Retention(messages=timedelta(days=15), batchers=None, failed=None), {"messages": 3, "outcomes": 3, "kept": 3}),
        (Retention(messages=timedelta(hours=1), batchers=None, failed=None), {"messages": 2, "outcomes": 3, "kept": 3}),
    ):
        before = {name: len(windows(tables, name)) for name in left}
        report = maintain(tables, retention, NOW)
        assert {name: len(windows(tables, name)) for name in left} == left
        assert {name: report[name]["dropped"] for name in left} == {name: before[name] - left[name] for name in left}


def test_outcomes_are_kept_while_deliveries_are_looked_up_in_them_however_old_their_window(tables):
    finish(tables, "r1", "m1", window=day(30), decided=NOW - timedelta(days=1))
    finish(tables, "r2", "m2", window=day(20))
    finish(tables, "r3", "m3", window=day(10))
    finish(tables, "r4", "m4", window=day(0))
    maintain(tables, Retention(messages=timedelta(hours=1), failed=None), NOW)
    assert windows(tables, "outcomes") == {day(30), day(10), day(0)}
    assert windows(tables, "messages") == {day(10), day(0)}


def test_a_replay_still_has_what_it_needs_of_every_window_whose_messages_are_kept(tables):
    for number in (30, 20, 12, 0):
        finish(tables, f"r{number}", f"m{number}", window=day(number))
    maintain(tables, Retention(messages=timedelta(days=15), failed=None), NOW)
    version = tables["outcomes"].open().version()
    for window in windows(tables, "messages"):
        source = ReplayedMessages(
            name="memory", lake=tables.lake, pipeline="keeping", windows=(window,), version=version
        )
        rows = [b for share in source.plan(1, 1, "r") for b in source.read(share, "r")]
        assert sum(batch.num_rows for batch in rows) == 1


def test_a_window_with_an_open_failure_is_kept_until_it_is_closed(tables):
    for number in (30, 20, 10, 0):
        finish(tables, f"r{number}", f"f{number}", window=day(number))
    retention = Retention(failed=timedelta(days=5))
    failures = FailedMessages(name="memory", lake=tables.lake, pipeline="keeping", windows=(day(20),))
    Run(Tables(tables.lake, Mended), failures, "r4", origin="failed", windows=(day(20),)).finish()
    report = maintain(tables, retention, NOW)
    assert windows(tables, "failed") == {day(30), day(10), day(0)}
    assert report["failed"]["dropped"] == 1


def test_a_failure_that_comes_to_an_old_window_meanwhile_keeps_it(tables, monkeypatch):
    finish(tables, "r1", "f1", window=day(30))
    finish(tables, "r2", "f2", window=day(10))
    mended = FailedMessages(name="memory", lake=tables.lake, pipeline="keeping", windows=(day(30),))

    Run(Tables(tables.lake, Mended), mended, "r3", origin="failed", windows=(day(30),)).finish()
    late = [Run(tables, Memory(deliveries_=(("f9", b"fail"),)), "r4", windows=(day(30),)).work()]
    swap = Table.swap

    def after_a_late_failure(self, *args, removed=(), **options):
        if self.name == "failed" and removed and late:
            late.pop().decide().publish()
        swap(self, *args, removed=removed, **options)

    monkeypatch.setattr(Table, "swap", after_a_late_failure)
    monkeypatch.setattr(Ledger, "unfinished", lambda self: [])  # as if it had started after the read
    maintain(tables, Retention(failed=timedelta(days=5)), NOW)

    assert not late, "it came right before the commit that would have dropped it"
    assert day(30) in windows(tables, "failed")


def test_windows_of_a_receive_under_way_are_left_alone(tables):
    finish(tables, "r1", "m1", window=day(30))
    finish(tables, "r2", "m2", window=day(10))
    Run(tables, Memory(), "live", windows=(day(30),))
    maintain(tables, Retention(messages=timedelta(days=5), batchers=timedelta(days=5)), NOW)
    assert day(30) in windows(tables, "messages")
    assert day(30) in windows(tables, "kept")


# Vacuum


def stray(tables: Tables, receive_id: str, old: timedelta) -> Path:
    """A file of a task that was never committed."""
    with Writer(tables.lake, "keeping", receive_id) as writer:
        writer.write("kept", WINDOW, pa.RecordBatch.from_pydict({"text": ["x"]}))
        (file,) = writer.close().files
    path = Path(tables.lake.uri("keeping", "kept", file.path))
    age(path, old)
    return path


def test_files_that_no_commit_names_go_once_they_are_old_enough(tables):
    tables.ensure()
    old, young = stray(tables, "dead", SAFE_AGE * 2), stray(tables, "live", SAFE_AGE / 2)
    report = maintain(tables, FOR_EVER)
    assert (old.exists(), young.exists()) == (False, True)
    assert report["kept"]["vacuumed"] == 1


def test_files_of_a_receive_that_is_not_finished_stay_however_old_they_are(tables):
    """A run crashed after its decision a month ago: its rows are in files without a commit."""
    run = Run(tables, Memory(deliveries_=(("a", b"a"),)), "r1").work().decide()
    run.receive = run.receive.model_copy(update={"started_at": datetime.now(UTC) - timedelta(days=30)})
    run.ledger.begin(run.receive)
    for path in Path(tables.lake.root).rglob("*.parquet"):
        age(path, timedelta(days=30))
    maintain(tables, FOR_EVER)
    run.publish()
    assert [row["text"] for row in visible(tables, "kept")] == ["a"]


def test_a_reader_that_began_before_compaction_reads_on(tables):
    finish(tables, "r1", "a")
    finish(tables, "r2", "b")
    before = tables["kept"].open().file_uris()
    maintain(tables, FOR_EVER)
    assert pl.read_parquet(before, hive_partitioning=True).height == 2


def test_maintaining_again_changes_nothing(tables):
    finish(tables, "r1", "a", "f")
    finish(tables, "r2", "b")
    maintain(tables, FOR_EVER)
    assert set(map(tuple, (done.values() for done in maintain(tables, FOR_EVER).values()))) == {(0, 0, 0)}


def test_tables_that_are_not_there_yet_are_left_out(tables):
    assert maintain(tables, FOR_EVER) == {}
