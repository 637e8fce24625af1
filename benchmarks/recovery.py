"""What a death costs: seconds from the death until the pipeline is at work again, and until all is acknowledged.

Run it as `python -m benchmarks.recovery [--source table ...] [--death run ...] [--trials 5] [--quick]`. For each source
it deploys a daemon, which looks at a server of the source's own, and a warm Spark; it kills one of them, or a run, in
each trial. A trial's messages wait at a gate in `handle_message`; the gate opens with the death.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import dagster as dg
import polars as pl

from benchmarks.recovery_deaths import DEATHS, Death
from benchmarks.recovery_location import NAME, TABLE, Asked
from benchmarks.recovery_sources import SOURCES, Ground
from pipeline_platform.lake.ledger import Ledger
from pipeline_platform.lake.storage import Lake
from pipeline_platform.launcher.run_process import RunProcess
from pipeline_platform.orchestration.producers import UNDER_WAY
from pipeline_platform.spark import server as spark_server

ROOT = Path(__file__).parents[1]
WITHIN_S = 120.0
LOOK_S = 0.25
HANDLES = f"{NAME}.handle_messages"
QUICK = {
    "table": [*DEATHS],
    "sqs": ["run", "source"],
    "kafka": ["run", "source"],
    "rabbitmq": ["run", "source"],
    "pubsub": ["run", "source"],
}


class TooLongError(Exception):
    """A trial waited for something in vain."""


class Cost(NamedTuple):
    """What one death cost.

    Attributes:
        at_work: Seconds until the pipeline was at work again; None if not in time.
        acknowledged: Seconds until all that was sent was acknowledged; None if not in time.
        wrong: What is wrong with the outcome; empty if nothing is.
    """

    at_work: float | None
    acknowledged: float | None
    wrong: str


class Deployment:
    """A daemon over one source, in a folder of its own."""

    def __init__(self, folder: Path, ground: Ground, instance: dg.DagsterInstance, asked: Asked) -> None:
        self.folder, self.ground, self.instance = folder, ground, instance
        self.spark_folder = folder / "spark"
        self.lake = Lake(root=str(folder / "lake"))
        self._environment = {**os.environ, **ground.environment, "RECOVERY_BENCHMARK": asked.model_dump_json()}
        self._started: list[subprocess.Popen[bytes]] = []
        self.trials = 0

    @property
    def daemon(self) -> subprocess.Popen[bytes]:
        """The daemon that was started last."""
        return self._started[-1]

    def start_daemon(self) -> None:
        """Start a daemon; its code server and the runs that it launches are in its process group."""
        command = [
            sys.executable,
            "-m",
            "dagster._daemon",
            "run",
            "-m",
            "benchmarks.recovery_location",
            "-d",
            str(ROOT),
        ]
        with (self.folder / "daemon.log").open("ab") as log:
            self._started.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def stop(self) -> None:
        """End every daemon, with all that it started."""
        for sent in (signal.SIGTERM, signal.SIGCONT, signal.SIGKILL):
            for daemon in self._started:
                with suppress(ProcessLookupError):
                    os.killpg(daemon.pid, sent)
            if sent is not signal.SIGTERM:
                for daemon in self._started:
                    with suppress(subprocess.TimeoutExpired):
                        daemon.wait(5)

    def under_way(self) -> list[dg.DagsterRun]:
        """Runs that have not ended."""
        return list(self.instance.get_runs(dg.RunsFilter(statuses=UNDER_WAY)))

    def rows(self, table: str) -> pl.DataFrame:
        """What a table of the pipeline holds."""
        path = self.folder / "lake" / NAME / table
        return pl.read_delta(str(path)) if path.exists() else pl.DataFrame(schema={"text": str, "data": bytes})

    def unfinished(self) -> list[str]:
        """Receives that are not acknowledged."""
        return Ledger(self.lake, NAME).unfinished()


@contextmanager
def deployed(source: str, max_runs: int | None) -> Iterator[Deployment]:
    """Start all that a source's trials need; end it with the block."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recovery-", ignore_cleanup_errors=True)))
        ground: Ground = stack.enter_context(SOURCES[source](folder))
        asked = Asked(folder=str(folder), source=ground.connector, options=ground.options)
        asked = asked if max_runs is None else asked.model_copy(update={"max_runs": max_runs})
        home = folder / "dagster"
        home.mkdir()
        (home / "dagster.yaml").write_text((ROOT / "dagster.yaml").read_text())
        os.environ.update({**ground.environment, "DAGSTER_HOME": str(home)})
        spark = folder / "spark"
        stack.callback(spark_server.stop, spark)
        spark_server.start(spark)
        # Opened before any process: two that make the same SQLite storage at once leave it unusable.
        instance = stack.enter_context(dg.DagsterInstance.get())
        deployment = Deployment(folder, ground, instance, asked)
        stack.callback(deployment.stop)
        deployment.start_daemon()
        yield deployment


class Trial:
    """One death, and what comes of it."""

    def __init__(self, deployment: Deployment, death: Death, messages: int) -> None:
        deployment.trials += 1
        self.deployment, self._death = deployment, death
        self._folder = deployment.folder / f"trial-{deployment.trials}"
        self._folder.mkdir()
        self._messages, self._sent = messages, 0
        self._before = {run.run_id for run in deployment.instance.get_runs()}
        self._at_end: list[Callable[[], None]] = []
        self.run: dg.DagsterRun

    def at_end(self, after_s: float, call: Callable[[], None]) -> None:
        """Call so long after now, or at the trial's end, if that is before."""
        done = threading.Event()

        def wait() -> None:
            done.wait(after_s)
            call()

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        self._at_end += [done.set, thread.join]

    def measure(self) -> Cost:
        """Send, kill, wait; return what it cost."""
        try:
            self._send()
            known = self._come_to_it()
            died = self._death.blow(self)
            (self._folder / "gate").touch()
            if self._death.sends_after:
                self._send()
            at_work, acknowledged = self._watch(died, known)
        finally:
            (self._folder / "gate").touch()
            for call in self._at_end:
                call()
        self._until("all runs have ended", lambda: not self.deployment.under_way())
        return Cost(at_work, acknowledged, self._wrong())

    def _come_to_it(self) -> set[str]:
        """Wait until it is the moment for the death; return the runs that are not to be taken for the next."""
        instance, at = self.deployment.instance, self._death.at
        if at == "handling":
            self._until("a run handles", self.marks)
            time.sleep(1)  # both tasks
            (self.run,) = self.deployment.under_way()
            return {*self._before, self.run.run_id}
        starting = dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTING])

        def come() -> bool:
            for run in instance.get_runs(starting):
                if at == "launching" or RunProcess.of(run):
                    self.run = run
                    return True
            return False

        self._until("a run starts", come, 0.002)
        return self._before

    def _watch(self, died: float, known: set[str]) -> tuple[float | None, float | None]:
        at_work: float | None = None
        while time.time() < died + WITHIN_S:
            now = time.time()
            at_work = at_work or self._at_work(died, known)
            if at_work and self._is_done():
                return at_work - died, now - died
            time.sleep(LOOK_S)
        return at_work and at_work - died, None

    def _at_work(self, died: float, known: set[str]) -> float | None:
        """When a run that nobody knew, or another process of the run, began to handle messages after the death."""
        if self._death.in_worker:
            workers = {pid for when, pid in self.marks() if when <= died}
            return min((when for when, pid in self.marks() if when > died and pid not in workers), default=None)
        instance = self.deployment.instance
        begun = [
            entry.timestamp
            for run in instance.get_runs(limit=20)
            if run.run_id not in known and run.tags.get(f"pipeline_platform.received/{NAME}", "0") != "0"
            for entry in instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_START)
            if entry.step_key == HANDLES and entry.timestamp > died
        ]
        return min(begun, default=None)

    def _is_done(self) -> bool:
        lines, failed = self._outcome()
        is_complete = len(lines) + len(failed) == self._sent
        return is_complete and not self.deployment.unfinished() and self.deployment.ground.left() == 0

    def _outcome(self) -> tuple[Counter[str], Counter[str]]:
        """The trial's messages in the batcher's table, and those that failed."""
        ours = str(self._folder)
        lines = self.deployment.rows(TABLE)["text"].to_list()
        failed = [data.decode() for data in self.deployment.rows("failed")["data"]]
        return Counter(text for text in lines if text.endswith(ours)), Counter(t for t in failed if t.endswith(ours))

    def _wrong(self) -> str:
        lines, failed = self._outcome()
        counts = {
            "lost": self._sent - len({*lines, *failed}),
            "twice": sum(times > 1 for times in (lines + failed).values()),
            "failed": max(0, len(failed) - self._death.may_fail),
            "not acknowledged": self.deployment.ground.left(),
            "receives unfinished": len(self.deployment.unfinished()),
        }
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)

    def marks(self) -> list[tuple[float, int]]:
        """When messages of this trial came to be handled, and in which process."""
        with suppress(FileNotFoundError):
            lines = (self._folder / "marks").read_text().splitlines()
            return [(float(when), int(pid)) for when, pid in map(str.split, lines)]
        return []

    def _send(self) -> None:
        numbers = range(self._sent, self._sent + self._messages)
        self.deployment.ground.send([f"{n} {self._folder}".encode() for n in numbers])
        self._sent += self._messages

    def _until(self, what: str, found: Callable[[], object], look_s: float = LOOK_S) -> None:
        end = time.monotonic() + WITHIN_S
        while not found():
            if time.monotonic() > end:
                raise TooLongError(f"not within {WITHIN_S:.0f} s: {what}")
            time.sleep(look_s)


def rows(source: str, deaths: list[str], given: argparse.Namespace) -> None:
    """Measure and print the rows of one source."""
    with ExitStack() as stack:
        deployment: Deployment | None = None
        for name in deaths:
            costs = []
            for nth in range(given.trials):
                deployment = deployment or stack.enter_context(deployed(source, given.max_runs))
                try:
                    cost = Trial(deployment, DEATHS[name], given.messages).measure()
                    is_sound = cost.acknowledged is not None and not cost.wrong
                except TooLongError as error:
                    cost, is_sound = Cost(None, None, str(error)), False
                costs.append(cost)
                seen = f"at work {_seconds(cost.at_work)}, all acknowledged {_seconds(cost.acknowledged)}"
                progress = (
                    f"{source}, {name}, {nth + 1} of {given.trials}: {seen} {cost.wrong and f'WRONG: {cost.wrong}'}"
                )
                print(progress, file=sys.stderr, flush=True)
                if not is_sound:  # what it left would be the next trial's
                    if given.keep:
                        raise SystemExit(f"left as it is: {deployment.folder}")
                    stack.close()
                    deployment = None
            print(_row(source, name, costs), flush=True)


def _row(source: str, name: str, costs: list[Cost]) -> str:
    wrong = "; ".join(cost.wrong for cost in costs if cost.wrong)
    medians = (_median([cost.at_work for cost in costs]), _median([cost.acknowledged for cost in costs]))
    return f"| {source} | {DEATHS[name].says} | {medians[0]} | {medians[1]} | {wrong and f'WRONG: {wrong}'} |"


def _median(seconds: list[float | None]) -> str:
    """The middle one, and the least and the most; what did not come in time is the most."""
    most = float("inf")
    in_order = sorted(most if one is None else one for one in seconds)
    least, middle, last = (
        _seconds(None if one == most else one) for one in (in_order[0], statistics.median_high(in_order), in_order[-1])
    )
    return middle if len(seconds) == 1 else f"{middle} ({least} to {last})"


def _seconds(seconds: float | None) -> str:
    return f"not within {WITHIN_S:.0f} s" if seconds is None else f"{seconds:.1f} s"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", nargs="+", choices=[*SOURCES], help="all but postgres by default")
    parser.add_argument("--death", nargs="+", choices=[*DEATHS], help="all by default")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--max-runs", type=int, help="of the producer; its default if unset")
    parser.add_argument("--messages", type=int, default=1_000, help="that the run holds; as many as it may by default")
    parser.add_argument(
        "--quick", action="store_true", help="all deaths of a table queue; a run and the server elsewhere"
    )
    parser.add_argument("--keep", action="store_true", help="end at the first trial that fails")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print("| source | what dies | at work again | all acknowledged | |\n|-|-|-|-|-|", flush=True)
    began = time.monotonic()
    for source in given.source or QUICK:
        deaths = given.death or (QUICK.get(source, [*DEATHS]) if given.quick else [*DEATHS])
        rows(source, [name for name in deaths if name != "source" or source != "table"], given)
    print(f"\nmedians of {given.trials} (least to most); {time.monotonic() - began:.0f} s in all", file=sys.stderr)


if __name__ == "__main__":
    main()
