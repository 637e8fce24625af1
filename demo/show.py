"""A demo from its start to the account of its messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import Any

import polars as pl
from rich.console import Console

from demo.chart import draw
from demo.figures import account, look, open_failures, sent_alerts, table
from demo.flights import departures, payloads
from demo.place import Begun, DemoError, Kind, Place
from demo.queues import Queue, opened
from demo.screen import Screen, account_table, run_table
from demo.services import Run, Services, alone
from pipeline_platform.cli.loading import load
from pipeline_platform.orchestration.asset_windows import contiguous
from pipelines.flights import Flights

_LOOK_EVERY_S = 0.5
_BACKFILLS = 5
_RANGE = "dagster/asset_partition_range"
_FIX = {"ops": {Flights.name: {"ops": {"receive_messages": {"config": {"context": {"cancelled_is_valid": True}}}}}}}
"""Run config of the retry: a cancelled flight is valid."""


def show(place: Place, source: Kind, flights: int, console: Console) -> int:
    """Run the demo; return 0 if the figures add up, 1 if they do not, 130 if it was interrupted."""
    try:
        with alone(place):
            place.clear()
            place.write(Begun(source=source, since=f"{datetime.now(UTC):%Y-%m-%dT%H:00+00:00}"))
            with opened(place, source) as queue:
                return 0 if _Demo(place, flights, queue, console).run() else 1
    except KeyboardInterrupt:
        console.print("Interrupted; the same command starts a new demo.")
        return 130


class _Demo:
    def __init__(self, place: Place, flights: int, queue: Queue, console: Console) -> None:
        self._place, self._flights, self._queue, self._console = place, flights, queue, console
        self._began = time.monotonic()
        place.enter(queue.environment)
        self._services = Services(place, port=0)
        self._screen = Screen(console, flights, self._services.url)

    def run(self) -> bool:
        """Handle all flights; return whether the figures add up."""
        with self._timed("fill the queue"):
            flights = departures(self._flights)
            self._console.print(f"Sent {self._queue.fill(payloads(flights)):,} flights to the queue.")
        with self._timed("start Dagster and Spark"):
            self._services.wait()
            load("definitions")  # an error in it is shown here instead of in a daemon's log
        self._console.print(f"The Dagster UI is at {self._services.url}/asset-groups while the demo runs.")
        with self._timed("handle, batch, commit, acknowledge"):
            self._until("From the queue", lambda figures, _: not figures["backlog"] and not figures["in flight"])
        seconds = time.monotonic() - self._began
        self._console.print(
            f"{flights.height:,} messages received, handled and acknowledged {seconds:.1f} s after the start."
        )
        with self._timed("retry the failures"):
            self._retry_failures()
        with self._timed("flights/delays_per_carrier"):
            self._until(
                "Delays by carrier, started by an automation condition", lambda _, runs: self._have_delays(runs)
            )
        with self._timed("chart"):
            title = f"{flights.height:,} flights in {seconds:.0f} s from `make demo`, then a retry"
            draw(self._place.chart, self._services.runs(), table(self._place, "delays_per_carrier"), title)
        with self._timed("end the runs"):
            self._end_runs()
        return self._report(account(self._place, self._queue, flights))

    def _until(self, title: str, done: Callable[[Mapping[str, int], Sequence[Run]], bool]) -> Sequence[Run]:
        """Show the progress until a condition is true; return the runs."""
        with self._screen.shown():
            while True:
                self._services.watch()
                figures, runs = look(self._place, self._queue, self._flights), self._services.runs()
                self._screen.show(title, figures, runs, self._services.sensor_says())
                if done(figures, runs):
                    return runs
                time.sleep(_LOOK_EVERY_S)

    def _launched(self, job: str, title: str, **options: Any) -> Run:
        """Launch a run and wait for its end."""
        run_id = self._services.launch(job, **options)
        self._console.print(f"{title}: {self._services.url}/runs/{run_id}")
        runs = self._until(title, lambda _, runs: not any(run.under_way for run in runs if run.run_id == run_id))
        return next(run for run in runs if run.run_id == run_id)

    def _have_delays(self, runs: Sequence[Run]) -> bool:
        """Whether its automation condition has materialised `flights/delays_per_carrier` from the current rows."""
        of_delays = [run for run in runs if run.origin == "__ASSET_JOB"]
        if of_delays and of_delays[0].status == "FAILURE":
            raise DemoError(f"{Flights.name}/delays_per_carrier failed. See the logs in {self._place.logs}")
        last = max(run.times[1] or 0 for run in runs if run.origin in ("source", "failed"))
        return any(run.status == "SUCCESS" and (run.times[0] or 0) > last for run in of_delays)

    def _retry_failures(self) -> None:
        """Retry the open failures, again if the run was killed or the windows are not contiguous."""
        for _ in range(_BACKFILLS):
            if waiting := open_failures(self._place):
                windows = contiguous(Flights, waiting)[0]
                title = f"Retry of {', '.join(windows)}: {sum(waiting[each] for each in windows):,} failures"
                tags = {f"{_RANGE}_start": windows[0], f"{_RANGE}_end": windows[-1]}
                self._launched(f"{Flights.name}_retry", title, run_config=_FIX, tags=tags)

    def _end_runs(self) -> None:
        """Let all runs end, and start no others: interrupted runs would be red in `make dev`."""
        with closing(self._place.control_store()) as control:
            control.pause(Flights.name, "the demo has ended")
            self._until("Last runs", lambda _, runs: not any(run.under_way for run in runs))
            self._services.end_daemon()
            control.resume(Flights.name)

    def _report(self, lines: Sequence[tuple[str, int, int]]) -> bool:
        for drawn in (run_table(self._services.runs()), account_table(lines)):
            self._console.print()
            self._console.print(drawn)
        if again := sent_alerts(self._place).filter(~pl.col("published")).height:
            self._console.print(
                f"Alerts sent by runs that crashed before their decision: {again}. Callbacks run at least once."
            )
        self._console.print()
        if not all(wanted == found for _, wanted, found in lines):
            self._console.print("[bold red]The figures do not add up.[/bold red]")
            return False
        self._console.print("[bold green]The figures add up.[/bold green] Next:")
        self._console.print("  make dev: the Dagster UI with these runs, assets and failures")
        self._console.print("  pipelines/flights.py: the code of the pipeline")
        self._console.print(f"  {self._place.chart}: the chart")
        self._console.print(f"  {self._place.lake}: the tables, for Polars, Spark, DuckDB, Trino")
        if self._place.begun.source == "table":  # a server's queue ended with the demo
            self._console.print(f"  {self._place.status_command({})}: backlog, runs, failures")
        return True

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._console.print(f"{time.monotonic() - began:6.1f} s  {stage}")
