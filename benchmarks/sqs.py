"""SQS compared with plain boto3, and one message with a long history, on a server that the benchmark starts.

Run it as `python -m benchmarks.sqs [--messages N] [--history N] [--rounds N]`.

- *platform*: two processes receive with the tasks of a run, which write Parquet, and delete by the ids in it.
- *boto3*: the same number of processes and threads make the same calls, keep messages in memory, and delete in tens.
- *bare*: *boto3* without the attributes for the time of sending and the number of receives. A run needs both to
  recognise a redelivery.
- *extend*: one process renews its leases, as the driver of a run does.
- *one message*: a whole run of one message, with no history and with outcomes of four days, of one run per hour.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.events import LongKnown, payloads
from benchmarks.options import options, spread
from benchmarks.whole_run import WINDOW, flow_at, warm_spark, whole_run
from pipeline_platform.connectors.sqs.sqs_source import SqsSource
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import OUTCOMES
from pipeline_platform.lake.writer import Writer
from pipeline_platform.run.flow import Flow
from pipeline_platform.source.calls import THREADS
from pipeline_platform.source.contract import Share
from pipeline_platform.tasks.receive.read_shares import ReadShares
from servers import sqs

PROCESSES = 2
SERVERS = Path(os.environ.get("PIPELINE_SERVERS", Path(__file__).parents[1] / ".servers"))


def platform(queue_url: str, endpoint: str, wanted: int, folder: str) -> float:
    """Receive and delete as a task does; return the processor time."""
    began = time.process_time()
    source, receive_id = SqsSource(name="queue", queue_url=queue_url, endpoint_url=endpoint), uuid.uuid4().hex
    lake = Lake(root=folder)
    list(ReadShares(source, [Share(messages=wanted)], lake, "events", receive_id, WINDOW)(0))
    for file in Path(folder, "events").rglob(f"{receive_id}*.parquet"):
        ids = pq.read_table(file, columns=["ack_id"]).column("ack_id").to_pylist()
        assert len(ids) == wanted
        assert not source.ack(queue_url, ids)
    return time.process_time() - began


def boto3(queue_url: str, endpoint: str, wanted: int, folder: str) -> float:
    """Receive and delete with plain boto3, with the attributes that a run needs."""
    del folder
    return _by_hand(queue_url, endpoint, wanted, ["ApproximateReceiveCount", "SentTimestamp"])


def bare(queue_url: str, endpoint: str, wanted: int, folder: str) -> float:
    """Receive and delete without attributes."""
    del folder
    return _by_hand(queue_url, endpoint, wanted, [])


def _by_hand(queue_url: str, endpoint: str, wanted: int, attributes: list[Any]) -> float:
    began = time.process_time()
    client = sqs.client(endpoint)

    def receive(count: int) -> list[Any]:
        got: list[Any] = []
        while len(got) < count:
            reply = client.receive_message(
                QueueUrl=queue_url,
                MaxNumberOfMessages=min(10, count - len(got)),
                VisibilityTimeout=900,
                MessageSystemAttributeNames=attributes,
            )
            got += reply.get("Messages", [])
        return got

    def delete(ten: list[Any]) -> None:
        entries = [{"Id": str(i), "ReceiptHandle": message["ReceiptHandle"]} for i, message in enumerate(ten)]
        assert not client.delete_message_batch(QueueUrl=queue_url, Entries=entries).get("Failed")  # type: ignore[arg-type]

    with ThreadPoolExecutor(THREADS) as pool:
        each = [wanted // THREADS + (nth < wanted % THREADS) for nth in range(THREADS)]
        held = [message for some in pool.map(receive, each) for message in some]
        list(pool.map(delete, [held[start : start + 10] for start in range(0, len(held), 10)]))
    return time.process_time() - began


def receive_and_delete(endpoint: str, messages: int, rounds: int, folder: str) -> None:
    """Let both take turns in alternating order."""
    peers: list[Callable[[str, str, int, str], float]] = [platform, boto3, bare]
    rates, busy, times = dict[str, list[float]](), dict[str, list[float]](), dict[str, list[float]]()
    # Forks must not use the connections of this process's client.
    with ProcessPoolExecutor(PROCESSES, initializer=sqs.client.cache_clear) as pool:
        for turn in range(rounds + 1):
            took, used = dict[str, float](), dict[str, float]()
            for peer in peers[turn % 3 :] + peers[: turn % 3]:
                url = sqs.create_queue(endpoint, f"bench-{uuid.uuid4().hex[:8]}")
                sqs.fill(url, payloads(messages))
                given, started = (url, endpoint, messages // PROCESSES, folder), time.perf_counter()
                used[peer.__name__] = sum(pool.map(peer, *([each] * PROCESSES for each in given)))
                took[peer.__name__] = time.perf_counter() - started
                sqs.client(endpoint).delete_queue(QueueUrl=url)
            if turn:  # the first round warms up
                for name, seconds in took.items():
                    times.setdefault(name, []).append(seconds)
                    rates.setdefault(name, []).append(seconds / took["platform"])
                    busy.setdefault(name, []).append(used["platform"] / used[name])
    for name, all_of_it in times.items():
        print(f"{name:10} {messages / statistics.median(all_of_it):7,.0f} messages per second")
    for name in ("boto3", "bare"):
        print(f"rate, platform / {name}: {spread(rates[name])}")
        print(f"processor time, platform / {name}: {spread(busy[name])}", flush=True)


def extend(endpoint: str, messages: int) -> None:
    """Time a renewal of the leases of one process."""
    url = sqs.create_queue(endpoint, "extended")
    sqs.fill(url, payloads(messages))
    source = SqsSource(name="queue", queue_url=url, endpoint_url=endpoint)
    batches = source.read(Share(messages=messages), "bench")
    held = [handle for batch in batches for handle in batch.column("ack_id").to_pylist()]
    started = time.perf_counter()
    assert source.extend("bench", lambda: [(url, held)])
    took = time.perf_counter() - started
    print(
        f"extend: {took:.1f} s for {len(held):,} messages, {100_000 * took / len(held):.0f} s for 100,000", flush=True
    )


def write_history(flow: Flow, rows: int, *, in_order: bool = True) -> None:
    """Commit outcomes like hourly runs of the last days, the last of them an hour ago."""
    from deltalake import CommitProperties, Schema
    from deltalake.transaction import AddAction, RemoveAction

    flow.tables.ensure()
    outcomes, hours = flow.tables["outcomes"], 24 * LongKnown.producer.deduplicate_for.days
    each = rows // hours
    for ago in range(hours, 0, -1):
        at = datetime.now(UTC) - timedelta(hours=ago)
        ids = [
            str(uuid.UUID(int=ago << 64 | number) if in_order else uuid.uuid5(uuid.NAMESPACE_OID, f"{ago}:{number}"))
            for number in range(each)
        ]
        same = {"source": "queue", "attempt": 1, "receive_id": f"{ago:032x}", "outcome": "handled", "action": "ack"}
        columns = {name: pa.repeat(value, each) for name, value in {**same, "ack_ref": "bench"}.items()}
        schema = pa.schema([field for field in OUTCOMES if field.name != "window"])
        rows_ = pa.RecordBatch.from_pydict({**columns, "message_id": ids, "ack_id": ids}, schema=schema)
        with Writer(flow.lake, flow.pipeline.name, f"{ago:032x}-handle-0") as writer:
            writer.write("outcomes", f"{at:%Y-%m-%dT%H}00", rows_)
            files = writer.close().files
        adds: list[AddAction | RemoveAction] = [
            AddAction(file.path, file.bytes, {"window": file.window}, int(at.timestamp() * 1000), True, file.stats)
            for file in files
        ]
        with outcomes.look() as handle:
            handle.create_write_transaction(
                adds, "append", Schema.from_arrow(outcomes.schema), ["window"], commit_properties=CommitProperties()
            )


def one_message(endpoint: str, history: int, rounds: int, root: Path) -> None:
    """Time whole runs of one message with and without a history, in turns."""
    ratios, times = list[float](), dict[str, list[float]]()
    with warm_spark(root, memory="1g") as spark:
        session = spark.spark_session
        flows = {}
        for name, rows in (("no history", 0), ("history", history)):
            url = sqs.create_queue(endpoint, f"one-{uuid.uuid4().hex[:8]}")
            source = SqsSource(name="queue", queue_url=url, endpoint_url=endpoint)
            flow = flows[name] = flow_at(root / name[:2], LongKnown, source, session)
            if rows:
                write_history(flow, rows)
        for turn in range(rounds + 1):
            took = {name: _one(flow) for name, flow in list(flows.items())[:: 1 if turn % 2 else -1]}
            if turn:
                ratios.append(took["history"] / took["no history"])
                for name, seconds in took.items():
                    times.setdefault(name, []).append(seconds)
    for name, all_of_it in times.items():
        print(f"one message, {name}: {statistics.median(all_of_it):.2f} s")
    print(f"with {history:,} outcomes / without: {spread(ratios)}")


def _one(flow: Flow) -> float:
    flow.source.send(payloads(1))
    return sum(whole_run(flow, 1).values())


def main() -> None:
    """Run the benchmark and print the result."""
    given = options(__doc__, messages=40_000, history=10_000_000, rounds=5)
    if lack := sqs.missing():
        print(f"Skipped: {lack}")
        return
    os.environ.update(sqs.ENVIRONMENT)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, sqs.serve(SERVERS) as server:
        receive_and_delete(server.address, given.messages, given.rounds, folder)
        extend(server.address, given.messages)
        one_message(server.address, given.history, given.rounds, Path(folder))


if __name__ == "__main__":
    main()
