"""Requests of runs to an object store by their number of messages, counted in the log of a local S3 server.

Run it as `python -m benchmarks.requests [--runs N] [--delay MS] [--files N]`. Each size has its own lake, in which runs
follow each other: the more commits a table has since its checkpoint, the more a run reads. With a delay, each request
waits before it reaches the server, as with a distant store; then the seconds of each step are printed.

These runs neither fail nor get redeliveries. With `--files` only the requests are counted with which a run looks up
redelivered messages in as many files of `outcomes`, and counts the failures in as many files of `failed`.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pyarrow as pa

from benchmarks.events import Events, payloads
from benchmarks.whole_run import WINDOW
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.reader import RowRange, read_ranges
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.lake.writer import write_rows
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.message import MESSAGE_KEY
from pipeline_platform.orchestration.resources.spark_resource import WARM, SparkResource
from pipeline_platform.run import steps
from pipeline_platform.run.begin import begin
from pipeline_platform.run.flow import Flow
from pipeline_platform.spark import server as spark_server
from servers import s3, sqs
from servers.__main__ import FOLDER
from servers.server import free_ports

STEPS = (steps.receive_messages, steps.handle_messages, steps.decide, steps.publish, steps.acknowledge)

SIZES = {100: 22, 10_000: 12, 1_000_000: 2}
"""Number of runs by the number of messages of a run."""


def requests(
    spark: SparkResource, server: s3.S3, address: str, messages: int, runs: int
) -> Iterator[tuple[int, dict[str, float]]]:
    """Return the requests of several runs with a number of messages, and the seconds of their steps."""
    options = {**sqs.ENVIRONMENT, "AWS_REGION": sqs.REGION, "AWS_ENDPOINT_URL": address}
    lake = Lake(root=f"s3://{s3.BUCKET}/{messages}", storage_options=options)
    with tempfile.TemporaryDirectory() as folder:
        queue = TableQueue(name="events_queue", url=f"sqlite:///{folder}/queue.sqlite")
        queue.create()
        control = ControlStore(f"sqlite:///{folder}/control.sqlite")
        for number in range(runs):
            queue.enqueue(payloads(messages))
            before, took, started = len(server.requests()), {}, time.monotonic()
            flow = Flow(
                BoundProducer(Events), queue, lake, control, lambda: spark.spark_session
            )  # as in a separate process
            receive = begin(flow, origin="source", run_id=str(number), windows=[WINDOW])
            took["begin"] = time.monotonic() - started
            for step in STEPS:
                started = time.monotonic()
                step(flow, receive)
                took[step.__name__] = time.monotonic() - started
            assert not flow.ledger.unfinished()
            yield len(server.requests()) - before, took


def of_files(server: s3.S3, number: int) -> dict[str, int]:
    """Return the requests of a look-up of duplicates and of a count of failures, in a number of files."""
    options = {**sqs.ENVIRONMENT, "AWS_REGION": sqs.REGION, "AWS_ENDPOINT_URL": server.address}
    tables = Tables(Lake(root=f"s3://{s3.BUCKET}/files", storage_options=options), Events)
    tables.ensure()
    looked_in = []
    for name, column, value in (("outcomes", "outcome", "handled"), ("failed", "state", "open")):
        table = tables[name]
        columns = pa.schema([field for field in table.schema if field.name != "window"])
        parts = (
            (
                name,
                WINDOW,
                pa.Table.from_pylist([{"source": "queue", "message_id": str(n), "attempt": 1, column: value}], columns),
            )
            for n in range(number)
        )
        files = [file for part in parts for file in write_rows(tables.lake, table.pipeline, "bench", [part])]
        with table.look() as handle:
            table.swap(handle, "bench", files)
        looked_in += [RowRange(table.path(f.path), f.window, 0, f.rows, 0) for f in files]
    columns = pa.schema([(name, pa.string()) for name in (*MESSAGE_KEY, "outcome")])
    failures = FailedMessages(name="queue", lake=tables.lake, pipeline=Events.name)

    def look_up() -> object:
        return [*read_ranges(tables.lake, looked_in[:number], columns, 65_536)]

    made = {}
    for name, work in {"look-up": look_up, "count of failures": failures.by_window}.items():
        before = len(server.requests())
        work()
        made[name] = len(server.requests()) - before
    return made


@contextmanager
def far(server: s3.S3, delay_s: float) -> Iterator[str]:
    """Yield an address of the server at which another process delays each request."""
    (port,) = free_ports(1)
    relay = multiprocessing.get_context("spawn").Process(target=_relay, args=(server.address, port, delay_s))
    relay.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        relay.kill()


def _relay(address: str, port: int, delay_s: float) -> None:
    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
        while data := await reader.read(1 << 20):
            await asyncio.sleep(seconds)
            writer.write(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
        await asyncio.gather(pass_on(reader, there[1], delay_s), pass_on(there[0], writer, 0), return_exceptions=True)

    async def serve() -> None:
        async with await asyncio.start_server(accept, "127.0.0.1", port) as relay:
            await relay.serve_forever()

    asyncio.run(serve())


def main() -> None:
    """Print the requests per run and per thousand messages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", type=int, help="runs of each size; the first run creates the tables and is not counted"
    )
    parser.add_argument(
        "--delay", type=int, help="delay of each request in milliseconds; only for runs of 100 messages"
    )
    parser.add_argument("--files", type=int, help="count the requests for files only")
    arguments = parser.parse_args()
    delay = arguments.delay
    if arguments.files:
        with s3.serve(FOLDER) as server:
            for name, count in of_files(server, arguments.files).items():
                print(f"{name} in {arguments.files} files: {count} requests")
        return
    with tempfile.TemporaryDirectory() as folder, s3.serve(FOLDER) as server, far(server, (delay or 0) / 1_000) as slow:
        spark_server.start(Path(folder))
        try:
            with closing(SparkResource(remote=WARM, state_folder=folder, packages=["benchmarks"])) as spark:
                for messages, runs in [*SIZES.items()][: 1 if delay else None]:
                    address = slow if delay else server.address
                    _, *seen = requests(spark, server, address, messages, arguments.runs or runs)
                    counted, mean = [count for count, _ in seen], statistics.mean(count for count, _ in seen)
                    print(
                        f"{messages:>9,} messages: {mean:.0f} requests a run ({min(counted)} to {max(counted)}), "
                        f"{mean * 1_000 / messages:,.1f} a thousand messages"
                    )
                    if delay:
                        took = {name: statistics.median(seconds[name] for _, seconds in seen) for name in seen[0][1]}
                        each = ", ".join(f"{name} {seconds:.1f}" for name, seconds in took.items())
                        print(f"{delay} ms each: {sum(took.values()):.1f} s per run ({each})")
        finally:
            spark_server.stop(Path(folder))


if __name__ == "__main__":
    main()
