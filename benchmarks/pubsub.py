"""Receiving and acknowledging Pub/Sub messages in two processes, compared with Google's client alone.

Run it as `python -m benchmarks.pubsub --messages 60000 --rounds 5`. Both pull a thousand messages per call from the
same local server with the same number of parallel calls. The client's loop keeps payloads and ids, and acknowledges
2,500 per call.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import grpc
from google.pubsub_v1 import PublisherClient, SubscriberClient

from benchmarks.options import options, spread
from pipeline_platform.connectors.pubsub.google_cloud import connected
from pipeline_platform.connectors.pubsub.pubsub_source import ACK_IDS, PubsubSource
from pipeline_platform.source.calls import THREADS
from pipeline_platform.source.contract import Share
from servers import pubsub


def main() -> None:
    given = options(__doc__, messages=60_000, bytes=250, tasks=2, rounds=5)
    folder = Path(os.environ.get("PIPELINE_SERVERS", Path(tempfile.gettempdir()) / "pipeline-servers"))
    ratios: list[float] = []
    with pubsub.serve(folder) as server, ProcessPoolExecutor(given.tasks) as processes:
        source = _subscribed(server.address)
        shares = source.plan(given.messages, given.tasks, "benchmark")
        for receive in (_by_connector, _by_client):  # connected and warm before the clock starts
            source.send([b"x"] * 2_000)
            list(processes.map(receive, repeat(source), source.plan(2_000, given.tasks, "warm")))
        for nth in range(given.rounds):
            seconds = {}
            for receive in random.sample((_by_connector, _by_client), 2):
                source.send(repeat(os.urandom(given.bytes), given.messages))
                seconds[receive] = _timed(processes, receive, source, shares, given.messages)
            ratios.append(seconds[_by_client] / seconds[_by_connector])
            rates = [given.messages / seconds[receive] for receive in (_by_connector, _by_client)]
            print(f"round {nth + 1}: {rates[0]:8,.0f}/s, the client alone {rates[1]:8,.0f}/s: {ratios[-1]:.2f}")
    print(f"median of {given.rounds}: {spread(ratios)}")


def _subscribed(address: str) -> PubsubSource:
    source = PubsubSource(
        name="benchmark",
        subscription="benchmark",
        topic="benchmark",
        project=pubsub.PROJECT,
        emulator_host=address,
        pull_timeout_s=30,  # all requested messages are available
        timeout_s=20,
    )
    path = {"name": source._path, "topic": source._topic, "ack_deadline_seconds": source.ack_deadline_s}
    with connected(PublisherClient, address) as publisher, connected(SubscriberClient, address) as subscriber:
        publisher.create_topic(name=source._topic)
        subscriber.create_subscription(request=path)
    return source


def _timed(
    processes: ProcessPoolExecutor,
    receive: Callable[[PubsubSource, Share], int],
    source: PubsubSource,
    shares: list[Share],
    messages: int,
) -> float:
    start = time.perf_counter()
    received = sum(processes.map(receive, repeat(source), shares))
    took = time.perf_counter() - start
    assert received == messages, f"received {received} of {messages} messages"
    return took


def _by_connector(source: PubsubSource, share: Share) -> int:
    batches = list(source.read(share, "benchmark"))
    for batch in batches:
        assert not source.ack(batch.column("ack_ref")[0].as_py(), batch.column("ack_id").to_pylist())
    return sum(batch.num_rows for batch in batches)


def _by_client(source: PubsubSource, share: Share) -> int:
    channel = grpc.insecure_channel(source.emulator_host, options=[("grpc.max_receive_message_length", -1)])
    with (
        SubscriberClient(transport=SubscriberClient.get_transport_class("grpc")(channel=channel)) as client,
        ThreadPoolExecutor(THREADS) as threads,
    ):
        kept, ids, left = [], [], share.messages
        while left:
            asked = [min(1_000, left - at) for at in range(0, min(left, THREADS * 1_000), 1_000)]
            for reply in threads.map(lambda most: client.pull(subscription=source._path, max_messages=most), asked):
                left -= len(reply.received_messages)
                for received in reply.received_messages:
                    kept.append((received.message.message_id, received.message.data))
                    ids.append(received.ack_id)
        groups = [ids[at : at + ACK_IDS] for at in range(0, len(ids), ACK_IDS)]
        list(threads.map(lambda group: client.acknowledge(subscription=source._path, ack_ids=group), groups))
        return len(kept)


if __name__ == "__main__":
    main()
