"""Receiving and acknowledging Kafka messages, compared with plain consumers, one per core, with the same output.

Run it as `python -m benchmarks.kafka --messages 1000000 --bytes 250 [--servers HOST:PORT]`. It creates a topic of its
own there. Without --servers it starts a server, which needs Maven. Both sides read the same ranges of offsets with the
same number of processes, and write the same rows with the same writer.
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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa

from pipeline_platform.connectors.kafka import KafkaSource
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.writer import Writer
from pipeline_platform.model.message import MESSAGES
from pipeline_platform.source.contract import Share
from pipeline_platform.source.patience import patiently
from pipeline_platform.tasks.receive.read_shares import ReadShares
from servers import kafka as local

PARTITIONS, WINDOW = 4, "2026-01-01T0000"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--messages", type=int, default=1_000_000)
    options.add_argument("--bytes", type=int, default=250)
    options.add_argument("--tasks", type=int, default=2)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--servers", help="host:port of brokers; by default it starts a server")
    given = options.parse_args()
    with ExitStack() as until_the_end:
        folder = Path(until_the_end.enter_context(tempfile.TemporaryDirectory()))
        servers = given.servers
        if servers is None:
            installed = Path(os.environ.get("PIPELINE_SERVERS", Path(__file__).parents[1] / ".servers"))
            servers = until_the_end.enter_context(local.serve(installed)).address
        topic = topic_at(servers)
        pool = until_the_end.enter_context(ProcessPoolExecutor(given.tasks))
        list(pool.map(abs, range(given.tasks)))
        _source("fill", servers, topic).send(
            _payloads(given.messages, given.bytes),
            ({"partition": n % PARTITIONS, "key": f"key {n % 1_000}"} for n in range(given.messages)),
        )
        _compare(pool, folder, servers, topic, given)


def _compare(pool: ProcessPoolExecutor, folder: Path, servers: str, topic: str, given: argparse.Namespace) -> None:
    ratios: list[float] = []
    for nth in range(given.rounds):
        source = _source(f"round-{nth}", servers, topic)
        source.open(ControlStore(f"sqlite:///{folder}/{nth}.sqlite"))
        patiently(source.backlog)  # connected, as in a run
        took = _round(pool, source, given, folder / str(nth), ours_first=nth % 2 == 0)
        ratios.append(took["plain"] / took["ours"])
        rates = ", ".join(f"{name} {given.messages / seconds:,.0f}/s" for name, seconds in sorted(took.items()))
        print(f"round {nth + 1}: {rates}, ratio {ratios[-1]:.2f}", flush=True)
        source.close()
    print(f"rate compared with plain consumers, median of {given.rounds}: {statistics.median(ratios):.2f}")


def _round(
    pool: ProcessPoolExecutor, source: KafkaSource, given: argparse.Namespace, root: Path, *, ours_first: bool
) -> dict[str, float]:
    """Return the seconds of both sides."""
    shares = source.plan(
        given.messages, given.tasks, "r"
    )  # nothing is acknowledged, so `_ours` plans the same ranges again
    sides: dict[str, Callable[[], object]] = {
        "ours": lambda: _ours(pool, source, given, root / "ours"),
        "plain": lambda: _plain(pool, source, shares, root / "plain"),
    }
    took: dict[str, float] = {}
    for name in sides if ours_first else reversed(sides):
        start = time.perf_counter()
        sides[name]()
        took[name] = time.perf_counter() - start
    return took


def _ours(pool: ProcessPoolExecutor, source: KafkaSource, given: argparse.Namespace, root: Path) -> None:
    shares = source.plan(given.messages, given.tasks, "r")
    task = ReadShares(source, shares, Lake(root=str(root)), "benchmark", "r", WINDOW)
    rows = sum(pool.map(_read, [task] * len(shares), range(len(shares))))
    assert rows == given.messages
    source.finish("r")


def _read(task: ReadShares, index: int) -> int:
    return int(sum((Manifest.of(batch) for batch in task(index)), Manifest()).rows("messages"))


def _plain(pool: ProcessPoolExecutor, source: KafkaSource, shares: list[Share], root: Path) -> None:
    spans = [share.at["spans"] for share in shares]
    count = len(shares)
    rows = pool.map(_consume, [source.bootstrap_servers] * count, spans, [str(root)] * count, range(count))
    assert sum(rows) == sum(share.messages for share in shares)


def _consume(servers: str, spans: list[tuple[str, int, int, int]], root: str, nth: int) -> int:
    """Assign, consume in thousands, build columns, write and commit, without the platform."""
    from confluent_kafka import Consumer, TopicPartition

    settings = {"bootstrap.servers": servers, "group.id": f"plain-{uuid4().hex}", "enable.auto.commit": False}
    consumer = Consumer({**settings, "auto.offset.reset": "error"})
    ends = {}
    for name, first, past, _ in spans:
        topic, topic_id, partition = name.split(":")
        ends[topic, int(partition)] = (topic_id, first, past)
    consumer.assign([TopicPartition(*place, first) for place, (_, first, _) in ends.items()])
    left = sum(past - first for _, first, past in ends.values())
    count = left
    with Writer(Lake(root=root), "benchmark", f"r-{nth}") as writer:
        while left:
            messages = [
                message
                for message in consumer.consume(10_000, 0.5)
                if message.error() is None and message.offset() < ends[message.topic(), message.partition()][2]
            ]
            left -= len(messages)
            writer.write("messages", WINDOW, _rows(messages, ends))
        writer.close()
    consumer.commit(offsets=[TopicPartition(*place, past) for place, (_, _, past) in ends.items()], asynchronous=False)
    consumer.close()
    return count


def _rows(messages: list[Any], ends: dict[tuple[str, int], tuple[str, int, int]]) -> pa.RecordBatch:
    places = [(message.topic(), message.partition()) for message in messages]
    offsets = [message.offset() for message in messages]
    names = [f"{topic}:{partition}" for topic, partition in places]
    count, now = len(messages), datetime.now(UTC)
    columns = {
        "source": ["kafka"] * count,
        "message_id": [f"{ends[place][0]}:{place[1]}:{at}" for place, at in zip(places, offsets, strict=True)],
        "data": [message.value() for message in messages],
        "metadata": [
            f'{{"topic": "{place[0]}", "partition": {place[1]}, "offset": {at}, "key": "{message.key().decode()}", '
            f'"headers": [], "timestamp": {message.timestamp()[1]}, "timestamp_type": "create"}}'
            for message, place, at in zip(messages, places, offsets, strict=True)
        ],
        "ack_ref": names,
        "ack_id": [str(at) for at in offsets],
        "attempt": [1] * count,
        "redelivered": [False] * count,
        "published_at": [None] * count,
        "partition": names,
        "sequence": offsets,
        "received_at": [now] * count,
        "receive_id": ["r"] * count,
        "first_receive_id": [None] * count,
    }
    schema = pa.schema([field for field in MESSAGES if field.name != "window"])
    return pa.RecordBatch.from_pydict(columns, schema=schema)


def _source(group: str, servers: str, topic: str) -> KafkaSource:
    return KafkaSource(name="kafka", bootstrap_servers=servers, group_id=f"{topic}-{group}", topics=(topic,))


def topic_at(servers: str) -> str:
    """Create a topic."""
    from confluent_kafka.admin import AdminClient, NewTopic

    name = f"benchmark-{uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic(name, PARTITIONS)])[name].result(30)
    return name


def _payloads(messages: int, size: int) -> Iterator[bytes]:
    payload = os.urandom(size)
    return (payload for _ in range(messages))


if __name__ == "__main__":
    main()
