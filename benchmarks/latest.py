"""Merging rows into a table with one row per key: seconds and peak memory.

Run it as `python -m benchmarks.latest [--rows N] [--keys N]`. It stores a row for each key and merges them, then stores
rows with new versions of random keys, of which a twentieth are deletions, and merges those. Each merge is a process.
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
import time
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import BaseModel

from benchmarks.events import payloads
from benchmarks.options import options
from pipeline_platform import Pipeline, Producer, TableBatcher
from pipeline_platform.lake.latest.latest import Latest
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.lake.writer import write_rows

WINDOW = "2026-01-01T0000"
A_FILE = 100_000


class Change(BaseModel):
    """A change of a key, with 250 bytes."""

    number: int
    version: int
    is_deleted: bool
    payload: str


class Changes(Pipeline):
    """Changes of keys."""

    name = "changes"
    producer = Producer(source="queue")
    batchers = {"lake": TableBatcher(schema=Change)}

    def handle_message(self, message: Any, context: Any) -> Any:
        """Store a change."""
        return message.put(message.json(Change), batcher="lake")


LATEST = Latest(Changes, "lake", "latest", ("number",), ("version",), "is_deleted")


def store(lake: Lake, numbers: np.ndarray[Any, Any], version: int, deleted: float) -> None:
    """Store a row for each number, in files of `A_FILE` rows."""
    table, chance = Tables(lake, Changes)["lake"], np.random.default_rng(version)
    table.ensure()
    texts = pa.array(payloads(A_FILE), pa.binary()).cast(pa.string())
    for first in range(0, len(numbers), A_FILE):
        some = numbers[first : first + A_FILE]
        rows = pa.table(
            {
                "number": some,
                "version": np.full(len(some), version),
                "is_deleted": chance.random(len(some)) < deleted,
                "payload": texts.slice(0, len(some)),
                "source": pa.repeat("queue", len(some)),
                "message_id": [f"{version}-{first + place}" for place in range(len(some))],
                "attempt": pa.repeat(pa.scalar(1, pa.int32()), len(some)),
                "batch_key": pa.repeat("default", len(some)),
                "batch_id": pa.nulls(len(some), pa.string()),
                "receive_id": pa.repeat(f"r{version}-{first}", len(some)),
                "child": pa.nulls(len(some), pa.int32()),
            }
        )
        files = write_rows(lake, "changes", f"r{version}-{first}", [("lake", WINDOW, rows)])
        with table.look() as handle:
            table.swap(handle, f"r{version}-{first}", files)


def merge(root: str, said: multiprocessing.Queue[str]) -> None:
    """Merge the new rows, and report the seconds, the changes and the peak memory."""
    import deltalake  # noqa: F401  # its import is not measured
    import polars  # noqa: F401

    idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    began = time.perf_counter()
    done = LATEST.merge(Lake(root=root))
    took, peak = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    said.put(f"{done.read:9,} rows: {took:5.1f} s, {dict(done.changes)}, peak {peak} MB, {idle} MB before")


def main() -> None:
    """Run the benchmark and print the result."""
    chosen = options(__doc__, rows=[1_000, 1_000_000], keys=1_000_000)
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        random = np.random.default_rng(0)
        rounds = [np.arange(chosen.keys), *(random.integers(0, chosen.keys, rows) for rows in chosen.rows)]
        for version, numbers in enumerate(rounds):
            store(Lake(root=folder), numbers, version, 0.05 if version else 0)
            said: multiprocessing.Queue[str] = processes.Queue()
            process = processes.Process(target=merge, args=(folder, said))
            process.start()
            print(said.get(timeout=600), flush=True)
            process.join()


if __name__ == "__main__":
    main()
