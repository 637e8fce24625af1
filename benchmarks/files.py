"""Files of gzip JSON Lines to Delta tables: a run of the platform, and Spark's own reader, in turns.

Run it as `python -m benchmarks.files [--rows N] [--files N] [--rounds N]`.

- *platform*: a run from claim to acknowledgement on a warm Spark. It stores messages, outcomes and two tables.
- *Spark*: `spark.read.schema(...).json(...)` on the same Spark, written as Parquet by kind. A bad row becomes a row of
  nulls, and a crash leaves an unknown part of the files done.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.events import ByBlocks, payloads
from benchmarks.whole_run import flow_at, warm_spark, whole_run
from pipeline_platform.connectors.files import FileSource

SCHEMA = "id long, user string, kind string, page string, country string, price double, quantity int, agent string"


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    took: dict[str, list[float]] = {"platform": [], "Spark": []}
    with tempfile.TemporaryDirectory(prefix="bench-") as made:
        folder = Path(made)
        for number in range(given.files):
            with gzip.open(folder / f"{number}.jsonl.gz", "wb", compresslevel=1) as file:
                rows = itertools.islice(payloads(given.rows), number, None, given.files)
                file.writelines(row + b"\n" for row in rows)
        with warm_spark(folder / "spark") as spark:
            session = spark.spark_session
            for turn in range(given.rounds + 1):
                started, own = time.perf_counter(), folder / f"round-{turn}"
                catalog = f"sqlite:///{folder}/catalog-{turn}.sqlite"
                source = FileSource(name="queue", root=str(folder), pattern="*.jsonl.gz", catalog=catalog)
                whole_run(flow_at(own, ByBlocks, source, session), given.rows)
                platform = time.perf_counter() - started
                started = time.perf_counter()
                read = session.read.schema(SCHEMA).json(f"{folder}/*.jsonl.gz")
                read.write.partitionBy("kind").parquet(f"{own}/spark")
                if turn:  # the first round warms up
                    took["platform"].append(platform)
                    took["Spark"].append(time.perf_counter() - started)
    for name, times in took.items():
        print(f"{name:9} {given.rows / statistics.median(times):9,.0f} rows per second")
    ratios = [spark / platform for platform, spark in zip(*took.values(), strict=True)]
    print(f"rate, platform / Spark: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"memory of this process: {psutil.Process().memory_info().rss / 2**20:,.0f} MB")


if __name__ == "__main__":
    main()
