"""What a message that ends its worker costs the run that it is in, and what a limit on the time of calls costs.

Run it as `python -m benchmarks.poison [--messages N] [--rounds N]`. Four pipelines handle the same messages on one
warm Spark, in turns, in another order each round. The queue of the second holds one more, in the middle, which kills
its worker; that of the third a hundred, evenly; the fourth has a `message_timeout`, and nothing takes long. The median
of the rounds' ratios to the first is printed, and the least and the greatest.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path

from benchmarks.events import POISON, Clean, Hundred, Poisoned, Timed, payloads
from benchmarks.handling import Bench, ratio, timed
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.orchestration.resources.spark_resource import WARM, SparkResource
from pipeline_platform.run import steps
from pipeline_platform.spark import server as spark_server


def measure(messages: int, rounds: int) -> dict[str, list[float]]:
    """Let them take turns; return their times in seconds, by round."""
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
    """A queue with killers, evenly among messages."""
    queue = TableQueue(name=name, url=f"sqlite:///{root}/{name}.sqlite")
    queue.create()
    good = list(payloads(messages))
    bounds = [messages * number // (killers + 1) for number in range(killers + 2)]
    parts = [good[first:end] for first, end in pairwise(bounds)]
    queue.enqueue([*parts[0], *(payload for part in parts[1:] for payload in (POISON, *part))])
    return queue


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    times = measure(given.messages, given.rounds)
    print(f"\n{given.messages} messages and one that kills / without it: {ratio(times, 'poisoned', 'clean')}")
    print(f"{given.messages} messages and a hundred that kill / without them: {ratio(times, 'hundred', 'clean')}")
    print(f"{given.messages} messages with a limit / without one: {ratio(times, 'timed', 'clean')}")


if __name__ == "__main__":
    main()
