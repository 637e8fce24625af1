"""Cost of a message that crashes its worker, and cost of a limit for the time of calls.

Run it as `python -m benchmarks.poison [--messages N] [--rounds N]`. Four pipelines handle the same messages on one warm
Spark in alternating order. The queue of the second contains one more message, in the middle, which crashes its worker.
The queue of the third contains a hundred such messages, evenly distributed. The fourth has a `message_timeout` that no
call exceeds. The median of the ratios to the first is printed, with minimum and maximum.
"""

from __future__ import annotations

import random
import tempfile
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path

from benchmarks.events import POISON, Clean, Hundred, Poisoned, Timed, payloads
from benchmarks.handling import Bench, ratio, timed
from benchmarks.options import options
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.orchestration.resources.spark_resource import WARM, SparkResource
from pipeline_platform.run import steps
from pipeline_platform.spark import server as spark_server


def measure(messages: int, rounds: int) -> dict[str, list[float]]:
    """Let the pipelines take turns; return their seconds by round."""
    times: dict[str, list[float]] = {"clean": [], "poisoned": [], "hundred": [], "timed": []}
    chance = random.Random(messages)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        root = Path(folder)
        spark_server.start(root / "spark", memory="2g")
        try:
            packages = ["benchmarks"]
            with closing(SparkResource(remote=WARM, state_folder=str(root / "spark"), packages=packages)) as spark:
                bench = Bench(root, spark, messages)
                received = {
                    "clean": bench.received(Clean, bench.queue("clean")),
                    "poisoned": bench.received(Poisoned, poisoned(root, "poisoned", messages, 1)),
                    "hundred": bench.received(Hundred, poisoned(root, "hundred", messages, 100)),
                    "timed": bench.received(Timed, bench.queue("timed")),
                }
                for turn in range(rounds + 1):
                    for name in chance.sample(list(received), len(received)):
                        flow, receive, _ = received[name]
                        took = timed(name, partial(steps.handle_messages, flow, receive))[name]
                        print(f"{name:12} {took:6.2f} s{'  (warming up)' if not turn else ''}", flush=True)
                        if turn:
                            times[name].append(took)
        finally:
            spark_server.stop(root / "spark")
    return times


def poisoned(root: Path, name: str, messages: int, killers: int) -> TableQueue:
    """Return a queue with messages that crash, evenly distributed."""
    queue = TableQueue(name=name, url=f"sqlite:///{root}/{name}.sqlite")
    queue.create()
    good = list(payloads(messages))
    bounds = [messages * number // (killers + 1) for number in range(killers + 2)]
    parts = [good[first:end] for first, end in pairwise(bounds)]
    queue.enqueue([*parts[0], *(payload for part in parts[1:] for payload in (POISON, *part))])
    return queue


def main() -> None:
    """Run the benchmark and print the result."""
    given = options(__doc__, messages=200_000, rounds=5)
    times = measure(given.messages, given.rounds)
    print(f"\n{given.messages} messages and one that crashes / without it: {ratio(times, 'poisoned', 'clean')}")
    print(f"{given.messages} messages and a hundred that crash / without them: {ratio(times, 'hundred', 'clean')}")
    print(f"{given.messages} messages with a limit / without one: {ratio(times, 'timed', 'clean')}")


if __name__ == "__main__":
    main()
