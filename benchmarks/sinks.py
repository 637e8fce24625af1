"""Rows per second of the sinks, compared with a bare COPY and a bare append by PyIceberg of the same values.

Run it as `python -m benchmarks.sinks [--rows N] [--rounds N] [--receives N]`. It starts its own PostgreSQL, which has
the rows of `PostgresSink` and the catalog of `IcebergSink`; the warehouse is a local folder. A sink reads the Parquet
files of a receive, converts them, and stores them with the id of the receive. The bare COPY gets text that was
converted before, and the bare append a table in memory. A sink and its peer take turns. `--receives` is the number of
receives of one row each that `IcebergSink` and the bare append commit one after the other.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pyarrow as pa
from pyarrow import csv, parquet
from pyiceberg.catalog import load_catalog

from benchmarks.events import Event
from benchmarks.options import options, spread
from pipeline_platform.lake.tables import SYSTEM
from pipeline_platform.model.columns.schema import arrow_schema
from pipeline_platform.sinks.contract import Publication
from pipeline_platform.sinks.iceberg import IcebergSink
from pipeline_platform.sinks.postgres import PostgresSink
from servers import postgres

COLUMNS = pa.schema([*arrow_schema(Event), *SYSTEM])
PLAIN = csv.WriteOptions(include_header=False, quoting_style="needed")
WINDOW = "2026-01-01-00:00"


def column(field: pa.Field, rows: int) -> pa.Array:
    """Return values of about 20 bytes each, and one window."""
    if field.name == "window":
        return pa.repeat(WINDOW, rows)
    if pa.types.is_string(field.type):
        return pa.array([f"{field.name} of {number:,}" for number in range(rows)])
    if pa.types.is_timestamp(field.type):
        return pa.array(range(rows), pa.int64()).cast(field.type)
    return pa.array([number % 1_000 for number in range(rows)]).cast(field.type)


def publication(receive_id: str, read: Callable[[], Iterator[pa.RecordBatch]]) -> Publication:
    return Publication(receive_id, "bench", "rows", COLUMNS, datetime.now(UTC), (WINDOW,), (), read)


def compare(
    name: str,
    peer: str,
    rows: int,
    rounds: int,
    ours: Callable[[str], object],
    bare: Callable[[], object],
    empty: Callable[[], object] = lambda: None,
) -> None:
    """Call a sink and its peer in turn; print rates and the median of their ratios."""
    ratios = []
    for number in range(rounds + 1):
        empty()
        began = time.perf_counter()
        ours(f"{name}-{number}")
        between = time.perf_counter()
        bare()
        rate, peers = rows / (between - began), rows / (time.perf_counter() - between)
        if number:  # the first round warms up
            ratios.append(rate / peers)
            print(f"round {number}: {name} {rate:,.0f} rows/s, {peer} {peers:,.0f} rows/s, ratio {rate / peers:.2f}")
    print(f"rate of {name} by that of {peer}, median of {rounds}: {spread(ratios)}")


def postgresql(url: str, rows: pa.Table, file: Path, rounds: int) -> None:
    text = file.with_suffix(".csv")
    csv.write_csv(rows, text, PLAIN)

    def copy() -> None:
        statement = "COPY bare FROM STDIN (FORMAT csv)"
        with (
            psycopg.connect(url) as connection,
            connection.cursor().copy(statement) as target,
            text.open("rb") as source,
        ):
            while some := source.read(2**20):
                target.write(some)

    def empty() -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("TRUNCATE bench_rows, bare")

    def publish(receive_id: str) -> None:
        sink.publish(publication(receive_id, lambda: parquet.ParquetFile(file).iter_batches(65_536)))

    with closing(PostgresSink(name="warehouse", url=url)) as sink:
        sink.ensure("bench", "rows", COLUMNS)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE bare (LIKE bench_rows INCLUDING INDEXES)")
        compare("PostgresSink", "COPY", len(rows), rounds, publish, copy, empty)


def iceberg(url: str, folder: Path, rows: pa.Table, file: Path, rounds: int, receives: int) -> None:
    properties = {"type": "sql", "uri": url.replace("postgresql:", "postgresql+psycopg:"), "warehouse": str(folder)}
    with closing(IcebergSink(name="warehouse", namespace="bench", properties=properties)) as sink:
        for table in "rows", "bare":
            sink.ensure("bench", table, COLUMNS)
        with closing(load_catalog("default", **properties)) as catalog:
            bare = catalog.load_table("bench.bench_bare")

            def publish(receive_id: str) -> None:
                sink.publish(publication(receive_id, lambda: parquet.ParquetFile(file).iter_batches(65_536)))

            compare("IcebergSink", "append", len(rows), rounds, publish, lambda: bare.append(rows))
            single = rows.slice(0, 1)

            def publish_each(name: str) -> None:
                for number in range(receives):
                    sink.publish(publication(f"{name}-of-a-row-{number}", lambda: iter(single.to_batches())))

            def append_each() -> None:
                for _ in range(receives):
                    bare.append(single)

            compare("IcebergSink, receives of a row", "append", receives, rounds, publish_each, append_each)


def main() -> None:
    """Run the benchmark and print the results."""
    given = options(__doc__, rows=500_000, rounds=5, receives=50)
    rows = pa.table([column(field, given.rows) for field in COLUMNS], schema=COLUMNS)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, postgres.serve(Path(folder)) as server:
        file = Path(folder, "rows.parquet")
        parquet.write_table(rows, file)
        postgresql(server.address, rows, file, given.rounds)
        iceberg(server.address, Path(folder, "warehouse"), rows, file, given.rounds, given.receives)


if __name__ == "__main__":
    main()
