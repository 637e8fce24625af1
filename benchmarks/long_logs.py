"""Cost of a commit by the number of commits and transactions that a table keeps.

Run it as `python -m benchmarks.long_logs`. Each case is a table of `outcomes` with a file per hour. Its log is written
as rounds leave it, one per second: commits that are kept for a time, and transactions of the last hours, which a
checkpoint contains. Then it prints the processor time of a new process that opens the table and commits, of a further
commit with the same handle, and of a checkpoint.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import OUTCOMES, Table

CASES = {
    "new": (0, 0),
    "10,000 commits, 3 hours of transactions": (10_000, 10_800),
    "no commits, 3 hours of transactions": (0, 10_800),
    "no commits, 2 days of transactions": (0, 172_800),
    "2 days of commits, 3 hours of transactions": (172_800, 10_800),
}
"""Commits and transactions."""
ROUNDS = 5


def written(folder: Path, commits: int, transactions: int) -> Table:
    """Create a table with a log of this length."""
    table = Table(Lake(root=str(folder)), "busy", "outcomes", OUTCOMES)
    table.ensure()
    log, now = folder / "busy" / "outcomes" / "_delta_log", int(time.time() * 1000)
    if transactions:  # all in one commit, for the checkpoint: the log may be shorter
        lines = (
            json.dumps({"txn": {"appId": f"{number:032x}", "version": 1, "lastUpdated": now}})
            for number in range(transactions)
        )
        (log / f"{1:020d}.json").write_text("\n".join([json.dumps({"commitInfo": {"timestamp": now}}), *lines]))
        table.open().create_checkpoint()
    first = table.open().version() + 1
    for version in range(first, first + commits):
        (log / f"{version:020d}.json").write_text(json.dumps({"commitInfo": {"timestamp": now, "by": "a" * 400}}))
        if version == first + commits - 1:
            table.open().create_checkpoint()
    return table


def measure(table: Table) -> dict[str, float]:
    """Return medians of the seconds of processor time."""
    took: dict[str, list[float]] = {"new process": [], "further commit": [], "checkpoint": []}

    def timed(name: str, since: float) -> float:
        took[name].append(time.process_time() - since)
        return time.process_time()

    for number in range(ROUNDS):
        started, again = time.process_time(), Table(table.lake, table.pipeline, table.name, table.schema)
        for which, name in enumerate(("new process", "further commit")):
            with again.look() as handle:
                again.swap(handle, f"run-{number}-{which}", [])
            started = timed(name, started)
        with again.look() as handle:
            handle.create_checkpoint()
        timed("checkpoint", started)
    return {name: statistics.median(seconds) for name, seconds in took.items()}


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    for name, (commits, transactions) in CASES.items():
        with tempfile.TemporaryDirectory(prefix="long-logs-") as folder:
            took = measure(written(Path(folder), commits, transactions))
        print(f"| {name} | {' | '.join(f'{seconds:.3f} s' for seconds in took.values())} |", flush=True)


if __name__ == "__main__":
    main()
