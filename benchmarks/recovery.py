"""Cost of a crash: seconds until the pipeline works again, and until all messages are acknowledged.

Run it as `python -m benchmarks.recovery [--source table ...] [--death run ...] [--trials 5] [--quick]`. For each source
it deploys a daemon, a server of the source and a warm Spark. In each trial it kills one of them, or a run. The messages
of a trial wait at a gate in `handle_message`, and the gate opens with the crash.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
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

from benchmarks.recovery_deaths import DEATHS, Death, Scene
from benchmarks.recovery_deployment import Deployment, deployed
from benchmarks.recovery_location import NAME, TABLE, Asked
from benchmarks.recovery_sources import SOURCES, Ground
from pipeline_platform.launcher.run_process import RunProcess

WITHIN_S = 120.0
LOOK_S = 0.25
SENSOR_LOOKS_S = 5.0
HANDLES = f"{NAME}.handle_messages"
WITHOUT_SERVER = ("table", "files")
QUICK = {
    "table": [*DEATHS],
    "sqs": ["run", "source"],
    "kafka": ["run", "source"],
    "rabbitmq": ["run", "source"],
    "pubsub": ["run", "source"],
    "kinesis": ["run", "source"],
    "files": ["run"],
}


class TooLongError(Exception):
    """A condition of a trial was not reached in time."""


class Cost(NamedTuple):
    """Cost of one crash.

    Attributes:
        at_work: Seconds until the pipeline worked again; None if not in time.
        acknowledged: Seconds until all sent messages were acknowledged; None if not in time.
        wrong: Errors in the result; empty if there are none.
    """

    at_work: float | None
    acknowledged: float | None
    wrong: str


class Mark(NamedTuple):
    """Time at which a process handled a message, by its number in the trial."""

    at: float
    process: int
    number: int


class Trial:
    """One crash and its result.

    Args:
        deployment: Processes that can be killed.
        ground: The source.
        death: The crash.
        messages: Number of messages that wait at the gate.
        handles_s: Seconds from the first handled message to the crash.
        is_further: Whether the run has had a receive before. It is not possible if the run is killed while it starts.
    """

    def __init__(
        self,
        deployment: Deployment,
        ground: Ground,
        death: Death,
        messages: int,
        handles_s: float,
        *,
        is_further: bool = False,
    ) -> None:
        self._handles_s, self._is_further = handles_s, is_further and death.at == "handling"
        self.deployment, self._ground, self._death = deployment, ground, death
        self._folder = Path(tempfile.mkdtemp(prefix="trial-", dir=deployment.folder))
        self._messages, self._sent, self._sent_before = messages, 0, 0
        self._before = {run.run_id for run in deployment.instance.get_runs()}
        self._at_end: list[Callable[[], None]] = []
        self.run: dg.DagsterRun

    def at_end(self, after_s: float, call: Callable[[], None]) -> None:
        """Call a function after a delay, or at the end of the trial if that is earlier."""
        done = threading.Event()

        def wait() -> None:
            done.wait(after_s)
            call()

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        self._at_end += [done.set, thread.join]

    def measure(self) -> Cost:
        """Send messages, kill a process, wait; return the cost."""
        try:
            if self._is_further:
                self._start_rounds()
            self._send(self._messages)
            self._sent_before = self._sent
            known = self._come_to_it()
            pid = max(self.marks(), default=Mark(0.0, 0, 0)).process
            died = self._death.blow(Scene(self.deployment, self._ground, self.run, pid, self.at_end))
            (self._folder / "gate").touch()
            if self._death.sends_after:
                self._send(self._messages)
            at_work, acknowledged = self._watch(died, known)
        finally:
            (self._folder / "gate").touch()
            for call in self._at_end:
                call()
        self._until("all runs have ended", lambda: not self.deployment.under_way())
        return Cost(at_work, acknowledged, self._wrong())

    def _start_rounds(self) -> None:
        """Let a run have a first receive of one message."""
        (self._folder / "gate").touch()
        self._send(1)
        self._until("a run stores the first message", self._is_done)
        for name in ("gate", "marks"):
            (self._folder / name).unlink()

    def _come_to_it(self) -> set[str]:
        """Wait for the moment of the crash; return the runs that do not count as the next run."""
        instance, at = self.deployment.instance, self._death.at
        if at == "handling":
            self._until("a run handles", self.marks)
            time.sleep(self._handles_s)
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
        """Return when a new run, or another process of the run, started to handle messages after the crash.

        If more messages are sent after the crash, return when their handling started: a run that survives handles them.
        """
        if self._death.sends_after:
            return min((mark.at for mark in self.marks() if mark.number >= self._sent_before), default=None)
        if self._death.in_worker:
            before = {mark.process for mark in self.marks() if mark.at <= died}
            return min(
                (mark.at for mark in self.marks() if mark.at > died and mark.process not in before), default=None
            )
        instance = self.deployment.instance
        begun = [
            entry.timestamp
            for run in instance.get_runs(limit=20)
            if run.run_id not in known and run.tags.get(f"{NAME}/received", "0") != "0"
            for entry in instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_START)
            if entry.step_key == HANDLES and entry.timestamp > died
        ]
        return min(begun, default=None)

    def _is_done(self) -> bool:
        lines, failed = self._outcome()
        is_complete = len(lines) + len(failed) == self._sent
        return is_complete and not self.deployment.unfinished(NAME) and self._ground.left() == 0

    def _outcome(self) -> tuple[Counter[str], Counter[str]]:
        """Return the trial's messages in the batcher's table, and its failures."""
        ours = str(self._folder)
        lines = self.deployment.rows(NAME, TABLE)["text"].to_list()
        failed = [data.decode() for data in self.deployment.rows(NAME, "failed")["data"]]
        return Counter(text for text in lines if text.endswith(ours)), Counter(t for t in failed if t.endswith(ours))

    def _wrong(self) -> str:
        lines, failed = self._outcome()
        counts = {
            "lost": self._sent - len({*lines, *failed}),
            "twice": sum(times > 1 for times in (lines + failed).values()),
            "failed": len(failed),
            "not acknowledged": self._ground.left(),
            "receives unfinished": len(self.deployment.unfinished(NAME)),
        }
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)

    def marks(self) -> list[Mark]:
        """Return when messages of this trial were handled, and in which process."""
        with suppress(FileNotFoundError):
            lines = (self._folder / "marks").read_text().splitlines()
            return [Mark(float(at), int(process), int(number)) for at, process, number in map(str.split, lines)]
        return []

    def _send(self, messages: int) -> None:
        numbers = range(self._sent, self._sent + messages)
        self._ground.send([f"{n} {self._folder}".encode() for n in numbers])
        self._sent += messages

    def _until(self, what: str, found: Callable[[], object], look_s: float = LOOK_S) -> None:
        end = time.monotonic() + WITHIN_S
        while not found():
            if time.monotonic() > end:
                raise TooLongError(f"{what}: not within {WITHIN_S:.0f} s")
            time.sleep(look_s)


@contextmanager
def _deployed(source: str, max_runs: int | None) -> Iterator[tuple[Deployment, Ground]]:
    """Start the processes for a source's trials; end them with the block."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recovery-", ignore_cleanup_errors=True)))
        ground: Ground = stack.enter_context(SOURCES[source](folder))
        asked = Asked(folder=str(folder), source=ground.connector, options=ground.options)
        asked = asked if max_runs is None else asked.model_copy(update={"max_runs": max_runs})
        environment = {**ground.environment, "RECOVERY_BENCHMARK": asked.model_dump_json()}
        yield stack.enter_context(deployed(folder, "benchmarks.recovery_location", environment)), ground


def rows(source: str, deaths: list[str], given: argparse.Namespace) -> None:
    """Measure and print the rows of one source."""
    with ExitStack() as stack:
        place: tuple[Deployment, Ground] | None = None
        for name in deaths:
            costs = []
            for nth in range(given.trials):
                place = place or stack.enter_context(_deployed(source, given.max_runs))
                # Both tasks handle messages after a second. Runs start after a tick, so a run that is killed at a fixed
                # time would always wait equally long: trials are distributed over the time between two ticks.
                handles_s = 1 + SENSOR_LOOKS_S * nth / given.trials
                try:
                    trial = Trial(*place, DEATHS[name], given.messages, handles_s, is_further=given.further_round)
                    cost = trial.measure()
                    is_sound = cost.acknowledged is not None and not cost.wrong
                except TooLongError as error:
                    cost, is_sound = Cost(None, None, str(error)), False
                costs.append(cost)
                seen = f"at work {_seconds(cost.at_work)}, all acknowledged {_seconds(cost.acknowledged)}"
                progress = (
                    f"{source}, {name}, {nth + 1} of {given.trials}: {seen} {cost.wrong and f'WRONG: {cost.wrong}'}"
                )
                print(progress, file=sys.stderr, flush=True)
                if not is_sound:  # otherwise its remaining messages would belong to the next trial
                    if given.keep:
                        print(
                            f"Kept {place[0].folder}, pid {place[0].daemon.pid}",
                            file=sys.stderr,
                            flush=True,
                        )
                        os._exit(1)  # no cleanup
                    stack.close()
                    place = None
            print(_row(source, name, costs), flush=True)


def _row(source: str, name: str, costs: list[Cost]) -> str:
    wrong = "; ".join(cost.wrong for cost in costs if cost.wrong)
    medians = (_median([cost.at_work for cost in costs]), _median([cost.acknowledged for cost in costs]))
    return f"| {source} | {DEATHS[name].says} | {medians[0]} | {medians[1]} | {wrong and f'WRONG: {wrong}'} |"


def _median(seconds: list[float | None]) -> str:
    """Format the median, the minimum and the maximum; a missing value counts as the maximum."""
    most = float("inf")
    in_order = sorted(most if value is None else value for value in seconds)
    least, middle, last = (
        _seconds(None if value == most else value)
        for value in (in_order[0], statistics.median_high(in_order), in_order[-1])
    )
    return middle if len(seconds) == 1 else f"{middle} ({least} to {last})"


def _seconds(seconds: float | None) -> str:
    return f"not within {WITHIN_S:.0f} s" if seconds is None else f"{seconds:.1f} s"


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", nargs="+", choices=[*SOURCES], help="all but postgres by default")
    parser.add_argument("--death", nargs="+", choices=[*DEATHS], help="all by default")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--max-runs", type=int, help="max_runs of the producer; its default if unset")
    parser.add_argument("--messages", type=int, default=1_000, help="messages of a run")
    parser.add_argument(
        "--further-round", action="store_true", help="cause the crash in a further round, not in the first receive"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="all crashes with a table queue; only the run and the server with other sources",
    )
    parser.add_argument(
        "--keep", action="store_true", help="stop at the first trial that fails, and keep its processes"
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print("| source | crash | works again | all acknowledged | |\n|-|-|-|-|-|", flush=True)
    began = time.monotonic()
    for source in given.source or QUICK:
        deaths = given.death or (QUICK.get(source, [*DEATHS]) if given.quick else [*DEATHS])
        rows(source, [name for name in deaths if name != "source" or source not in WITHOUT_SERVER], given)
    print(f"\nmedians of {given.trials} (least to most); {time.monotonic() - began:.0f} s in total", file=sys.stderr)


if __name__ == "__main__":
    main()
