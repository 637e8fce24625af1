"""What compaction costs beside the files that runs leave, for a pipeline with twelve runs a minute.

Run it as `python -m benchmarks.compaction [--runs N]`; without a number it takes an hour of them. Each run leaves a
file of 1,000 rows of 250 bytes in a table. Printed are the seconds to open the table and list its files before and
after, the seconds that compaction takes, and the share of the hour that it is busy; a day has 24 of these.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from datetime import timedelta

import pyarrow as pa

from benchmarks.events import payloads
from pipeline_platform.lake.compaction import compact
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Table
from pipeline_platform.lake.writer import write_rows

ROWS = 1_000
A_MINUTE = 12
WINDOW = "2026-01-01T0000"


def leave(table: Table, runs: int) -> None:
    """Have each run commit a file."""
    rows = pa.table({"payload": pa.array(payloads(ROWS), pa.binary())})
    for number in range(runs):
        files = write_rows(table.lake, table.pipeline, f"run-{number}", [(table.name, WINDOW, rows)])
        with table.look() as handle:
            table.swap(handle, f"run-{number}", files)


def opening(lake: Lake, schema: pa.Schema) -> tuple[float, int]:
    """Seconds to open the table anew and list its files, and how many these are."""
    began, table = time.perf_counter(), Table(lake, "bench", "events", schema)
    with table.look() as handle:
        files = table.files(handle)
    return time.perf_counter() - began, len(files)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60 * A_MINUTE)
    runs = parser.parse_args().runs
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
    print(f"{files} files, {compacted} of them compacted in {took:.2f} s: {share:.2%} of the time of these runs")
    print(f"opening: {before:.3f} s with {files} files, {after:.3f} s with {left}")


if __name__ == "__main__":
    main()
