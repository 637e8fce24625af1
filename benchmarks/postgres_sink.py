"""Rows per second of the PostgreSQL sink over one connection, compared with a bare COPY of the same values.

Run it as `python -m benchmarks.postgres_sink [--rows N] [--rounds N]`. It starts its own PostgreSQL. The sink reads the
Parquet files of a receive, converts them, and stores them with the id of the receive. The bare COPY gets text that was
converted before. Both take turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pyarrow as pa
from pyarrow import csv, parquet

from benchmarks.events import Event
from pipeline_platform.lake.tables import SYSTEM
from pipeline_platform.model.schema import arrow_schema
from pipeline_platform.sinks.contract import Publication
from pipeline_platform.sinks.postgres import PostgresSink
from servers import postgres

COLUMNS = pa.schema([*arrow_schema(Event), *SYSTEM])


def column(field: pa.Field, rows: int) -> pa.Array:
    """Return values of about 20 bytes each."""
    if pa.types.is_string(field.type):
        return pa.array([f"{field.name} of {number:,}" for number in range(rows)])
    if pa.types.is_timestamp(field.type):
        return pa.array(range(rows), pa.int64()).cast(field.type)
    return pa.array([number % 1_000 for number in range(rows)]).cast(field.type)


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    rows = pa.table([column(field, given.rows) for field in COLUMNS], schema=COLUMNS)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, postgres.serve(Path(folder)) as server:
        file = Path(folder, "rows.parquet")
        parquet.write_table(rows, file)
        text = Path(folder, "rows.csv")
        csv.write_csv(rows, text, csv.WriteOptions(include_header=False, quoting_style="needed"))

        def read() -> Iterator[pa.RecordBatch]:
            yield from parquet.ParquetFile(file).iter_batches(65_536)

        with closing(PostgresSink(name="warehouse", url=server.address)) as sink:
            sink.ensure("bench", "rows", COLUMNS)
            ratios = []
            for number in range(given.rounds + 1):
                began = time.perf_counter()
                sink.publish(Publication(f"r{number}", "bench", "rows", COLUMNS, (), (), read))
                ours = given.rows / (time.perf_counter() - began)
                with psycopg.connect(server.address) as connection:
                    connection.execute("CREATE TABLE IF NOT EXISTS bare (LIKE bench_rows INCLUDING INDEXES)")
                    connection.commit()
                    began = time.perf_counter()
                    statement = "COPY bare FROM STDIN (FORMAT csv)"
                    with connection.cursor().copy(statement) as copy, text.open("rb") as source:
                        while some := source.read(2**20):
                            copy.write(some)
                    connection.commit()
                    bare = given.rows / (time.perf_counter() - began)
                    connection.execute("TRUNCATE bench_rows, bare")
                if number:  # the first round warms up
                    ratios.append(ours / bare)
                    print(f"round {number}: sink {ours:,.0f} rows/s, COPY {bare:,.0f} rows/s, ratio {ours / bare:.2f}")
    print(f"rate of the sink by that of a bare COPY, median of {given.rounds}: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
