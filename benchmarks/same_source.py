"""This platform beside Broadway on the same real queues, with results stored by both; and this platform with SQS.

Run it as `python -m benchmarks.same_source [--broadway FOLDER] [--source NAME ...]`. For each source it starts the
server, fills it with the same events for each peer, and lets the peers take turns in random order.

- *Broadway*, for Kafka and RabbitMQ: its own connector, two batchers, a file of JSON lines for each batch. FOLDER
  contains Broadway (`lib`) and its connectors (`connectors/lib`) in compiled form. Measured from the start of its
  pipeline. Its connector for SQS uses the Query protocol, which the local SQS server does not support.
- *Struct*, *blocks*: a whole run from claim to acknowledgement on a warm Spark, which stores messages, outcomes and two
  Delta tables, with `message.json(Struct)` and with blocks of Polars.
- *hand-written*, for Kafka only: the consumers of `benchmarks.kafka_run`.

Processor time is that of the pipeline, without the server of the source. Two figures are compared within a round.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

import psutil

from benchmarks import broadway
from benchmarks.events import ByBlocks, ByStruct, payloads
from benchmarks.kafka import PARTITIONS, topic_at
from benchmarks.kafka_run import TASKS, hand_written
from benchmarks.options import spread
from benchmarks.whole_run import flow_at, processor_s, warm_spark, whole_run
from pipeline_platform.connectors.kafka import KafkaSource
from pipeline_platform.connectors.rabbitmq import RabbitmqSource
from pipeline_platform.connectors.rabbitmq.rabbitmq_options import Binding, Declare
from pipeline_platform.connectors.sqs import SqsSource
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.resources.spark_resource import SparkResource
from pipeline_platform.source.contract import Source
from pipeline_platform.spark import server as spark_server
from servers import kafka, rabbitmq, sqs

SERVERS = Path(os.environ.get("PIPELINE_SERVERS", Path(__file__).parents[1] / ".servers"))
EXCHANGE = "amq.direct"
MESSAGES = {"kafka": 300_000, "rabbitmq": 100_000, "sqs": 20_000}


class Queue(NamedTuple):
    """A queue with all messages: for a run, and as arguments of Broadway's script."""

    source: Source
    place: Sequence[str] = ()


class Spent(NamedTuple):
    """Seconds of a peer, its processor time and the processor time of the source's server."""

    seconds: float
    busy: float
    server: float = 0.0


Fill = Callable[[int], list[Queue]]
"""Returns a number of queues, each with all messages."""


@contextmanager
def kafka_queues(messages: int) -> Iterator[Fill]:
    """Yield a function that returns new groups of consumers of the same topic."""
    with kafka.serve(SERVERS) as server:
        topic = topic_at(server.address)

        def source() -> KafkaSource:
            group = uuid4().hex
            return KafkaSource(name="kafka", bootstrap_servers=server.address, group_id=group, topics=(topic,))

        source().send(payloads(messages), ({"partition": n % PARTITIONS} for n in range(messages)))
        place = ["kafka", *server.address.split(":"), topic]
        yield lambda count: [Queue(source(), [*place, uuid4().hex]) for _ in range(count)]


@contextmanager
def rabbitmq_queues(messages: int) -> Iterator[Fill]:
    """Yield a function that publishes each message once, to an exchange that routes it to new queues."""
    with rabbitmq.serve(SERVERS) as server:
        port = str(urlsplit(server.address).port)

        def fill(count: int) -> list[Queue]:
            key = uuid4().hex
            bound = {"declare": Declare(), "bindings": (Binding(exchange=EXCHANGE, routing_key=key),)}
            sources = [
                RabbitmqSource(name="rabbitmq", url=server.address, queue=f"{key}-{nth}", **bound)
                for nth in range(count)
            ]
            assert not any(source.backlog().messages for source in sources)  # declared and bound
            sources[0].send(payloads(messages), repeat({"exchange": EXCHANGE, "routing_key": key}, messages))
            return [Queue(source, ["rabbitmq", port, source.queue]) for source in sources]

        yield fill


@contextmanager
def sqs_queues(messages: int) -> Iterator[Fill]:
    """Yield a function that fills new queues."""
    with sqs.serve(SERVERS) as server:

        def queue() -> Queue:
            url = sqs.create_queue(server.address, f"same-{uuid4().hex}")
            sqs.fill(url, payloads(messages))
            return Queue(SqsSource(name="sqs", queue_url=url, endpoint_url=server.address))

        yield lambda count: [queue() for _ in range(count)]


SOURCES: dict[str, Callable[[int], AbstractContextManager[Fill]]] = {
    "kafka": kafka_queues,
    "rabbitmq": rabbitmq_queues,
    "sqs": sqs_queues,
}


@dataclass(frozen=True)
class Bench:
    """The peers with their resources; `built` is the folder with Broadway, or None."""

    root: Path
    spark: SparkResource
    pool: ProcessPoolExecutor
    built: Path | None

    def peers(self, source: str) -> dict[str, Callable[[Queue, int], Spent]]:
        """Return the peers for a source by name."""
        peers: dict[str, Callable[[Queue, int], Spent]] = {}
        if self.built is not None and source != "sqs":
            peers["Broadway"] = self.broadway
        peers |= {"Struct": partial(self.run, ByStruct), "blocks": partial(self.run, ByBlocks)}
        if source == "kafka":
            peers["hand-written"] = self.hand_written
        return peers

    def broadway(self, queue: Queue, messages: int) -> Spent:
        """Run Broadway until it has acknowledged all messages."""
        assert self.built is not None
        return Spent(*broadway.of_source(self.built, queue.place, messages))

    def run(self, pipeline: type[Pipeline], queue: Queue, messages: int) -> Spent:
        """Execute a whole run."""
        server = spark_server.status(self.root / "spark")
        assert server is not None
        flow = flow_at(self._folder(), pipeline, queue.source, self.spark.spark_session)
        return _timed(lambda: whole_run(flow, messages), psutil.Process(server.pid))

    def hand_written(self, queue: Queue, messages: int) -> Spent:
        """Consume the topic with a consumer per core."""
        _, host, port, topic, _ = queue.place
        workers = [psutil.Process(child.pid) for child in multiprocessing.active_children()]
        return _timed(lambda: hand_written(self.pool, f"{host}:{port}", topic, self._folder(), messages), *workers)

    def _folder(self) -> Path:
        return self.root / uuid4().hex


def _timed(work: Callable[[], object], *helpers: psutil.Process) -> Spent:
    """Return the seconds of some work, and the processor time of this process and of its helpers."""

    def busy() -> float:
        return time.process_time() + processor_s(*helpers)

    before, started = busy(), time.perf_counter()
    work()
    return Spent(time.perf_counter() - started, busy() - before)


def compare(source: str, messages: int, rounds: int, bench: Bench) -> dict[str, list[Spent]]:
    """Let the peers take turns; return what each peer spent, by round."""
    spent: dict[str, list[Spent]] = {}
    peers, others = bench.peers(source), set(psutil.Process().children())
    with SOURCES[source](messages) as fill:
        servers = set(psutil.Process().children()) - others
        for turn in range(rounds + 1):
            order = random.sample(list(peers), len(peers))
            for name, queue in zip(order, fill(len(order)), strict=True):
                _until_idle(servers)  # a server still works on the fill after it confirmed the messages
                before = processor_s(*servers)
                peer = peers[name](queue, messages)
                peer = peer._replace(server=processor_s(*servers) - before)
                if source != "kafka":  # a topic keeps its messages
                    assert not queue.source.backlog().messages
                queue.source.close()
                print(f"{source} {name:12} {_figures(peer, messages)}{'' if turn else '  (warming up)'}", flush=True)
                if turn:
                    spent.setdefault(name, []).append(peer)
    return spent


def _until_idle(servers: Iterable[psutil.Process]) -> None:
    """Wait until servers use less than a tenth of a core, for a minute at most."""
    for _ in range(60):
        before = processor_s(*servers)
        time.sleep(1)
        if processor_s(*servers) - before < 0.1:
            return


def _figures(spent: Spent, messages: int) -> str:
    us = 1e6 / messages
    rate = f"{messages / spent.seconds:9,.0f}/s"
    return f"{rate} {spent.busy * us:7.1f} us per message, server {spent.server * us:6.1f} us"


def report(source: str, messages: int, spent: dict[str, list[Spent]]) -> str:
    """Return the medians of all peers, and the ratios of the rates to Broadway's within a round, as rows of a table."""
    lines = []
    for name, rounds in spent.items():
        medians = Spent(*map(statistics.median, zip(*rounds, strict=True)))
        row = f"| {source}, {messages:,} | {name} | {_figures(medians, messages).replace('/s ', '/s | ')} |"
        if "Broadway" in spent and name != "Broadway":
            faster = [theirs.seconds / ours.seconds for theirs, ours in zip(spent["Broadway"], rounds, strict=True)]
            less = [theirs.busy / ours.busy for theirs, ours in zip(spent["Broadway"], rounds, strict=True)]
            row += f" rate {spread(faster)} | work per second of processor time {spread(less)} |"
        lines.append(row)
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--broadway", type=Path, help="folder with Broadway and its connectors in compiled form")
    parser.add_argument("--source", nargs="+", choices=SOURCES, default=[*SOURCES])
    for name, count in MESSAGES.items():
        parser.add_argument(f"--{name}", type=int, default=count, help=f"messages of {name}; default: {count:,}")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if given.broadway is None:
        print("Skipped Broadway: --broadway is not set")
    elif "sqs" in given.source:
        print("Skipped Broadway for SQS: the local server does not support the Query protocol")
    os.environ.update(sqs.ENVIRONMENT)
    results = []
    with ExitStack() as until_the_end:
        root = Path(until_the_end.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        pool = until_the_end.enter_context(ProcessPoolExecutor(TASKS, get_context("spawn")))
        list(pool.map(abs, range(TASKS)))  # wait until all are connected
        bench = Bench(root, until_the_end.enter_context(warm_spark(root / "spark")), pool, given.broadway)
        for source in given.source:
            messages = getattr(given, source)
            results.append(report(source, messages, compare(source, messages, given.rounds, bench)))
    print(f"\nmedians of {given.rounds} rounds; load {os.getloadavg()[2]:.1f}\n", *results, sep="\n")


if __name__ == "__main__":
    main()
