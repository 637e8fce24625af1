"""Seven sources and two sinks under one daemon with random crashes: detects lost or duplicated messages, and growth.

Run it as `python -m benchmarks.endurance [--minutes 60] [--messages 10000000] [--source kafka ...] [--plot FILE]`.
Messages arrive evenly over this time. Rows from Kafka also go to PostgreSQL, and rows from files to Iceberg. The
database and the catalog are on the server of the table queue. Runs, Python processes of Spark and the servers are
killed, and runs are stopped, at random. The daemon and Spark's server are killed in the first half only, so that the
second half shows whether they grow. It ends with an account of each source and of the samples. The exit code is 1 if
anything is wrong. On a busy machine messages of Pub/Sub count as lost, because the local Pub/Sub drops messages that
wait for ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import polars as pl
import psutil
import sqlalchemy as sa

from benchmarks.endurance_location import FAILS_EACH, SINKS, Asked, Kept
from benchmarks.recovery_deaths import DEATHS, Scene
from benchmarks.recovery_deployment import Deployment, deployed
from benchmarks.recovery_sources import SERVERS, SOURCES, Ground
from pipeline_platform.sinks.iceberg import IcebergSink
from pipeline_platform.source.patience import patiently
from pipeline_platform.source.pauses import Patience
from pipeline_platform.spark import server as spark_server
from servers import postgres

SHARES = {"postgres": 0.35, "kafka": 0.35, "kinesis": 0.05, "files": 0.05, "rabbitmq": 0.1, "sqs": 0.05, "pubsub": 0.05}
"""Share of all messages by source; the local servers of kinesis and the last three are too slow for more."""
PORTION, SAMPLE_S, DONE_WITHIN_S = 5_000, 10.0, 900.0
DEATH_AFTER_S = (15.0, 45.0)
FIRST_HALF = ["daemon", "spark", "run", "host", "source", "stall"]
SECOND_HALF = ["run", "host", "source", "stall"]
STEADY = 1.25
"""Highest ratio between the end and the halfway point for a value that must not grow."""
_SENDING = Patience(within_s=600)
"""Patience of the senders: a local server may not answer for a while on a busy machine."""
MAY_GROW = "files of a window"
"""Value that grows until maintenance compacts files."""


class Feed:
    """Sends messages to a source evenly. The source's server is not killed during a send."""

    def __init__(self, name: str, ground: Ground, asked: Asked, messages: int, seconds: float) -> None:
        self.name, self.ground, self.messages, self._seconds = name, ground, messages, seconds
        self._asked = asked
        self.sent, self.quiet = 0, threading.Lock()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self) -> None:
        began = time.monotonic()
        while self.sent < self.messages:
            due = min(self.messages, round(self.messages * (time.monotonic() - began) / self._seconds) + 1)
            upto = min(due, self.sent + PORTION)
            payloads = [json.dumps({"n": n, "text": "x" * 200}).encode() for n in range(self.sent, upto)]
            if payloads:
                with self.quiet:
                    patiently(lambda some=payloads: self.ground.send(some), _SENDING)  # type: ignore[misc]
            self.sent = upto
            time.sleep(0.2)

    def join(self) -> None:
        """Wait until all messages are sent."""
        self._thread.join()

    def is_through(self, deployment: Deployment) -> bool:
        """Whether no receive is unfinished, each message is in a table, and the source is empty.

        The source is asked last: Pub/Sub only answers with a pull, which keeps the messages that it returns.
        """
        if deployment.unfinished(self.name) or self.account(deployment)[0]["lost"]:
            return False
        return not self.ground.left()

    def account(self, deployment: Deployment) -> tuple[dict[str, int], str]:
        """Count the outcomes of the messages, and return the errors."""
        tables = (deployment.rows(self.name, table) for table in ("even", "odd"))
        columns = {"n": pl.Int64, "message_id": pl.String}
        parts = [some.select(*columns) for some in tables if "n" in some.columns]
        rows = pl.concat([pl.DataFrame(schema=columns), *parts])
        kept = rows["n"]
        failed = pl.Series(
            "n", [json.loads(data)["n"] for data in deployment.rows(self.name, "failed")["data"]], pl.Int64
        )
        counts = {
            "sent": self.sent,
            "kept": len(kept),
            "failed": failed.n_unique(),
            # By id: a message whose send timed out is sent again, and the source may have two messages then.
            "twice": len(kept) - rows["message_id"].n_unique(),
            "lost": self.sent - pl.concat([kept, failed]).n_unique(),
        }
        wrong = [f"{counts[what]} {what}" for what in ("twice", "lost") if counts[what]]
        if counts["failed"] != -(-self.sent // FAILS_EACH):
            wrong.append(f"{counts['failed']} failed")
        if self.name in SINKS:
            stored = rows_of_sink(self._asked, self.name)
            if stored.sort().to_list() != kept.filter(kept % 2 == 0).sort().to_list():
                wrong.append(f"{len(stored)} in {SINKS[self.name]}, {stored.n_unique()} different")
        return counts, ", ".join(wrong)


def rows_of_sink(asked: Asked, pipeline: str) -> pl.Series:
    """Return the numbers in the sink of a pipeline."""
    sink = asked.sinks()[SINKS[pipeline]]
    if isinstance(sink, IcebergSink):
        from pyiceberg.catalog import load_catalog

        table = load_catalog(sink.catalog, **sink.properties).load_table((sink.namespace, f"{pipeline}_even"))
        return pl.Series("n", table.scan(selected_fields=("n",)).to_arrow()["n"])
    with sa.create_engine(asked.warehouse).connect() as connection:
        return pl.Series("n", connection.execute(sa.text(f"SELECT n FROM {pipeline}_even")).scalars().all(), pl.Int64)


class Sample(NamedTuple):
    """Sampled values at a time, in seconds since the start."""

    at: float
    seen: dict[str, float]


class Watch:
    """Samples values that must not grow, until it ends."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment, self.samples, self.deaths = deployment, list[Sample](), list[tuple[float, str]]()
        self.began, self._over = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def died(self, what: str) -> None:
        """Record a crash."""
        self.deaths.append((time.monotonic() - self.began, what))

    def end(self) -> None:
        """Stop sampling."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            with suppress(psutil.Error, FileNotFoundError):  # a process has just ended
                self.samples.append(Sample(time.monotonic() - self.began, self._look()))

    def _look(self) -> dict[str, float]:
        seen: dict[str, float] = {}
        daemon = psutil.Process(self._deployment.daemon.pid)
        processes = {"daemon": daemon}
        if server := spark_server.status(self._deployment.spark_folder):
            processes["Spark's server"] = psutil.Process(server.pid)
        for name, process in processes.items():
            seen[f"memory of {name}, MB"] = process.memory_info().rss / 1e6
            seen[f"open files of {name}"] = process.num_fds()
        instance = self._deployment.instance
        ticks = [
            tick.end_timestamp - tick.timestamp
            for state in instance.all_instigator_state()
            for tick in instance.get_ticks(state.instigator_origin_id, state.selector_id, limit=3)
            if tick.end_timestamp
        ]
        if ticks:
            seen["a tick, s"] = statistics.median(ticks)
        seen["control store, MB"] = (self._deployment.folder / "control.sqlite").stat().st_size / 1e6
        windows = (self._deployment.folder / "lake").glob("*/*/window=*")
        seen[MAY_GROW] = max((len(os.listdir(window)) for window in windows), default=0)
        return seen

    def series(self) -> dict[str, list[tuple[float, float]]]:
        """Return each sampled value over time."""
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for sample in self.samples:
            for name, value in sample.seen.items():
                found[name].append((sample.at, value))
        return dict(found)


def grown(series: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the median of the third quarter of the time and of the last quarter."""
    last = series[-1][0]
    third = [value for at, value in series if last / 2 <= at < last * 3 / 4]
    fourth = [value for at, value in series if at >= last * 3 / 4]
    return statistics.median(third or fourth), statistics.median(fourth)


def python_of(server: int) -> list[int]:
    """Return Spark's Python processes by session, because workers survive the daemon that forked them."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == os.getsid(server) and "preloading_daemon" in process.cmdline():
                found.append(process.pid)
    return found


def killing(deployment: Deployment, feeds: list[Feed], watch: Watch, seconds: float, chance: random.Random) -> None:
    """Kill processes at random during a time."""
    timers: list[threading.Timer] = []

    def later(after_s: float, call: Callable[[], None]) -> None:
        timers.append(threading.Timer(after_s, call))
        timers[-1].start()

    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, chance.uniform(*DEATH_AFTER_S)))
        what = chance.choice(FIRST_HALF if left > seconds / 2 else SECOND_HALF)
        feed = chance.choice(feeds)
        running = deployment.under_way()
        server = spark_server.status(deployment.spark_folder)
        python = python_of(server.pid) if server else []
        if not (running and python):  # all sources wait for the server that was killed last
            continue
        scene = Scene(deployment, feed.ground, chance.choice(running), chance.choice(python), later)
        with suppress(AssertionError, ProcessLookupError), feed.quiet if what == "source" else nullcontext():
            DEATHS[what].blow(scene)
            watch.died(f"{what} {feed.name}" if what == "source" else what)
            _say(f"{watch.deaths[-1][0]:.0f} s: died: {watch.deaths[-1][1]}")
    for timer in timers:
        timer.join()


def report(watch: Watch) -> list[str]:
    """Print the samples; return the values that grew."""
    wrong = []
    print("\n| | halfway | at the end | |\n|-|-|-|-|")
    for name, series in watch.series().items():
        before, after = grown(series)
        grows = name != MAY_GROW and after > before * STEADY
        wrong += [name] if grows else []
        print(f"| {name} | {before:.4g} | {after:.4g} | {'GROWS' if grows else ''} |")
    return wrong


def plot(watch: Watch, path: Path) -> None:
    """Draw the samples over time, with the crashes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    series = watch.series()
    figure, axes = plt.subplots(len(series), 1, sharex=True, figsize=(10, 1.7 * len(series)), layout="constrained")
    for ax, (name, points) in zip(axes, series.items(), strict=True):
        ax.plot([at / 60 for at, _ in points], [value for _, value in points], color="#08519c")
        ax.set_ylim(bottom=0)
        ax.set_title(name, loc="left", fontsize=9)
        for at, _ in watch.deaths:
            ax.axvline(at / 60, color="#de2d26", linewidth=0.4)
    axes[-1].set_xlabel("minutes; red: something was killed")
    figure.savefig(path, dpi=110)


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main() -> None:
    """Send messages, kill processes, and count the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--messages", type=int, default=10_000_000, help="number of messages of all sources")
    parser.add_argument("--source", nargs="+", choices=[*SHARES], default=[*SHARES])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("endurance.png"))
    given = parser.parse_args()
    seconds, whole = given.minutes * 60, sum(SHARES[name] for name in given.source)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="endurance-", ignore_cleanup_errors=True)))
        grounds: dict[str, Ground] = {}
        for name in given.source:
            (folder / name).mkdir()
            grounds[name] = stack.enter_context(SOURCES[name](folder / name))
            if name == "kinesis":  # its positions are in the control store of the deployment, not in the ground's
                grounds[name] = grounds[name]._replace(left=lambda: 0)
        kept = {
            name: Kept(connector=ground.connector, options={**ground.options, "name": name})
            for name, ground in grounds.items()
        }
        environment = {key: value for ground in grounds.values() for key, value in ground.environment.items()}
        if not (address := grounds["postgres"].options["url"] if "postgres" in grounds else ""):
            address = stack.enter_context(postgres.serve(SERVERS)).address
        (folder / "warehouse").mkdir()
        asked = Asked(folder=str(folder), sources=kept, warehouse=address)
        environment["ENDURANCE_BENCHMARK"] = asked.model_dump_json()
        deployment = stack.enter_context(deployed(folder, "benchmarks.endurance_location", environment))
        watch = Watch(deployment)
        feeds = [
            Feed(name, ground, asked, round(given.messages * SHARES[name] / whole), seconds)
            for name, ground in grounds.items()
        ]
        killing(deployment, feeds, watch, seconds, random.Random(given.seed))
        wrong = []
        for feed in feeds:
            feed.join()
            _say(f"{feed.name}: all {feed.sent:,} sent")
        end, waiting = time.monotonic() + DONE_WITHIN_S, feeds
        while (waiting := [feed for feed in waiting if not feed.is_through(deployment)]) and time.monotonic() < end:
            time.sleep(2)
        watch.end()
        print("| source | sent | kept | failed | twice | lost | |\n|-|-|-|-|-|-|-|")
        for feed in feeds:
            counts, what = feed.account(deployment)
            if feed in waiting:
                what = f"{what} not through after {DONE_WITHIN_S:.0f} s".strip()
            wrong += [what] if what else []
            print(f"| {feed.name} | {' | '.join(f'{count:,}' for count in counts.values())} | {what} |")
        took = time.monotonic() - watch.began
        print(
            f"\n{len(watch.deaths)} deaths; {sum(feed.sent for feed in feeds) / took:,.0f} messages/s over {took:.0f} s"
        )
        wrong += report(watch)
        plot(watch, given.plot)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
