"""Handling and whole runs, compared with hand-written code in the same Spark session.

Run it as `python -m benchmarks.handling [--messages N] [--rounds N]`. Peers take turns in one session, in alternating
order. Two peers are compared within a round, at most minutes apart, so that load on the machine affects both. The
median of the ratios is printed, with minimum and maximum.

- *bare*: `mapInArrow` that decodes each row, routes it, builds the Arrow columns of both tables, and only counts.
- *message.json()* and other ways to decode: the step `handle_messages` of a pipeline, which writes typed tables,
  failures and outcomes.
- *plain query*: Spark's `from_json` of the same rows, written by Spark's partitioned Parquet writer.
- *columns*: the same query in a pipeline's `handle_messages`, written with outcomes.
- *whole run*: from lease to acknowledgement, from a SQLite queue.
- *Broadway in memory* and *Broadway to files*: see `benchmarks.broadway`. Skipped if it is missing.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from benchmarks import broadway
from benchmarks.events import IDIOMS, Event, EventColumns, Events, parsed, payloads
from benchmarks.options import options, spread
from benchmarks.whole_run import WINDOW, flow_at, warm_spark, whole_run
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.lake.decisions.ledger import Receive
from pipeline_platform.model.columns.schema import arrow_schema
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.resources.spark_resource import SparkResource
from pipeline_platform.run import steps
from pipeline_platform.run.begin import begin
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.work.local_worker import LocalWorker
from pipeline_platform.spark import engine

COUNTS = pa.schema([("table", pa.string()), ("rows", pa.int64())])
WHOLE = ("message.json()", "message.json(Model)", "message.json(Struct)", "blocks")
"""Ways to decode for which whole runs are measured."""
PEERS = {"memory": "Broadway in memory", "files": "Broadway to files"}


def bare(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Decode and route rows, build columns, and count."""
    model = Events.batchers["clicks"].table_schema
    assert model is not None
    struct = pa.struct(list(arrow_schema(model)))
    for batch in batches:
        tables: dict[str, list[Any]] = {"clicks": [], "views": []}
        for data in batch.column("data").to_pylist():
            event = msgspec.json.decode(data)
            tables["clicks" if event["kind"] == "click" else "views"].append(event)
        for name, rows in tables.items():
            columns = pa.array(rows, struct).flatten()
            yield pa.RecordBatch.from_pylist([{"table": name, "rows": len(columns[0])}], COUNTS)


def timed(name: str, work: Callable[[], object]) -> dict[str, float]:
    """Record the seconds of a block under a name."""
    started = time.perf_counter()
    work()
    return {name: time.perf_counter() - started}


def _handle(name: str, flow: Flow, receive: Receive) -> dict[str, float]:
    """Time the handling of a receive, which may have been handled in an earlier round."""
    flow.lake.remove_file(f"{flow.ledger.folder(receive.receive_id)}/handle.parquet")
    again = replace(flow)  # without cached manifests
    return timed(name, lambda: steps.handle_messages(again, receive))


def _broadway(mode: str, messages: int) -> dict[str, float]:
    return {PEERS[mode]: broadway.seconds(mode, messages)}


def _modes() -> list[str]:
    """Return the modes of Broadway that this machine can run; print the reason if there are none."""
    try:
        broadway.seconds("memory", 1)
    except broadway.MissingError as missing:
        print(f"Skipped Broadway: {missing}", flush=True)
        return []
    return [*PEERS]


class Bench:
    """A folder, a warm Spark server and a session; with a worker, few messages are handled without Spark."""

    def __init__(self, root: Path, spark: SparkResource, messages: int, worker: LocalWorker | None = None) -> None:
        self.root, self.messages, self._spark, self._worker = root, messages, spark, worker
        self.session = spark.spark_session

    def flow(self, pipeline: type[Pipeline], queue: TableQueue, folder: Path | None = None) -> Flow:
        """Return a pipeline in its own folder, or in the shared folder."""
        return flow_at(folder or self.root, pipeline, queue, self.session, self._worker)

    def queue(self, name: str, folder: Path | None = None) -> TableQueue:
        """Return a queue that contains all messages."""
        queue = TableQueue(name=name, url=f"sqlite:///{folder or self.root}/{name}.sqlite")
        queue.create()
        queue.enqueue(payloads(self.messages))
        return queue

    def received(self, pipeline: type[Pipeline], queue: TableQueue) -> tuple[Flow, Receive, list[str]]:
        """Return all messages as a receive that is not handled yet, and its files."""
        flow = self.flow(pipeline, queue)
        receive = begin(flow, origin="source", run_id="bench", windows=[WINDOW])
        files = steps.receive_messages(flow, receive).of_table("messages")
        return flow, receive, [flow.lake.uri(pipeline.name, "messages", file.path) for file in files]

    def bare(self, files: list[str]) -> None:
        """Execute the hand-written stage."""
        rows = engine.map_batches(self.session.read.parquet(*files).select("data"), bare, COUNTS)
        counted = engine.gather(rows, COUNTS)
        assert sum(counted["rows"].to_pylist()) == self.messages

    def plain_query(self, files: list[str]) -> None:
        """Execute the hand-written query."""
        from pyspark.sql import functions as f

        rows = parsed(self.session.read.parquet(*files))
        routed = rows.select(*Event.model_fields, "message_id", "ack_id", f.col("kind").alias("batcher"))
        routed.write.mode("overwrite").partitionBy("batcher").parquet(f"{self.root}/plain")

    def whole_run(self, idiom: str) -> dict[str, float]:
        """Execute one run with a full queue; return its seconds, in total and by step."""
        with tempfile.TemporaryDirectory(dir=self.root) as folder:
            queue = self.queue("queue", Path(folder))
            flow = self.flow(IDIOMS[idiom], queue, Path(folder))
            took = whole_run(flow, self.messages)
            steps_ = {f"run by {idiom}: {name}": seconds for name, seconds in took.items()}
            return {f"run by {idiom}": sum(took.values()), **steps_}


def measure(messages: int, rounds: int) -> dict[str, list[float]]:
    """Let the peers take turns; return their seconds by round."""
    times: dict[str, list[float]] = {}
    chance = random.Random(messages)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        root = Path(folder)
        with warm_spark(root / "spark") as spark:
            bench = Bench(root, spark, messages)
            received = {name: bench.received(idiom, bench.queue(idiom.name)) for name, idiom in IDIOMS.items()}
            files = received["message.json()"][2]
            columns, columns_receive, column_files = bench.received(EventColumns, bench.queue("columns"))

            peers: list[Callable[[], dict[str, float]]] = [
                lambda: timed("bare", lambda: bench.bare(files)),
                lambda: timed("plain query", lambda: bench.plain_query(column_files)),
                partial(_handle, "columns", columns, columns_receive),
                *(partial(bench.whole_run, idiom) for idiom in WHOLE),
                *(partial(_broadway, mode, messages) for mode in _modes()),
                *(partial(_handle, name, *of[:2]) for name, of in received.items()),
            ]
            for turn in range(rounds + 1):
                for peer in chance.sample(peers, len(peers)):
                    took = peer()
                    name, seconds = next(iter(took.items()))
                    print(f"{name:20} {seconds:6.2f} s{'  (warming up)' if not turn else ''}", flush=True)
                    if turn:
                        for name, seconds in took.items():
                            times.setdefault(name, []).append(seconds)
    return times


def ratio(times: dict[str, list[float]], over: str, under: str) -> str:
    """Return the median of the ratios, with minimum and maximum."""
    return spread([mine / peers for mine, peers in zip(times[over], times[under], strict=True)])


def report(times: dict[str, list[float]], messages: int) -> str:
    """Return the medians and the ratios as a table."""
    lines = [f"{messages} messages, medians of {len(times['bare'])} rounds", ""]
    for name, took in sorted(times.items()):
        median = statistics.median(took)
        lines.append(f"| {name} | {median:.2f} s | {messages / median:,.0f}/s |")
    lines += [
        "",
        *(f"{name} / bare: {ratio(times, name, 'bare')}" for name in IDIOMS),
        f"columns / plain query: {ratio(times, 'columns', 'plain query')} (at most 1.0)",
        *(
            f"rate of a whole run by {idiom} / rate of {peer}: {ratio(times, peer, f'run by {idiom}')}"
            for idiom in WHOLE
            for peer in ("bare", *PEERS.values())
            if peer in times
        ),
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark and print the result."""
    given = options(__doc__, messages=1_000_000, rounds=5)
    print(report(measure(given.messages, given.rounds), given.messages))


if __name__ == "__main__":
    main()
