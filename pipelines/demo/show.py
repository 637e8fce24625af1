"""The demo from its beginning, or from where it was interrupted, to its account."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from pipelines.demo.dagster_api import OVER, DagsterError
from pipelines.demo.departures import Expected, departures, expected
from pipelines.demo.figures import (
    Figures,
    Line,
    account_after,
    account_before,
    alerts_of_dead_runs,
    delays,
    look,
    open_failures,
)
from pipelines.demo.interrupts import interruptible
from pipelines.demo.leases import let_leases_end
from pipelines.demo.one_at_a_time import BusyError, only
from pipelines.demo.place import Kind, Place, Progress
from pipelines.demo.processes import daemon
from pipelines.demo.queues import fill, server_lives, start_server, stop_server
from pipelines.demo.screen import Screen, account_table, run_table
from pipelines.demo.services import ServiceError, Services, ended
from pipelines.demo.where_next import where_next
from pipelines.flights import Flights
from pipelines.local_servers.sqs import ServerError

_LOOK_EVERY_S = 0.5
_STANDS_STILL_S = 500
"""Longer than any lease, after which what a killed run held comes back."""
_BACKFILLS = 5
ASSETS = [(Flights.name, table) for table in ("messages", *Flights.batchers, "failed")]
FIX = {
    "ops": {
        Flights.name: {
            "ops": {"receive_messages": {"config": {"origin": "failed", "context": {"cancelled_is_valid": True}}}}
        }
    }
}
"""Run config of the backfill: drive failures again, under the rule that a cancelled flight is valid."""


class DemoError(Exception):
    """The demo cannot go on."""


def show(place: Place, source: Kind, flights: int, console: Console) -> int:
    """Run the demo.

    Args:
        place: Where it lies.
        source: Which queue.
        flights: How many go through it.
        console: Where to show it.

    Returns:
        The exit code: 0 if the figures add up, 1 if they do not or something failed, 130 if it was interrupted.
    """
    try:
        with only(place.home), interruptible(), ended(place):
            return _Demo(place, source, flights, console).run()
    except KeyboardInterrupt:
        why = _why_afresh(place.progress(), Progress(source=source, flights=flights))
        what = f"starts afresh. {why}." if why else "goes on from here."
        console.print(f"Interrupted; the same command {what}")
        return 130
    except (BusyError, DemoError, ServiceError, DagsterError, ServerError, ModuleNotFoundError) as error:
        console.print(f"[red]{type(error).__name__}[/red]: ", end="")
        console.print(str(error), markup=False, highlight=False)
        return 1


class _Demo:
    def __init__(self, place: Place, source: Kind, flights: int, console: Console) -> None:
        self._place, self._console, self._began = place, console, time.monotonic()
        self._wanted: Expected | None = None
        self._took: dict[str, float] = {}
        self._progress = self._go_on_or_begin(source, flights)
        self._services = Services(place, self._progress)
        self._dagster = self._services.dagster
        self._screen = Screen(console, self._progress.flights, self._dagster.url)

    # Going on, or beginning

    def _go_on_or_begin(self, source: Kind, flights: int) -> Progress:
        before, wanted = self._place.progress(), Progress(source=source, flights=flights)
        why = _why_afresh(before, wanted)
        if before and why is None:
            self._say(f"Going on with the demo that was interrupted ({flights:,} flights).")
            Services(self._place, before).stop_dagster()
            let_leases_end(self._place, before)
            return self._keep(before.model_copy(update={"interrupted": True}))
        if before:
            self._say(f"{why}: starting afresh.")
        Services(self._place, before).stop()
        stop_server(before)
        _clear(self._place)
        return start_server(self._place, wanted) if source == "sqs" else self._keep(wanted)

    def _keep(self, progress: Progress) -> Progress:
        self._place.keep(progress)
        return progress

    # From the queue to the account

    def run(self) -> int:
        self._services.start()
        self._fill()
        if self._progress.interrupted:
            # Before anything new starts: whatever Dagster takes for running ended with the earlier demo.
            self._services.await_ui()
            for run in self._dagster.runs():
                if run.status in ("STARTING", "STARTED", "CANCELING"):
                    self._dagster.mark_canceled(run.run_id)
        self._services.start_daemon(daemon())
        with self._timed("start Dagster and Spark"):
            self._services.await_ui()
        self._say(f"Dagster shows all of it at {self._dagster.url}/asset-groups while the demo runs.")
        with self._timed("handle, batch, commit, acknowledge"), self._screen.shown():
            self._until("From the queue", self._drained)
        before = account_before(self._place, self._progress, self._expected)
        self._took["before the backfill"] = time.monotonic() - self._began
        self._say(
            f"{self._progress.flights:,} messages received, handled and acknowledged "
            f"{self._took['before the backfill']:.1f} s after the start."
        )
        with self._timed("backfill of the failed windows"):
            self._bring_failures_home()
        with self._timed("flights/delays_per_carrier"):
            self._materialise_delays()
        return self._report([*before, *account_after(self._place, self._expected)])

    def _fill(self) -> None:
        with self._timed("fill the queue"):
            self._wanted = expected(departures(self._progress.flights))
            if not self._progress.filled:
                count = fill(self._place, self._progress)
                self._progress = self._keep(self._progress.model_copy(update={"filled": True}))
                where = "an SQS queue" if self._progress.source == "sqs" else self._place.queue.name
                self._say(f"{count:,} flights are waiting in {where}.")

    @property
    def _expected(self) -> Expected:
        assert self._wanted is not None
        return self._wanted

    def _drained(self, figures: Figures) -> bool:
        return not figures.at_the_queue and not figures.in_flight

    def _until(self, title: str, done: Callable[[Figures], bool]) -> None:
        """Show the state of things until something holds.

        Raises:
            DemoError: Nothing has changed for longer than any lease.
        """
        last, changed = None, time.monotonic()
        while True:
            self._services.watch()
            figures = look(self._place, self._progress)
            runs = self._dagster.runs()
            self._screen.show(title, figures, runs, self._dagster.sensor_says(f"{Flights.name}_producer"))
            if done(figures):
                return
            state = (figures, [(run.run_id, run.status) for run in runs])
            if state != last:
                last, changed = state, time.monotonic()
            elif time.monotonic() - changed > _STANDS_STILL_S:
                raise DemoError(f"nothing has changed for {_STANDS_STILL_S} s; the logs are in {self._place.logs}")
            time.sleep(_LOOK_EVERY_S)

    # The backfill

    def _bring_failures_home(self) -> None:
        """Launch the backfill of the windows with open failures; again, should its run be killed."""
        launched = list(self._progress.backfills)
        if launched:
            self._await_backfill(launched[-1])
        while waiting := open_failures(self._place):
            if len(launched) >= _BACKFILLS:
                raise DemoError(f"{sum(waiting.values())} failures are open after {_BACKFILLS} backfills")
            backfill_id = self._launch_backfill(sorted(waiting))
            launched.append(backfill_id)
            self._progress = self._keep(self._progress.model_copy(update={"backfills": launched}))
            self._say(
                f"Backfill {backfill_id} drives {sum(waiting.values()):,} failures in {', '.join(sorted(waiting))}: "
                f"{self._dagster.url}/runs/b/{backfill_id}"
            )
            self._await_backfill(backfill_id)

    def _launch_backfill(self, windows: list[str]) -> str:
        title = "Cancelled flights are valid: drive what failed once more"
        try:
            return self._dagster.launch_backfill(ASSETS, windows, FIX, title)
        except DagsterError:
            # Dagster was seen to refuse windows as if the assets had none of them. Two backfills would do no harm.
            time.sleep(_LOOK_EVERY_S)
            return self._dagster.launch_backfill(ASSETS, windows, FIX, title)

    def _await_backfill(self, backfill_id: str) -> None:
        with self._screen.shown():
            self._until(f"Backfill {backfill_id}", lambda _: self._dagster.backfill(backfill_id) in OVER)

    def _materialise_delays(self) -> None:
        run = self._dagster.await_run(self._dagster.materialise(Flights.name, "delays_per_carrier"))
        if run.status != "SUCCESS":
            raise DemoError(f"flights/delays_per_carrier failed; see {self._place.logs}")

    # The report

    def _report(self, lines: list[Line]) -> int:
        from pipelines.demo.chart import draw

        runs, right = self._dagster.runs(), all(line.holds for line in lines)
        seconds = self._took["before the backfill"]
        with self._timed("chart"):
            title = f"{self._progress.flights:,} flights in {seconds:.0f} s from `make demo`, then a backfill"
            draw(self._place.chart, runs, delays(self._place), title)
        self._console.print()
        self._console.print(run_table(runs))
        self._console.print()
        self._console.print(account_table(lines))
        if again := alerts_of_dead_runs(self._place):
            self._say(f"{again} alerts were sent by runs that died before their decision: callbacks run at least once.")
        self._console.print()
        for name, took in self._took.items():
            self._say(f"{took:6.1f} s  {name}")
        self._console.print()
        if not right:
            self._console.print("[bold red]The figures do not add up.[/bold red]")
            return 1
        self._progress = self._keep(self._progress.model_copy(update={"finished": True}))
        self._console.print("[bold green]The figures add up.[/bold green] Where to look next:")
        for where, what in where_next(self._place, self._progress):
            self._say(f"  {where}: {what}")
        return 0

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._took[what] = time.monotonic() - began


def _why_afresh(before: Progress | None, wanted: Progress) -> str | None:
    """Why an earlier demo cannot be gone on with; None where it can."""
    if before is None:
        return "There is no earlier demo"
    if (before.source, before.flights) != (wanted.source, wanted.flights):
        return f"The last demo was another ({before.flights:,} flights, {before.source})"
    if before.finished:
        return "The last demo is finished"
    if not before.filled:
        return "The last demo was interrupted before its queue was full"
    if before.source == "sqs" and not server_lives(before):
        return "The last demo's SQS server is gone, and its messages with it"
    return None


def _clear(place: Place) -> None:
    """Remove what demos make, and nothing else that may lie there."""
    # What is known of it first: interrupted here, no other demo goes on with what is left.
    (place.home / "demo.json").unlink(missing_ok=True)
    for folder in (place.lake, place.dagster, place.logs):
        shutil.rmtree(folder, ignore_errors=True)
    for database in (place.queue, place.control, place.alerts):
        for end in ("", "-wal", "-shm"):
            database.with_name(database.name + end).unlink(missing_ok=True)
    place.chart.unlink(missing_ok=True)
