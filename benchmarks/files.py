"""Files of gzip JSON Lines to Delta tables: a run of the platform, and Spark's own reader, in turns.

Run it as `python -m benchmarks.files [--rows N] [--files N] [--copies N] [--rounds N]`. With `--copies 40` it reads
10 GB.

- *platform*: a run from claim to acknowledgement on a warm Spark, for a million rows at a time. It stores messages,
  outcomes and two tables.
- *Spark*: `spark.read.schema(...).json(...)` on the same Spark, written as Parquet by kind. A bad row becomes a row of
  nulls, and a crash leaves an unknown part of the files done.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks.events import ByBlocks, payloads
from benchmarks.options import spread
from benchmarks.whole_run import flow_at, warm_spark, whole_run
from pipeline_platform.connectors.files import FileSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AT_A_TIME = 1_000_000
SCHEMA = "id long, user string, kind string, page string, country string, price double, quantity int, agent string"


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="different rows")
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--copies", type=int, default=1, help="number of copies of each file")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    took: dict[str, list[float]] = {"platform": [], "Spark": []}
    with tempfile.TemporaryDirectory(prefix="bench-") as made:
        folder = Path(made)
        size = write_files(folder, given.rows, given.files, given.copies)
        stored, rows = sum(file.stat().st_size for file in folder.iterdir()), given.rows * given.copies
        print(f"{rows:,} rows, {size * given.copies / 1e9:.2f} GB, {stored / 1e9:.2f} GB compressed", flush=True)
        with warm_spark(folder / "spark") as spark, memory_peak() as peak:
            session = spark.spark_session
            warm_up = -(-given.rows // given.files)
            by_platform(folder, folder / "warm-up", "0-0.jsonl.gz", warm_up, session)
            by_spark(folder, folder / "warm-up", "0-0.jsonl.gz", session)
            for turn in range(given.rounds):
                own = folder / f"round-{turn}"
                took["platform"].append(by_platform(folder, own, "*.jsonl.gz", rows, session))
                took["Spark"].append(by_spark(folder, own, "*.jsonl.gz", session))
                shutil.rmtree(own)
    for name, times in took.items():
        print(f"{name:9} {rows / statistics.median(times):9,.0f} rows per second")
    ratios = [spark / platform for platform, spark in zip(*took.values(), strict=True)]
    print(f"rate, platform / Spark: {spread(ratios)}")
    print(f"largest memory of this process: {peak[0] / 2**20:,.0f} MB")


def write_files(folder: Path, rows: int, files: int, copies: int) -> int:
    """Write compressed files and their copies; return the size of the different rows in bytes, not compressed."""
    size = 0
    for number in range(files):
        first = folder / f"{number}-0.jsonl.gz"
        with gzip.open(first, "wb", compresslevel=1) as file:
            for row in itertools.islice(payloads(rows), number, None, files):
                size += file.write(row + b"\n")
        for copy in range(1, copies):
            shutil.copyfile(first, folder / f"{number}-{copy}.jsonl.gz")
    return size


def by_platform(folder: Path, own: Path, pattern: str, rows: int, session: SparkSession) -> float:
    """Store the files with runs of the platform; return the seconds."""
    own.mkdir()
    started = time.perf_counter()
    source = FileSource(name="queue", root=str(folder), pattern=pattern, catalog=f"sqlite:///{own}/catalog.sqlite")
    flow = flow_at(own, ByBlocks, source, session)
    stored = 0
    while stored < rows:
        whole_run(flow, AT_A_TIME, all_of_them=False)
        outcomes = flow.tables["outcomes"]
        with outcomes.look() as handle:
            stored = sum(file.rows for file in outcomes.files(handle))
        print(f"\r{stored:,}", end="\r", file=sys.stderr)
    took = time.perf_counter() - started
    assert stored == rows, f"{stored:,} of {rows:,} rows"
    return took


def by_spark(folder: Path, own: Path, pattern: str, session: SparkSession) -> float:
    """Store the files with Spark's reader; return the seconds."""
    started = time.perf_counter()
    read = session.read.schema(SCHEMA).json(f"{folder}/{pattern}")
    read.write.partitionBy("kind").parquet(f"{own}/spark")
    return time.perf_counter() - started


@contextmanager
def memory_peak() -> Iterator[list[int]]:
    """Yield a list whose entry is the largest memory of this process in bytes, measured each second."""
    peak, ended, process = [0], threading.Event(), psutil.Process()

    def measure() -> None:
        while not ended.wait(1):
            peak[0] = max(peak[0], process.memory_info().rss)

    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


if __name__ == "__main__":
    main()
