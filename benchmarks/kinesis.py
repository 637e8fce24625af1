"""Receiving and acknowledging Kinesis messages, compared with plain boto3 in the same number of processes.

Run it as `python -m benchmarks.kinesis --messages 20000 --bytes 250`. It starts a server, which needs Node. Both sides
read the same shards with the same calls. Ours also writes Parquet and stores positions; plain boto3 keeps everything in
memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from itertools import starmap
from pathlib import Path

import pyarrow.compute as pc

from benchmarks.options import options
from pipeline_platform.connectors.kinesis import KinesisSource
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import read_ranges, whole
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.message import MESSAGES
from pipeline_platform.tasks.receive.read_shares import ReadShares
from servers import kinesis as local

SHARDS, WINDOW = 4, "2026-01-01T0000"


def main() -> None:
    given = options(__doc__, messages=20_000, bytes=250, tasks=2, rounds=5)
    os.environ |= local.ENVIRONMENT
    with ExitStack() as until_the_end:
        folder = Path(until_the_end.enter_context(tempfile.TemporaryDirectory()))
        installed = Path(os.environ.get("PIPELINE_SERVERS", Path(__file__).parents[1] / ".servers"))
        endpoint = until_the_end.enter_context(local.serve(installed)).address
        stream = local.create_stream(endpoint, "benchmark", SHARDS)
        pool = until_the_end.enter_context(ProcessPoolExecutor(given.tasks))
        list(pool.map(abs, range(given.tasks)))
        started = time.perf_counter()
        payloads = (b"%*d" % (given.bytes, number) for number in range(given.messages))
        _source("fill", endpoint, stream).send(payloads)
        print(f"sent {given.messages / (time.perf_counter() - started):,.0f}/s", flush=True)
        _compare(pool, folder, endpoint, stream, given)


def _compare(pool: ProcessPoolExecutor, folder: Path, endpoint: str, stream: str, given: argparse.Namespace) -> None:
    walls: list[float] = []
    processors: list[float] = []
    for nth in range(given.rounds):
        sides: dict[str, Callable[[], float]] = {
            "ours": lambda: _ours(pool, folder / str(nth), endpoint, stream, given),  # noqa: B023 - called at once
            "plain": lambda: _plain(pool, endpoint, stream, given),
        }
        took: dict[str, tuple[float, float]] = {}
        for name in sides if nth % 2 == 0 else reversed(sides):
            started = time.perf_counter()
            processor = sides[name]()
            took[name] = time.perf_counter() - started, processor
        walls.append(took["plain"][0] / took["ours"][0])
        processors.append(took["plain"][1] / took["ours"][1])
        rates = ", ".join(f"{name} {given.messages / seconds:,.0f}/s" for name, (seconds, _) in sorted(took.items()))
        print(f"round {nth + 1}: {rates}, ratio {walls[-1]:.2f}, by processor time {processors[-1]:.2f}", flush=True)
    print(
        f"rate compared with plain boto3, median of {given.rounds}: {statistics.median(walls):.2f}; "
        f"by processor time {statistics.median(processors):.2f}"
    )


def _source(name: str, endpoint: str, stream: str) -> KinesisSource:
    return KinesisSource(name=name, stream=stream, endpoint_url=endpoint, region_name=local.REGION)


def _ours(pool: ProcessPoolExecutor, root: Path, endpoint: str, stream: str, given: argparse.Namespace) -> float:
    """Plan, read into files, and finish; return the processor time of the processes that read."""
    root.mkdir()
    source = _source("source", endpoint, stream)
    source.open(ControlStore(f"sqlite:///{root}/control.sqlite"))
    lake = Lake(root=str(root / "lake"))
    shares = source.plan(2 * given.messages, given.tasks, "r")
    task = ReadShares(source, shares, lake, "benchmark", "r", WINDOW)
    read = list(pool.map(_read, [task] * len(shares), range(len(shares))))
    manifest = sum((manifest for manifest, _ in read), Manifest())
    assert manifest.rows("messages") == given.messages

    def held() -> Iterator[tuple[str, list[str]]]:
        for _, rows in read_ranges(lake, whole(manifest.of_table("messages"), "benchmark"), MESSAGES, 100_000):
            refs = pc.unique(rows.column("ack_ref")).to_pylist()
            yield from ((ref, rows.filter(pc.equal(rows["ack_ref"], ref))["ack_id"].to_pylist()) for ref in refs)

    source.finish("r", held)
    assert source.backlog().messages == 0
    source.close()
    return float(sum(seconds for _, seconds in read))


def _read(task: ReadShares, index: int) -> tuple[Manifest, float]:
    started = time.process_time()
    manifest = sum((Manifest.of(batch) for batch in task(index)), Manifest())
    return manifest, time.process_time() - started


def _plain(pool: ProcessPoolExecutor, endpoint: str, stream: str, given: argparse.Namespace) -> float:
    """Read all shards; return the processor time of the processes that read."""
    shards = [shard["ShardId"] for shard in local.client(endpoint).list_shards(StreamName=stream)["Shards"]]
    parts = [(endpoint, stream, shards[nth :: given.tasks]) for nth in range(given.tasks)]
    read = [future.result() for future in list(starmap(pool.submit, [(_read_plain, *part) for part in parts]))]
    assert sum(messages for messages, _ in read) == given.messages
    return float(sum(seconds for _, seconds in read))


def _read_plain(endpoint: str, stream: str, shards: list[str]) -> tuple[int, float]:
    import boto3

    started, messages = time.process_time(), []
    client = boto3.Session().client("kinesis", endpoint_url=endpoint)  # a forked client would share its connections
    for shard in shards:
        at = {"StreamName": stream, "ShardId": shard, "ShardIteratorType": "TRIM_HORIZON"}
        iterator = client.get_shard_iterator(**at)["ShardIterator"]
        while True:
            page = client.get_records(ShardIterator=iterator, Limit=10_000)
            messages += page["Records"]
            iterator = page["NextShardIterator"]
            if len(page["Records"]) < 10_000 and not page["MillisBehindLatest"]:
                break
    return len(messages), time.process_time() - started


if __name__ == "__main__":
    main()
