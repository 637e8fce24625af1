"""Latency of a message in a trickle, and the cost of an hour of it: runs, events, processor time.

Run it as `python -m benchmarks.trickle [--patience 0 5 30] [--idle-timeout 30] [--every 1] [--seconds 120]`, or with
`--idle 1 10 [--hung 5]`.
A daemon evaluates a table queue that gets a message every second, or every `--every` seconds. With a patience of 0, a
single message is worth a run. With an idle timeout, runs are continuous. `--idle` measures only pipelines without
messages: their processor time, and the seconds between two ticks of a sensor. The sources of `--hung` pipelines accept
connections and never answer, like a database server that is halted.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import dagster as dg
import polars as pl
import psutil

from benchmarks.events import payloads
from benchmarks.latency import daemon, evaluations
from benchmarks.latency_location import HUNG, IDLE_PIPELINES, IDLE_TIMEOUT, PATIENCE, TAGS, WINDOW_CRON, queue_options
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from pipeline_platform.launcher.run_process import RunProcess

PARTS = ("look", "queue", "start", "run", "all")


class Life(NamedTuple):
    """Times of a message: sent, its run requested, out of the queue, started, ended."""

    came: float
    asked: float
    launched: float
    began: float
    ended: float

    @property
    def parts(self) -> tuple[float, ...]:
        """Return the seconds by `PARTS`."""
        return *(after - before for before, after in pairwise(self)), self.ended - self.came


def lives(instance: dg.DagsterInstance, rows: Sequence[tuple[str, bytes]]) -> list[Life]:
    """Return the messages of the runs that have ended, except the messages of the first run."""
    asked, runs = evaluations(instance), {}
    for record in instance.get_run_records(dg.RunsFilter(statuses=[dg.DagsterRunStatus.SUCCESS])):
        run, stats = record.dagster_run, instance.get_run_stats(record.dagster_run.run_id)
        if TAGS.receive_id in run.tags and stats.launch_time and stats.start_time and stats.end_time:
            times = (asked[run.run_id], stats.launch_time, stats.start_time, stats.end_time)
            runs[run.tags[TAGS.receive_id]] = times
    first = min(runs.values())
    return [
        Life(json.loads(data)["price"], *runs[receive])
        for receive, data in rows
        if receive in runs and runs[receive] != first
    ]


class Trickle(NamedTuple):
    """Result: seconds of each message from its arrival to its acknowledgement, its phases, and the cost of an hour.

    `memory_mb` is the memory of the run, every ten seconds.
    """

    seconds: list[float]
    lives: list[Life]
    memory_mb: list[float]
    runs: float
    events: float
    processor_s: float


def processor_s(folder: Path) -> float:
    """Return the processor time of all processes of a deployment, which its folder identifies."""
    ticks = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            texts = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
            if str(folder).encode() in texts and process.name != str(os.getpid()):
                ticks += sum(map(int, (process / "stat").read_text().rsplit(")", 1)[1].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _events(instance: dg.DagsterInstance) -> int:
    return sum(len(instance.all_logs(run.run_id)) for run in instance.get_runs())


def _memory_mb(instance: dg.DagsterInstance) -> list[float]:
    """Return the memory of the processes of active runs."""
    started = instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED]))
    processes = filter(None, map(RunProcess.of, started))
    return [psutil.Process(process.pid).memory_info().rss / 1e6 for process in processes if process.lives]


def message() -> bytes:
    """Return an event whose price is the time."""
    return json.dumps(json.loads(next(payloads(1))) | {"price": time.time()}).encode()


def send(put: Callable[[bytes], object], every: float, seconds: float) -> float:
    """Send a message at regular intervals during a time; return the seconds that this took."""
    began = time.monotonic()
    for number in range(round(seconds / every)):
        time.sleep(max(0, began + number * every - time.monotonic()))
        put(message())
    time.sleep(max(0, began + seconds - time.monotonic()))
    return time.monotonic() - began


def measure(patience: float, idle_timeout: float, every: float, seconds: int) -> Trickle:
    """Send a trickle during a time."""
    os.environ[PATIENCE], os.environ[IDLE_TIMEOUT] = str(patience), str(idle_timeout)
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        folder = Path(temporary)
        source = TableQueue.model_validate(queue_options(folder))
        source.create()
        with daemon(folder) as instance:
            source.enqueue([message()])
            control = ControlStore(f"sqlite:///{folder}/control.sqlite")
            while not control.ended("single"):
                time.sleep(0.1)
            time.sleep(10)
            before, runs, events = processor_s(folder), instance.get_runs_count(), _events(instance)
            began, memory = time.monotonic(), list[float]()

            def put(payload: bytes) -> None:
                source.enqueue([payload])
                if time.monotonic() - began >= 10 * (len(memory) + 1):
                    memory.extend(_memory_mb(instance)[:1])

            hour = 3600 / send(put, every, seconds)
            cost = [
                (processor_s(folder) - before) * hour,
                (instance.get_runs_count() - runs) * hour,
                (_events(instance) - events) * hour,
            ]
            time.sleep(2 * patience + 15)
            ended = {end.receive_id: end.ended_at.timestamp() for end in control.ended("single")}
            rows = pl.read_delta(f"{folder}/lake/single/messages").select("receive_id", "data").rows()
            took = sorted(
                (sent, ended[receive] - sent)
                for receive, data in rows
                if (sent := json.loads(data)["price"]) and receive in ended
            )
            phases = [] if idle_timeout else lives(instance, rows)
            return Trickle([late for _, late in took[1:]], phases, memory, cost[1], cost[2], cost[0])


class Idle(NamedTuple):
    """Pipelines without messages: seconds of processor time per hour, and seconds between two ticks of a sensor."""

    processor_s: float
    gaps: list[float]


def idle(pipelines: int, idle_timeout: float, seconds: int, hung: int) -> Idle:
    """Measure pipelines without messages, with daemon and Spark. `gaps` contains only sensors whose source answers."""
    os.environ[IDLE_TIMEOUT], os.environ[IDLE_PIPELINES] = str(idle_timeout), str(pipelines - 1)
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary, socket.create_server(("127.0.0.1", 0)) as halted:
        folder = Path(temporary)
        # The kernel accepts connections, as for a server that is halted.
        address = f"postgresql://127.0.0.1:{halted.getsockname()[1]}"
        os.environ[HUNG] = " ".join(f"{address}/halted_{number}" for number in range(hung))
        for name in ("queue", *(f"idle_{number}" for number in range(hung, pipelines - 1))):
            TableQueue.model_validate(queue_options(folder, name)).create()
        with daemon(folder) as instance:
            time.sleep(60)
            before, began = processor_s(folder), time.monotonic()
            time.sleep(seconds)
            cost = (processor_s(folder) - before) * 3600 / (time.monotonic() - began)
            since, gaps = time.time() - seconds, list[float]()
            names = {f"idle_{number}_producer" for number in range(hung)}
            for state in instance.all_instigator_state():
                if state.name.endswith("_producer") and state.name not in names:
                    ticks = instance.get_ticks(state.instigator_origin_id, state.selector_id, after=since)
                    times = sorted(tick.timestamp for tick in ticks)
                    gaps += [after - before for before, after in pairwise(times)]
            if not gaps:
                raise RuntimeError(f"no sensor was evaluated twice: {(folder / 'daemon.log').read_text()[-2_000:]}")
            return Idle(cost, gaps)


def cell(seconds: Sequence[float]) -> str:
    """Format the median and the 99th percentile."""
    return f"{statistics.median(seconds):.1f}, {statistics.quantiles(seconds, n=100, method='inclusive')[98]:.1f} s"


def row(name: str, took: Trickle) -> str:
    """Return the median and the 99th percentile of each phase and of the whole, and the cost of an hour."""
    columns = [*zip(*(life.parts[:-1] for life in took.lives), strict=True)] or [()] * (len(PARTS) - 1)
    cells = [cell(column) if column else "" for column in columns]
    cost = f"{took.runs:,.0f} | {took.events:,.0f} | {took.processor_s:,.0f} s"
    return f"| {name} | {' | '.join(cells)} | {cell(took.seconds)} | {cost} |"


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patience", type=float, nargs="*", default=[0, 5, 30])
    parser.add_argument("--idle-timeout", type=float, nargs="*", default=[30])
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two messages")
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument(
        "--window-cron",
        default="0 * * * *",
        help="cron schedule of the starts of windows; a continuous run ends with its window",
    )
    parser.add_argument("--idle", type=int, nargs="*", default=[], help="numbers of pipelines without messages")
    parser.add_argument(
        "--hung", type=int, default=0, help="number of the pipelines of --idle whose source never answers"
    )
    given = parser.parse_args()
    os.environ[WINDOW_CRON] = given.window_cron
    for pipelines in given.idle:
        for idle_timeout in (0.0, *given.idle_timeout):
            found = idle(pipelines, idle_timeout, given.seconds, given.hung)
            name = f"{pipelines} idle, {given.hung} of them hung, idle_timeout {idle_timeout:g} s"
            print(
                f"{name}: {found.processor_s:,.0f} s of processor time per hour; {cell(found.gaps)} between two ticks"
            )
    if given.idle:
        return
    per_hour = "runs per hour | events per hour | processor time per hour"
    print(f"| | {' | '.join(PARTS)} | {per_hour} |\n|-|{'-|' * (len(PARTS) + 3)}")
    modes = [(f"patience {patience:g} s", patience, 0.0) for patience in given.patience]
    modes += [(f"idle_timeout {idle:g} s", 0.2, idle) for idle in given.idle_timeout]
    for name, patience, idle_timeout in modes:
        took = measure(patience, idle_timeout, given.every, given.seconds)
        print(f"{row(name, took)}  {len(took.seconds)} messages", flush=True)
        if idle_timeout and took.memory_mb:
            tenths = took.memory_mb[:: max(1, len(took.memory_mb) // 10)]
            print(f"memory of the run, from first to last, in MB: {', '.join(f'{mb:.0f}' for mb in tenths)}")


if __name__ == "__main__":
    main()
