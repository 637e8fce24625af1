"""Growth of a pipeline over sixty days: the cost of a run, a tick, maintenance and the commands.

Run it as `python -m benchmarks.months [--days N] [--rounds N] [--at-once FIRST LAST] [--plot FILE]`.

Each round is a receive from the queue to the acknowledgement, by the product's own steps, with a new flow as in a new
process. One message in 20 fails, and an operator closes the failures of the day before. Maintenance runs each night.
There are 96 rounds a day by default: a continuous run may have 86,400. `benchmarks.long_logs` measures tables with as
many commits as that leaves. With `--at-once`, the windows of some days are written at once, as maintenance leaves them:
a file per hour and table. For `deduplicate_for` after them, look-ups read too many files: the windows count as new.

Dagster's storage gets two runs an hour, as copies of one run of the pipeline. Each night, maintenance deletes those
that are older than `Retention.runs`, except the newest of each window.

The clocks of Python are simulated. delta-rs reads the clock of the machine, which is ahead of the simulated clock. So
before each maintenance the retentions of the tables are prolonged by this lead, and files get their simulated time.
Seconds are of the processor time of this process, without callback processes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import dagster as dg
import pyarrow as pa

from benchmarks.copied_runs import CopiedRuns, size_of
from benchmarks.months_location import MESSAGES, Busy, one_run, run_here
from pipeline_platform.cli.lake.deliveries import deliveries_of
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.decisions import decision
from pipeline_platform.lake.failures import inspection
from pipeline_platform.lake.failures.closing import close
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.maintenance import maintenance
from pipeline_platform.lake.reader import RowRange, read_ranges
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.table_properties import KEEP_LOG, KEEP_TRANSACTIONS, LOG_RETENTION, RETENTION
from pipeline_platform.lake.tables import Tables
from pipeline_platform.lake.writer import write_rows
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.message import MESSAGE_KEY
from pipeline_platform.model.windows import window_key
from pipeline_platform.orchestration.retention.run_retention import delete_old_runs
from pipeline_platform.orchestration.sensors.producer_state import state_of
from pipeline_platform.run import begin as begin_module
from pipeline_platform.run import handling, steps
from pipeline_platform.run.flow import Flow, looked_at
from pipeline_platform.run.work.spark_work import SparkWork

SAMPLES = 5
"""Rounds that are measured on a day."""
RUNS = 2
"""Dagster's runs of an hour."""
Figures = dict[str, float]


class Clock(datetime):
    """The simulated clock."""

    now_s = 0.0

    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        """Return the simulated time."""
        return datetime.fromtimestamp(cls.now_s, tz)


_REAL_TIME = time.time


class Months:
    """A deployment in a folder, and its simulated time."""

    def __init__(self, folder: Path, days: int, rounds: int, dagster: dg.DagsterInstance) -> None:
        self.folder, self.rounds, self.dagster = folder, rounds, dagster
        self.runs = CopiedRuns(folder / "dagster", *one_run(folder / "one_run", dagster))
        Clock.now_s = (_REAL_TIME() // 3_600 - days * 24) * 3_600
        self.queue = TableQueue(name="queue", url=f"sqlite:///{folder}/queue.sqlite")
        self.queue.create()
        self.control = ControlStore(f"sqlite:///{folder}/control.sqlite", now=lambda: Clock.now_s)
        self.lake = Lake(root=f"{folder}/lake")

    def fill(self, days: int) -> None:
        """Let days pass, and add their compacted windows: a file per hour and table, in one commit per table."""
        Clock.now_s += days * 86_400
        flow, now = self.flow(), Clock.now(UTC)
        flow.tables.ensure()
        for name in flow.tables.names:
            columns = pa.schema([field for field in flow.tables[name].schema if field.name != "window"])
            rows = [
                {"source": "queue", "message_id": f"{number}", "attempt": 1, "outcome": "handled", "state": "closed"}
                for number in range(MESSAGES if name != "failed" else 1)
            ]
            table = pa.Table.from_pylist([{key: row.get(key) for key in columns.names} for row in rows], columns)
            parts = ((name, window_key(now - timedelta(hours=hour)), table) for hour in range(1, 24 * days + 1))
            files = [file for part in parts for file in write_rows(self.lake, "busy", "earlier", [part])]
            with flow.tables[name].look() as handle:
                flow.tables[name].swap(handle, "earlier", files)
        for hour in range(24 * days, 0, -1):  # the newest run of each window is kept
            self.runs.add(window_key(now - timedelta(hours=hour)), now - timedelta(hours=hour - 1))

    def flow(self) -> Flow:
        """Return a flow as a new process has it."""
        return Flow(BoundProducer(Busy), self.queue, self.lake, self.control, lambda: None)

    def round(self) -> None:
        """Perform a receive with messages of now."""
        self.queue.enqueue([b"fail %d" % Clock.now_s, *(str(number).encode() for number in range(1, MESSAGES))])
        flow, window = self.flow(), window_key(_hour(Clock.now(UTC)))
        receive = begin_module.begin(flow, origin="source", run_id="run", windows=[window], demand=MESSAGES)
        for step in (steps.receive_messages, steps.handle_messages, steps.decide, steps.publish, steps.acknowledge):
            step(flow, receive)

    def day(self) -> None:
        """Perform the rounds of a day, add Dagster's runs of that day, and close failures."""
        began = Clock.now(UTC)
        for _ in range(self.rounds):
            self.round()
            Clock.now_s += 86_400 / self.rounds
        for number in range(1, 24 * RUNS + 1):
            ended = began + number * timedelta(hours=1) / RUNS
            self.runs.add(window_key(_hour(ended - timedelta(minutes=1))), ended)
        close(self.flow().tables, self._failed(), "anna@host", "seen")

    def night(self) -> Figures:
        """Maintain the tables as if delta-rs had the simulated clock."""
        behind, flow = timedelta(seconds=_REAL_TIME() - Clock.now_s), self.flow()
        for name in flow.tables.names:
            hours = {RETENTION: KEEP_TRANSACTIONS + behind, LOG_RETENTION: KEEP_LOG + behind}
            properties = {name: f"interval {keep // timedelta(hours=1)} hours" for name, keep in hours.items()}
            flow.tables[name].open().alter.set_table_properties(properties, raise_if_not_exists=False)
        for path in self.folder.rglob("*"):
            if path.is_file() and path.stat().st_mtime > Clock.now_s + 3_600:
                os.utime(path, (Clock.now_s, Clock.now_s))
        with mock.patch.object(maintenance, "SAFE_AGE", maintenance.SAFE_AGE + behind):
            took = spent("maintenance, s", lambda: maintenance.maintain(flow.tables, Busy.retention, Clock.now(UTC)))
        keep_for, by = Busy.retention.runs or timedelta.max, dg.DagsterRun(job_name="busy_maintenance")
        delete = partial(delete_old_runs, self.dagster, Busy, keep_for, by, Clock.now(UTC))
        return took | spent("deletion of Dagster's runs, s", delete)

    def measure(self) -> Figures:
        """Return the figures of now."""
        looked = looked_at(Busy, self.lake, self.control)
        tables, failed = looked.tables, self._failed()
        run = min(spent("", self.round)[""] for _ in range(SAMPLES))
        tick = min(spent("", self._tick)[""] for _ in range(SAMPLES))
        message_id = self._some_message()
        near, far = self._outcomes(handling.CLOCKS), self._outcomes(Busy.producer.deduplicate_for)
        return {
            "run of 20 messages, s": run,
            "tick, s": tick,
            "look-up of a recent message, s": spent("", partial(self._look_up, near))[""],
            "look-up over deduplicate_for, s": spent("", partial(self._look_up, far))[""],
            "files of this look-up": len(far),
            **spent("status, s", lambda: _status(tables, failed)),
            **spent("failures list, s", lambda: inspection.grouped(failed, Clock.now(UTC))),
            **spent("trace, s", lambda: deliveries_of(looked, message_id)),
            "commits in the logs": len([*self.folder.glob("lake/busy/*/_delta_log/*.json")]),
            "checkpoints, kB": self._checkpoints() / 1_000,
            "files of tables": len([*self.folder.glob("lake/busy/*/window=*/*.parquet")]),
            "control store, kB": sum(path.stat().st_size for path in self.folder.glob("control.sqlite*")) / 1_000,
            "runs in Dagster": self.dagster.get_runs_count(),
            "Dagster's storage, MB": size_of(self.folder / "dagster") / 1e6,
        }

    def _outcomes(self, age: timedelta) -> list[RowRange]:
        """Return the outcomes in which a run looks for redeliveries of messages of this age."""
        outcomes = self.flow().tables["outcomes"]
        with outcomes.look() as handle:
            files = [file for file in outcomes.files(handle) if file.committed_at >= Clock.now(UTC) - age]
        return [RowRange(outcomes.path(file.path), file.window, 0, file.rows, 0) for file in files]

    def _look_up(self, files: list[RowRange]) -> None:
        columns = pa.schema([(name, pa.string()) for name in (*MESSAGE_KEY, "outcome")])
        for _ in read_ranges(self.lake, files, columns, 65_536):
            pass

    def _tick(self) -> None:
        state_of(BoundProducer(Busy), self.queue, self.control, self.dagster)

    def _failed(self) -> FailedMessages:
        return FailedMessages(name="queue", lake=self.lake, pipeline="busy")

    def _some_message(self) -> str:
        table = self.flow().tables["outcomes"]
        with table.look() as handle:
            newest = max(table.files(handle), key=lambda file: file.committed_at)
        with self.lake.open_input(table.path(newest.path)) as file:
            return str(pa.parquet.read_table(file)["message_id"][0])

    def _checkpoints(self) -> int:
        newest: dict[Path, int] = {}
        for path in sorted(self.folder.glob("lake/busy/*/_delta_log/*.checkpoint.parquet")):
            newest[path.parent] = path.stat().st_size
        return sum(newest.values())


def _hour(time: datetime) -> datetime:
    """Return the start of the window of a time."""
    return time.replace(minute=0, second=0, microsecond=0)


def _status(tables: Tables, failed: FailedMessages) -> None:
    """Read from the lake what `pipeline-platform status` shows."""
    failed.by_window()
    tables.refusals()
    inspection.coming_back(tables["outcomes"])


def spent(name: str, work: Callable[[], object]) -> Figures:
    """Return the seconds of processor time of some work."""
    before = time.process_time()
    work()
    return {name: time.process_time() - before}


@contextmanager
def simulated() -> Iterator[None]:
    """Let Python's clocks show the simulated time, and run tasks in this process."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(time, "time", _now_s))
        for module in (begin_module, decision, handling):
            stack.enter_context(mock.patch.object(module, "datetime", Clock))
        stack.enter_context(mock.patch.object(SparkWork, "run", run_here))
        yield


def _now_s() -> float:
    return Clock.now_s


def simulate(folder: Path, days: int, rounds: int, at_once: Sequence[int]) -> dict[int, Figures]:
    """Return the figures by day. The windows of the days from `at_once[0]` to `at_once[1]` are written at once."""
    (folder / "dagster").mkdir()
    (folder / "dagster" / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    series, looks = {}, {1, 2, 3, 5, *range(10, days, 10), days}
    first, last = at_once
    with dg.DagsterInstance.from_config(str(folder / "dagster")) as dagster:
        months = Months(folder, days, rounds, dagster)
        with simulated():
            for day in range(1, days + 1):
                if day == first:
                    months.fill(last - first + 1)
                if first <= day <= last:
                    continue
                months.day()
                night = months.night()
                if day in looks:
                    series[day] = months.measure() | night
                    print(day, {name: round(value, 4) for name, value in series[day].items()}, flush=True)
    return series


def report(series: Mapping[int, Figures]) -> str:
    """Return a table with a row for each figure, and its growth since the tenth day."""
    days, names = [*series], [*series[min(series)]]
    tenth = min((day for day in days if day >= 10), default=days[0])
    lines = [f"| day | {' | '.join(map(str, days))} | growth since day {tenth} |", "|-" * (len(days) + 2) + "|"]
    for name in names:
        values = [series[day][name] for day in days]
        shown = [f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3f}" for value in values]
        lines.append(f"| {name} | {' | '.join(shown)} | {values[-1] / max(series[tenth][name], 1e-9):.2f} |")
    return "\n".join(lines)


def plot(series: Mapping[int, Figures], path: Path) -> None:
    """Draw the figures by day."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = [*series[min(series)]]
    rows = (len(names) + 3) // 4
    figure, axes = plt.subplots(rows, 4, sharex=True, figsize=(13, 2 * rows), layout="constrained")
    for ax, name in zip(axes.flat, names, strict=False):
        ax.plot([*series], [figures[name] for figures in series.values()], color="#08519c", marker=".")
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_ylim(0, 1.1 * max(figures[name] for figures in series.values()))
        ax.set_title(name, loc="left", fontsize=9)
    for ax in axes.flat[len(names) :]:
        ax.set_axis_off()
    for ax in axes[-1]:
        ax.set_xlabel("day")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Simulate, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=96, help="rounds a day")
    parser.add_argument("--at-once", type=int, nargs=2, default=(0, 0), help="days whose windows are written at once")
    parser.add_argument("--plot", type=Path, help="file for the curves")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="months-") as folder:
        series = simulate(Path(folder), given.days, given.rounds, given.at_once)
    print(f"\n{report(series)}")
    if given.plot:
        plot(series, given.plot)


if __name__ == "__main__":
    main()
