"""`make dev`: the Dagster UI on what the demo left, or on an empty platform."""

from __future__ import annotations

import sys
import time
from typing import NoReturn

from rich.console import Console

from pipelines.demo.interrupts import interruptible
from pipelines.demo.one_at_a_time import BusyError, only
from pipelines.demo.place import Place
from pipelines.demo.queues import server_lives, start_server, table_queue
from pipelines.demo.services import ServiceError, Services, ended
from pipelines.demo.where_next import status_command
from pipelines.local_servers.sqs import ServerError


def serve(place: Place, port: int, console: Console) -> int:
    """Run Dagster and warm Spark until Ctrl-C.

    Args:
        place: Where the demo lies.
        port: Of the UI; 0 for a free one.
        console: Where to say what is where.

    Returns:
        The exit code.
    """
    try:
        with only(place.home), interruptible(), ended(place):
            _serve(place, port, console)
    except KeyboardInterrupt:
        return 0
    except (BusyError, ServiceError, ServerError) as error:
        console.print(str(error), markup=False, highlight=False)
        return 1


def _serve(place: Place, port: int, console: Console) -> NoReturn:
    progress = place.progress()
    if progress is None:
        console.print("There was no demo here yet (`make demo` runs it): the queue is empty.")
    if progress and progress.source == "sqs" and not server_lives(progress):
        progress = start_server(place, progress)
    if progress is None or progress.source == "table":
        table_queue(place).create()
    services = Services(place, progress, port)
    services.stop_dagster()  # what a killed demo left
    services.start()
    services.start_daemon([sys.executable, "-m", "dagster._daemon", "run", "-w", "workspace.yaml"])
    services.await_ui()
    console.print(f"The Dagster UI: {services.dagster.url}/asset-groups (Ctrl-C ends it)")
    asked = f"Backlog, runs, failures: {status_command(place, progress)}"
    console.print(asked, markup=False, highlight=False, soft_wrap=True)
    while True:
        services.watch()
        time.sleep(1)
