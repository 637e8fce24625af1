"""Cost of compaction of the files that runs leave, for a pipeline with twelve runs per minute.

Run it as `python -m benchmarks.compaction [--runs N]`. The default is the number of runs in an hour. Each run leaves a
file of 1,000 rows of 250 bytes in a table. It prints the seconds to open the table and list its files before and after
compaction, the seconds of the compaction, and its share of the hour.
"""

from __future__ import annotations

import tempfile
import time
from datetime import timedelta

import pyarrow as pa

from benchmarks.events import payloads
from benchmarks.options import options
from pipeline_platform.lake.maintenance.compaction import compact
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Table
from pipeline_platform.lake.writer import write_rows

ROWS = 1_000
A_MINUTE = 12
WINDOW = "2026-01-01T0000"


def leave(table: Table, runs: int) -> None:
    """Commit one file per run."""
    rows = pa.table({"payload": pa.array(payloads(ROWS), pa.binary())})
    for number in range(runs):
        files = write_rows(table.lake, table.pipeline, f"run-{number}", [(table.name, WINDOW, rows)])
        with table.look() as handle:
            table.swap(handle, f"run-{number}", files)


def opening(lake: Lake, schema: pa.Schema) -> tuple[float, int]:
    """Return the seconds to open the table and list its files, and the number of files."""
    began, table = time.perf_counter(), Table(lake, "bench", "events", schema)
    with table.look() as handle:
        files = table.files(handle)
    return time.perf_counter() - began, len(files)


def main() -> None:
    """Run the benchmark and print the result."""
    runs = options(__doc__, runs=60 * A_MINUTE).runs
    schema = pa.schema([("payload", pa.binary()), ("window", pa.string())])
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        lake = Lake(root=folder)
        table = Table(lake, "bench", "events", schema)
        table.ensure()
        leave(table, runs)
        before, files = opening(lake, schema)
        began = time.perf_counter()
        compacted = compact(table, [])
        took = time.perf_counter() - began
        after, left = opening(lake, schema)
    share = took / timedelta(minutes=runs / A_MINUTE).total_seconds()
    print(f"{files} files, {compacted} compacted in {took:.2f} s: {share:.2%} of the time of these runs")
    print(f"opening: {before:.3f} s with {files} files, {after:.3f} s with {left}")


if __name__ == "__main__":
    main()
