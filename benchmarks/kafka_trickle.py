"""Latency of a trickle from Kafka to a Delta table, and its processor time: the platform and two alternatives.

Run it as `python -m benchmarks.kafka_trickle [--peer platform loop ...] [--per-second 1 50] [--seconds 60]`. The peers
take turns, and store the same events: continuous runs of the platform under a real daemon, a hand-written loop
(`kafka_loop.py`), and Structured Streaming (`Streaming.java`) with two triggers. A message is stored when the commit
that adds it is in the log of the table. The benchmark starts its own Kafka, which needs Maven. Structured Streaming
also needs a JDK.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import polars as pl
from confluent_kafka import Producer

from benchmarks.events import SCHEMA
from benchmarks.kafka import topic_at
from benchmarks.latency import daemon
from benchmarks.latency_location import IDLE_TIMEOUT, KAFKA, PATIENCE
from benchmarks.trickle import cell, message, processor_s, send
from servers import kafka as local
from servers import spark_jvm
from servers.server import Program

SERVERS = Path(os.environ.get("PIPELINE_SERVERS", Path(__file__).parents[1] / ".servers"))
WARM_S, WITHIN_S = 60.0, 120.0
"""Seconds of a trickle before the measured trickle: the JVM compiles its code meanwhile."""


@contextmanager
def platform(folder: Path, servers: str, topic: str) -> Iterator[Path]:
    """Evaluate a pipeline with a daemon; yield its table."""
    options = {"name": "queue", "bootstrap_servers": servers, "group_id": topic, "topics": [topic]}
    os.environ[KAFKA] = json.dumps({**options, "offset_reset_policy": "earliest"})
    os.environ[PATIENCE], os.environ[IDLE_TIMEOUT] = "0.2", "30"
    with daemon(folder):
        yield folder / "lake" / "single" / "events"


@contextmanager
def loop(folder: Path, servers: str, topic: str) -> Iterator[Path]:
    """Run the hand-written loop; yield its table."""
    table = folder / "table"
    command = [sys.executable, "-m", "benchmarks.kafka_loop", servers, topic, str(table)]
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    with Program(servers, command, folder, "started", environment).running():
        yield table


@contextmanager
def streaming(trigger: str, folder: Path, servers: str, topic: str) -> Iterator[Path]:
    """Run Structured Streaming; yield its table."""
    program = Path(__file__).with_name("Streaming.java")
    command = spark_jvm.command(SERVERS, program, servers, topic, str(folder), SCHEMA, trigger)
    with Program(servers, command, folder, "query started", {}).running():
        yield folder / "table"


PEERS: dict[str, Callable[[Path, str, str], AbstractContextManager[Path]]] = {
    "platform": platform,
    "loop": loop,
    "streaming": partial(streaming, "0 seconds"),
    "streaming-1s": partial(streaming, "1 second"),
}


def stored(table: Path) -> list[tuple[float, float]]:
    """Return when each row of a table was sent, and when it was stored."""
    found = []
    for commit in (table / "_delta_log").glob("*.json"):
        for line in commit.read_text().splitlines():
            if (add := json.loads(line).get("add")) and add["dataChange"]:
                rows = pl.read_parquet(table / unquote(add["path"]), columns=["price"], hive_partitioning=False)
                found += [(sent, commit.stat().st_mtime) for sent in rows["price"]]
    return found


def measure(peer: str, servers: str, per_second: float, seconds: int) -> tuple[list[float], float, int]:
    """Send a trickle; return the latencies in seconds, the processor time of an hour, and the rows stored twice."""
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as temporary:
        folder, topic, sent = Path(temporary), topic_at(servers), 0
        producer = Producer({"bootstrap.servers": servers, "linger.ms": 0})

        def put(payload: bytes) -> None:
            nonlocal sent
            producer.produce(topic, payload)
            producer.poll(0)
            sent += 1

        with PEERS[peer](folder, servers, topic) as table:
            put(message())
            _wait(table, sent)
            send(put, 1 / per_second, WARM_S)
            before, began = processor_s(folder), time.time()
            took = send(put, 1 / per_second, seconds)
            processor = (processor_s(folder) - before) * 3600 / took
            producer.flush()
            _wait(table, sent)
            rows = stored(table)
            return [at - came for came, at in rows if came >= began], processor, len(rows) - sent


def _wait(table: Path, rows: int) -> None:
    end = time.monotonic() + WITHIN_S
    while len(stored(table)) < rows:
        if time.monotonic() > end:
            raise TimeoutError(f"{table}: {len(stored(table))} of {rows} rows within {WITHIN_S:.0f} s")
        time.sleep(0.5)


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", nargs="+", choices=[*PEERS], default=[*PEERS])
    parser.add_argument("--per-second", type=float, nargs="+", default=[1, 50])
    parser.add_argument("--seconds", type=int, default=60)
    given = parser.parse_args()
    with local.serve(SERVERS) as server:
        print("| | messages per second | latency | processor time per hour | |\n|-|-|-|-|-|", flush=True)
        for per_second in given.per_second:
            for peer in given.peer:
                late, processor, surplus = measure(peer, server.address, per_second, given.seconds)
                note = f"{surplus} STORED TWICE" if surplus else f"{len(late)} messages"
                print(f"| {peer} | {per_second:g} | {cell(late)} | {processor:,.0f} s | {note} |", flush=True)


if __name__ == "__main__":
    main()
