"""Dagster's page of an asset, and the ticks of the sensors, by the number of windows with failures.

Run it as `python -m benchmarks.asset_page [--windows 24 1440] [--pictures FOLDER]`. Each window has a run with five
failures: one run is executed, and the others are copies of it. A daemon and a web server run for two minutes. Chromium
opens the partitions of `orders/failed` and of `orders/messages`, each twice. The time ends when the page shows the
number of materialised windows. Prints the seconds of the pages, the processor seconds of the web server with its code
server, and the seconds of the ticks. `--pictures` writes a picture of each page.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from unittest import mock
from urllib.request import urlopen

import dagster as dg
import psutil
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from benchmarks.asset_page_location import FIRST_WINDOW, FOLDER
from benchmarks.copied_runs import CopiedRuns
from benchmarks.failures import leave
from benchmarks.months_location import run_here
from benchmarks.whole_run import processor_s
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.windows import window_key
from pipeline_platform.run.work.spark_work import SparkWork

ROOT = Path(__file__).parents[1]
FAILURES = 5
"""Failures of a window."""
TICKS_S = 120
PATIENCE_S = 240
SETTINGS = """
telemetry: {enabled: false}
nux: {enabled: false}
sensors: {use_threads: true, num_workers: 4}
"""


def fill(folder: Path, windows: int) -> dg.DagsterInstance:
    """Return an instance with a run in each window. The last window has not ended."""
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    first = now - timedelta(hours=windows - 1)
    os.environ |= {FOLDER: str(folder), FIRST_WINDOW: first.isoformat(), "DAGSTER_HOME": str(folder / "dagster")}
    (folder / "dagster").mkdir()
    (folder / "dagster" / "dagster.yaml").write_text(SETTINGS)
    instance = dg.DagsterInstance.get()
    location = importlib.reload(sys.modules["benchmarks.asset_page_location"])
    queue = TableQueue.model_validate(location.QUEUE)
    queue.create()
    queue.enqueue(b'{"number": %d, "total": %d}' % (number, -1 if number % 4 == 0 else 1) for number in range(20))
    job = location.defs.resolve_job_def("orders_pull")
    with mock.patch.object(SparkWork, "run", run_here):
        run_id = job.execute_in_process(instance=instance, partition_key=window_key(now)).run_id
    copied, starts = CopiedRuns(folder / "dagster", run_id, window_key(now)), [now]
    for hour in range(windows - 1):
        starts.append(first + timedelta(hours=hour))
        copied.add(window_key(starts[-1]), starts[-1] + timedelta(minutes=59))
    leave(Lake(root=f"{folder}/lake"), FAILURES, *map(window_key, starts))
    return instance


@contextmanager
def process(folder: Path, *command: str) -> Iterator[psutil.Process]:
    """Run a command of Dagster until the block ends."""
    with (folder / f"{command[0]}.log").open("w") as log:
        tool = str(Path(sys.executable).parent / command[0])
        started = subprocess.Popen([tool, *command[1:]], cwd=ROOT, stdout=log, stderr=log)
    try:
        yield psutil.Process(started.pid)
    finally:
        started.terminate()
        started.wait()


def ticks(instance: dg.DagsterInstance) -> Mapping[str, list[float]]:
    """Return the seconds of each tick by sensor."""
    return {
        state.instigator_name: [
            tick.end_timestamp - tick.timestamp
            for tick in instance.get_ticks(state.instigator_origin_id, state.selector_id, limit=100)
            if tick.end_timestamp
        ]
        for state in instance.all_instigator_state()
    }


def browser() -> webdriver.Chrome:
    """Return a Chromium of 1,440 pixels."""
    options = webdriver.ChromeOptions()
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1440,1000"):
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium") or ""
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def spent(server: psutil.Process, work: Callable[[], object]) -> str:
    """Return the seconds of some work, and the processor seconds of a server with its processes meanwhile."""
    started, before = time.perf_counter(), processor_s(server)
    work()
    return f"{time.perf_counter() - started:.1f} s, {processor_s(server) - before:.1f} s of the server's processor"


def measure(folder: Path, windows: int, pictures: Path | None) -> None:
    """Fill an instance, open the pages, and print the figures."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address, located = f"http://127.0.0.1:{port}", ("-m", "benchmarks.asset_page_location")
    with ExitStack() as stack:
        instance = stack.enter_context(fill(folder, windows))
        stack.enter_context(process(folder, "dagster-daemon", "run", *located))
        time.sleep(TICKS_S)
        for name, took in ticks(instance).items():
            if took:
                print(f"  {name}: {len(took)} ticks of {statistics.median(took):.2f} s, at most {max(took):.2f} s")
        server = stack.enter_context(process(folder, "dagster-webserver", "-h", "127.0.0.1", "-p", str(port), *located))
        page = browser()
        stack.callback(page.quit)
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            with suppress(OSError), urlopen(address):
                break
            time.sleep(1)
        for name in ("failed", "messages"):
            url = f"{address}/assets/orders/{name}?view=partitions"
            for turn in ("the first time", "again"):
                took_text = spent(server, partial(_open, page, url, windows))
                print(f"  orders/{name}, {turn}: {took_text}", flush=True)
            if pictures:
                time.sleep(5)  # until the page is drawn
                page.save_screenshot(str(pictures / f"{name}-{windows}.png"))


def _open(page: webdriver.Chrome, address: str, windows: int) -> None:
    page.get(address)
    shown = f"Materialized ({windows})"
    WebDriverWait(page, PATIENCE_S).until(lambda _: shown in page.find_element(By.TAG_NAME, "body").text)


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, nargs="+", default=[24, 1_440])
    parser.add_argument("--pictures", type=Path)
    given = parser.parse_args()
    for windows in given.windows:
        print(f"{windows:,} windows:", flush=True)
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            measure(Path(folder), windows, given.pictures)


if __name__ == "__main__":
    main()
