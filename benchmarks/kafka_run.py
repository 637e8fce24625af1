"""Whole runs from a Kafka topic to two Delta tables, compared with hand-written consumers.

Run it as `python -m benchmarks.kafka_run [--messages N] [--rounds N]`. The hand-written code runs a plain consumer per
core, which decodes with msgspec and writes Parquet; then it commits to each table, and then the offsets. It stores no
payloads, failures or outcomes, and after a crash it handles messages twice. The platform executes runs from claim to
acknowledgement on a warm server. The benchmark starts its own Kafka, which needs Maven. Peers take turns.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.events import ByStruct, EventStruct, payloads
from benchmarks.kafka import PARTITIONS, topic_at
from benchmarks.options import options
from benchmarks.whole_run import flow_at, warm_spark, whole_run
from pipeline_platform.connectors.kafka import KafkaSource
from pipeline_platform.model.columns.schema import arrow_schema
from servers import kafka as local

TASKS, AT_ONCE = 2, 10_000
Written = tuple[str, str, int, int]
"""Table, path, bytes and rows of a file."""

SCHEMA = pa.schema(list(arrow_schema(EventStruct)))


def hand_written(pool: ProcessPoolExecutor, servers: str, topic: str, root: Path, messages: int) -> None:
    """Consume all messages in several processes, commit their files to both tables, then the offsets."""
    from confluent_kafka import Consumer, TopicPartition
    from deltalake import DeltaTable, Schema
    from deltalake.transaction import AddAction, RemoveAction

    parts = [[(topic, number) for number in range(task, PARTITIONS, TASKS)] for task in range(TASKS)]
    done = list(pool.map(_consume, [servers] * TASKS, parts, [str(root)] * TASKS))
    files = [file for written, _ in done for file in written]
    for name in ByStruct.batchers:
        table = DeltaTable.create(str(root / name), Schema.from_arrow(SCHEMA))
        now = int(time.time() * 1_000)
        mine = [(path, size) for where, path, size, _ in files if where == name]
        adds: list[AddAction | RemoveAction] = [AddAction(*file, {}, now, True, "") for file in mine]
        table.create_write_transaction(adds, "append", Schema.from_arrow(SCHEMA))
    consumer = Consumer({"bootstrap.servers": servers, "group.id": f"plain-{uuid4().hex}"})
    ends = [TopicPartition(*place, past) for _, ended in done for *place, past in ended]
    consumer.commit(offsets=ends, asynchronous=False)
    consumer.close()
    assert sum(rows for *_, rows in files) == messages


def _consume(
    servers: str, places: list[tuple[str, int]], root: str
) -> tuple[list[Written], list[tuple[str, int, int]]]:
    from confluent_kafka import Consumer, TopicPartition

    settings = {"bootstrap.servers": servers, "group.id": f"plain-{uuid4().hex}", "enable.auto.commit": False}
    consumer = Consumer({**settings, "fetch.queue.backoff.ms": 2})
    ends = [(*place, consumer.get_watermark_offsets(TopicPartition(*place))[1]) for place in places]
    consumer.assign([TopicPartition(*place, 0) for place in places])
    left, decode = sum(past for *_, past in ends), msgspec.json.Decoder(EventStruct).decode
    writers = {}
    for name in ByStruct.batchers:
        path = Path(root) / name / f"{uuid4().hex}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        writers[name] = path, pq.ParquetWriter(path, SCHEMA, compression="zstd", compression_level=1)
    rows = dict.fromkeys(writers, 0)
    while left:
        messages = consumer.consume(min(left, AT_ONCE), 0.5)
        left -= len(messages)
        tables: dict[str, list[Any]] = {"clicks": [], "views": []}
        for message in messages:
            event = decode(message.value())
            tables["clicks" if event.kind == "click" else "views"].append(event)
        for name, events in tables.items():
            columns = [[getattr(event, field) for event in events] for field in SCHEMA.names]
            arrays = [pa.array(*column) for column in zip(columns, SCHEMA.types, strict=True)]
            writers[name][1].write_batch(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA), row_group_size=1_000_000)
            rows[name] += len(events)
    consumer.close()
    for _, writer in writers.values():
        writer.close()
    return [(name, path.name, path.stat().st_size, rows[name]) for name, (path, _) in writers.items()], ends


def main() -> None:
    """Run the benchmark and print the result."""
    given = options(__doc__, messages=1_000_000, rounds=5)
    with ExitStack() as until_the_end:
        folder = Path(until_the_end.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        pool = until_the_end.enter_context(ProcessPoolExecutor(TASKS, get_context("spawn")))
        list(pool.map(abs, range(TASKS)))  # wait until all are connected
        installed = Path(os.environ.get("PIPELINE_SERVERS", Path(__file__).parents[1] / ".servers"))
        servers = until_the_end.enter_context(local.serve(installed)).address
        topic, sink = topic_at(servers), f"fill-{uuid4().hex}"
        filling = KafkaSource(name="fill", bootstrap_servers=servers, group_id=sink, topics=(topic,))
        filling.send(payloads(given.messages), ({"partition": n % PARTITIONS} for n in range(given.messages)))
        session = until_the_end.enter_context(warm_spark(folder / "spark")).spark_session
        ratios = []
        for nth in range(given.rounds + 1):
            place = folder / str(nth)
            source = KafkaSource(name="kafka", bootstrap_servers=servers, group_id=uuid4().hex, topics=(topic,))
            flow = flow_at(place, ByStruct, source, session)
            peers: dict[str, Callable[[], object]] = {
                "ours": lambda flow=flow: whole_run(flow, given.messages),  # type: ignore[misc]
                "hand-written": lambda at=place: hand_written(pool, servers, topic, Path(f"{at}-hand"), given.messages),  # type: ignore[misc]
            }
            took = {}
            for name in sorted(peers, reverse=nth % 2 == 0):
                began = time.perf_counter()
                peers[name]()
                took[name] = time.perf_counter() - began
            source.close()
            ratio = took["hand-written"] / took["ours"]
            rates = ", ".join(f"{name} {given.messages / seconds:,.0f}/s" for name, seconds in sorted(took.items()))
            print(f"{f'round {nth}' if nth else 'warming up'}: {rates}, ratio {ratio:.2f}", flush=True)
            ratios += [ratio] if nth else []
        print(
            f"rate of whole runs compared with hand-written consumers: {statistics.median(ratios):.2f} (at least 0.8)"
        )


if __name__ == "__main__":
    main()
