"""Receiving and acknowledging RabbitMQ messages in one process, compared with pika alone.

Run it as `python -m benchmarks.rabbitmq --messages 30000 --rounds 5`. pika's loop keeps ids and payloads, with the same
prefetch count. It acknowledges all messages with one frame (`multiple`) at the end, as a run does. For a second ratio
it acknowledges each thousand when received.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import pika
import pyarrow as pa

from benchmarks.options import options, spread
from pipeline_platform.connectors.rabbitmq import RabbitmqSource
from servers import rabbitmq

AHEAD = 65_535
TOLD = 65_536
"""Messages that a run acknowledges with one call."""


def main() -> None:
    given = options(__doc__, messages=30_000, bytes=250, rounds=5)
    ratios: dict[str, list[float]] = {name: [] for name in PEERS if name != "connector"}
    with rabbitmq.serve(Path(tempfile.gettempdir())) as server:
        source = RabbitmqSource(name="benchmark", url=server.address, queue="benchmark", declare={})
        for nth in range(given.rounds + 1):  # the first round warms up and is not counted
            seconds = {}
            for name in random.sample(list(PEERS), len(PEERS)):
                notes = repeat({"delivery_mode": 1}, given.messages)
                sent = source.send(repeat(os.urandom(given.bytes), given.messages), notes)
                source.close()
                seconds[name] = PEERS[name](source, sent)
            if nth:
                print(f"round {nth}: " + ", ".join(f"{name} {given.messages / seconds[name]:,.0f}/s" for name in PEERS))
                for name, ratio in ratios.items():
                    ratio.append(seconds[name] / seconds["connector"])
        assert source.backlog().messages == 0
        source.close()
    for name, ratio in ratios.items():
        print(f"against {name}: {spread(ratio)}")


def _by_connector(source: RabbitmqSource, messages: int) -> float:
    source.backlog()  # connected before the clock starts
    begun = time.perf_counter()
    (share,) = source.plan(messages, 1, "benchmark")
    received = pa.Table.from_batches(source.read(share, "benchmark"))
    ids = received.column("ack_id").to_pylist()
    for start in range(0, messages, TOLD):
        assert not source.acknowledge("ack", received.column("ack_ref")[0].as_py(), ids[start : start + TOLD])
    took = time.perf_counter() - begun
    assert received.num_rows == messages
    source.close()
    return took


def _by_pika(source: RabbitmqSource, messages: int, together: int = 0) -> float:
    kept: list[tuple[str, bytes]] = []

    def keep(channel: Any, method: Any, properties: Any, body: bytes) -> None:
        kept.append((properties.message_id, body))
        if len(kept) % (together or messages) == 0 or len(kept) == messages:
            channel.basic_ack(method.delivery_tag, multiple=True)
        if len(kept) == messages:
            channel.stop_consuming()

    with pika.BlockingConnection(pika.URLParameters(source.url)) as connection:
        channel = connection.channel()
        begun = time.perf_counter()
        channel.basic_qos(prefetch_count=min(messages, AHEAD))
        channel.basic_consume(source.queue, keep)
        channel.start_consuming()
        channel.basic_qos(prefetch_count=1)  # as the connector does: the server has processed all frames
        return time.perf_counter() - begun


PEERS: dict[str, Callable[[RabbitmqSource, int], float]] = {
    "connector": _by_connector,
    "pika": _by_pika,
    "pika as it goes": partial(_by_pika, together=1_000),
}


if __name__ == "__main__":
    main()
