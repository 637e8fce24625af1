"""The writer: bounded files and row groups, with correct statistics."""

import os
import resource
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel

from pipeline_platform import Pipeline, Producer, TableBatcher
from pipeline_platform.lake import writer as module
from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.task_report import TaskReport
from pipeline_platform.lake.writer import Writer
from tests.fixtures.small_lake import WINDOW, Keeping, handled, outcomes, rows_of


def written(lake: Lake, *batches: pa.RecordBatch, table: str = "t", **options: Any) -> list[File]:
    with Writer(lake, "p", "r1", **options) as writer:
        for batch in batches:
            writer.write(table, WINDOW, batch)
        return writer.close().files


def parquet(lake: Lake, file: File) -> pq.ParquetFile:
    return pq.ParquetFile(lake.open_input(f"p/{file.table}/{file.path}"))


def numbers(count: int, start: int = 0) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"n": pa.array(range(start, start + count), pa.int64())})


# Files


def test_each_table_and_window_gets_a_file_that_says_what_it_holds(lake, tmp_path):
    with Writer(lake, "p", "r1-handle-0") as writer:
        writer.write("a", "2026-01-01T0000", numbers(2))
        writer.write("b", "2026-01-01T0000", numbers(3))
        writer.write("a", "2026-01-01T0100", numbers(4))
        writer.write("a", "2026-01-01T0000", numbers(5))
        manifest = writer.close(TaskReport(task=0))

    assert {(file.table, file.window): file.rows for file in manifest} == {
        ("a", "2026-01-01T0000"): 7,
        ("b", "2026-01-01T0000"): 3,
        ("a", "2026-01-01T0100"): 4,
    }
    for file in manifest:
        path = tmp_path / "p" / file.table / file.path
        assert path.stat().st_size == file.bytes
        assert path.name.startswith("r1-handle-0-"), "people who look can tell whose it is"
        assert path.parent.name == f"window={file.window}"
    assert manifest.reports == [TaskReport(task=0)]


def test_two_tries_of_a_task_write_different_files(lake):
    (first,), (second,) = written(lake, numbers(1)), written(lake, numbers(1))
    assert first.path != second.path


def test_no_rows_make_no_file(lake, tmp_path):
    assert written(lake, numbers(0)) == []
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_file_holds_no_more_rows_than_told(lake):
    files = written(lake, numbers(7), numbers(4, 7), rows_per_file={"t": 5})
    assert [file.rows for file in files] == [5, 5, 1]
    assert [row for file in files for row in parquet(lake, file).read()["n"].to_pylist()] == list(range(11))


def test_a_task_over_many_windows_has_few_files_open_at_a_time(lake):
    windows = [f"2026-01-{day:02}T{hour:02}00" for day in range(1, 10) for hour in range(24)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, limits[1]))
        with Writer(lake, "p", "r1", {"a": 2}) as writer:
            for window in windows:
                for table in ("a", "b", "outcomes"):
                    writer.write(table, window, numbers(3))
            manifest = writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    rows = Counter()
    for file in manifest:
        rows[file.table, file.window] += file.rows
    assert rows == {(table, window): 3 for table in ("a", "b", "outcomes") for window in windows}
    assert {file.rows for file in manifest.of_table("a")} == {1, 2}, "no more in a file than told"
    assert sum(parquet(lake, file).metadata.num_rows for file in manifest) == 3 * 3 * len(windows)


def test_a_window_that_comes_back_late_gets_another_file(lake, monkeypatch):
    monkeypatch.setattr(module, "OPEN_FILES", 2)
    with Writer(lake, "p", "r1") as writer:
        for window in ("w1", "w2", "w1", "w3", "w2"):
            writer.write("t", window, numbers(1))
        files = writer.close().files
    assert Counter(file.window for file in files) == {"w1": 1, "w2": 2, "w3": 1}, "w2 was used before w1"
    assert len({file.path for file in files}) == 4


def test_the_tables_of_one_window_stay_open_however_many_they_are(lake, monkeypatch):
    monkeypatch.setattr(module, "OPEN_FILES", 2)
    with Writer(lake, "p", "r1") as writer:
        for table in ("a", "b", "c", "a", "b", "c"):
            writer.write(table, WINDOW, numbers(1))
        assert [file.rows for file in writer.close()] == [2, 2, 2]


@pytest.mark.parametrize("window", ["", "..", "a/../b", "a b", "%2F", "x=y"])
def test_a_window_that_is_no_partition_key_is_refused(lake, window):
    with pytest.raises(ValueError, match="must contain only letters, digits"), Writer(lake, "p", "r1") as writer:
        writer.write("t", window, numbers(1))


def test_an_error_leaves_no_file_behind(lake, tmp_path):
    def fail():
        with Writer(lake, "p", "r1", {"t": 2}) as writer:
            writer.write("t", WINDOW, numbers(3))
            raise RuntimeError("as told")

    with pytest.raises(RuntimeError, match="as told"):
        fail()

    assert not list(tmp_path.rglob("*.parquet"))


def test_an_error_after_the_files_were_handed_over_leaves_them_alone(lake, tmp_path):
    def commit():
        with Writer(lake, "p", "r1") as writer:
            writer.write("t", WINDOW, numbers(3))
            writer.close()
            raise RuntimeError("of a commit, maybe")

    with pytest.raises(RuntimeError, match="maybe"):
        commit()

    assert len(list(tmp_path.rglob("*.parquet"))) == 1


# Row groups


@pytest.mark.parametrize("sizes", [[10], [3, 3, 3, 1], [4, 6], [1] * 10])
def test_a_row_group_holds_no_more_rows_than_its_bound(lake, monkeypatch, sizes):
    monkeypatch.setattr(module, "ROW_GROUP_ROWS", 4)
    batches, start = [], 0
    for size in sizes:
        batches.append(numbers(size, start))
        start += size
    (file,) = written(lake, *batches)
    metadata = parquet(lake, file).metadata
    assert [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)] == [4, 4, 2]
    assert parquet(lake, file).read()["n"].to_pylist() == list(range(10))


def test_a_row_group_holds_no_more_bytes_than_its_bound_but_for_a_single_larger_row(lake, monkeypatch):
    monkeypatch.setattr(module, "ROW_GROUP_BYTES", 1_000)
    sizes = [400, 400, 400, 5_000, 10, 10]
    (file,) = written(lake, pa.RecordBatch.from_pydict({"data": [b"x" * size for size in sizes]}))
    parts = [
        parquet(lake, file).read_row_group(i)["data"].to_pylist() for i in range(parquet(lake, file).num_row_groups)
    ]
    assert [len(row) for part in parts for row in part] == sizes
    assert all(sum(map(len, part)) <= 1_000 or len(part) == 1 for part in parts)


# Batch keys


HOSTILE = ["a/../b", "../../etc", "%2F", "🐘", "", " ", "x=y", "a\0b", "window=1", "\n", "C:\\", "x" * 10_000]


def test_a_batch_key_is_data_and_never_part_of_a_path(lake, tmp_path):
    class Keyed(Keeping):
        def handle_message(self, message, context):
            return super().handle_message(message, context).put_batch_key(message.data.decode())

    manifest = handled(lake, Keyed, *(key.encode() for key in HOSTILE))

    assert [row["batch_key"] for row in rows_of(lake, "keeping", manifest, "kept")] == HOSTILE
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.parquet")}
    assert names == {f"keeping/{file.table}/{file.path}" for file in manifest} | {
        name for name in names if name.startswith("keeping/messages/")
    }
    assert all(part.isascii() and "%" not in part for name in names for part in name)


class Lease(BaseModel):
    until: datetime


class Leases(Pipeline):
    name = "leases"
    producer = Producer(source="memory")
    batchers = {"kept": TableBatcher(schema=Lease)}

    def handle_message(self, message, context):
        return message.put(message.json(Lease), batcher="kept")


def test_a_time_that_is_beyond_pythons_in_utc_fails_its_message(lake):
    payloads = [b'{"until": "%b"}' % time for time in (b"9999-12-31T23:59:59-05:00", b"0001-01-01T00:00:00+05:00")]

    manifest = handled(lake, Leases, *payloads, b'{"until": "2026-01-01T00:00:00Z"}')

    assert outcomes(lake, "leases", manifest) == {"m0": "failed", "m1": "failed", "m2": "handled"}
    (file,) = manifest.of_table("kept")
    assert pq.read_table(lake.open_input(f"leases/kept/{file.path}"))["until"].to_pylist() == [
        datetime(2026, 1, 1, tzinfo=UTC)
    ]
