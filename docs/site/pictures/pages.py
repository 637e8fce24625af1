"""Pictures of Dagster's pages for docs/run.

They show plots of a history, the launchpads of limits and of a retry, open failures, and a failed run.
"""

import json
import math
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from unittest import mock
from urllib.request import urlopen

import dagster as dg
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from pipeline_platform.connectors.table_queue import TableQueue

PATIENCE_S = 240
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1440,1000")
_TWO_HOURS_S = 7_200
_OBSERVATIONS_PER_WEEK = 84
_WINDOW = "2026-11-01T0000"
_UNREACHABLE = "postgresql+psycopg://shop@127.0.0.1:1/shop"
"""URL of a queue that no server answers."""
_RENAME = """
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(arguments[0], arguments[1]);
"""
"""Script that replaces the folder of the environment in stack traces."""


def take(home: Path, environment: Mapping[str, str], folder: Path) -> None:
    """Write `history.png`, `limits.png`, `retry.png`, `failed.png` and `red-run.png` from the deployment in `home`.

    The observations of the past week are simulated, so that the plots have points.
    """
    _simulate_week(home)
    orders = [{"number": number, "total": -20.5 if number % 5 == 0 else 20.5} for number in range(4_711, 4_731)]
    TableQueue(name="orders_queue", url=f"sqlite:///{home}/orders.sqlite").send([*map(_as_json, orders)])
    _run("orders_pull", home, environment)
    red = _run("payments_pull", home, {**environment, "PAYMENTS_URL": _UNREACHABLE})
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = ["dagster-webserver", "-h", "127.0.0.1", "-p", str(port), "-w", "workspace.yaml"]
    with (home / "web-server.log").open("w") as log:
        server = subprocess.Popen(command, cwd=home, env=environment, stdout=log, stderr=log)
    options = webdriver.ChromeOptions()
    for flag in FLAGS:
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium") or ""
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        _wait_for_server(address)
        browser.get(f"{address}/assets/orders_history")
        _wait_for_text(browser, "slowest batcher")
        _click(browser, "//button[contains(., 'Plots')]")
        _save(browser, folder / "history.png", scrolled_to="failure share")
        browser.get(f"{address}/locations/definitions/jobs/orders_limits/playground")
        _wait_for_text(browser, "allowed_messages")
        _save(browser, folder / "limits.png")
        browser.get(f"{address}/assets/orders/failed")
        _click(browser, "(//button[contains(., 'Materialize')]/following::button)[1]")
        _click(browser, "//*[normalize-space(text())='Open launchpad']")
        _wait_for_editor(browser, "context")
        _save(browser, folder / "retry.png")
        browser.get(f"{address}/assets/orders/failed?view=partitions&partition={_WINDOW}")
        _wait_for_text(browser, "negative total")
        _save(browser, folder / "failed.png", scrolled_to="reasons")
        browser.get(f"{address}/runs/{red}")
        _wait_for_text(browser, "SourceAwayError")
        _save(browser, folder / "red-run.png")
    finally:
        browser.quit()
        server.terminate()
        server.wait()


def _simulate_week(home: Path) -> None:
    with dg.DagsterInstance.from_config(str(home / "dagster")) as instance:
        received = dg.AssetMaterialization(dg.AssetKey(["orders", "messages"]), partition=_WINDOW)
        instance.report_runless_asset_event(received)  # without it, Dagster asks whether a retry is intended
        for number in range(_OBSERVATIONS_PER_WEEK, 0, -1):
            at = time.time() - number * _TWO_HOURS_S
            load = 1 + math.sin(at / 86_400 * 2 * math.pi)
            rate, share = 3 + 4 * load + random.random(), 0.1 if number in (30, 31) else 0.02
            figures = {
                "messages": round(rate * _TWO_HOURS_S),
                "messages per second": round(rate, 3),
                "failure share": round(share + random.random() / 100, 4),
                "highest latency p95, seconds": round(1.2 + load / 2 + random.random() / 4, 2),
                "backlog": round(20 * load * random.random()),
                "oldest, seconds": round(load * 2, 1),
                "slowest batcher": "reviews: 0.104 s a batch",
            }
            event = dg.AssetObservation(dg.AssetKey(["orders_history"]), metadata=figures)
            with mock.patch("time.time", return_value=at):
                instance.report_runless_asset_event(event)


def _as_json(order: Mapping[str, float]) -> bytes:
    return json.dumps(order).encode()


def _run(job: str, home: Path, environment: Mapping[str, str]) -> str:
    """Execute a run of a job; return its id."""
    tags = json.dumps({"dagster/partition": _WINDOW})
    command = [sys.executable, "-m", "dagster", "job", "execute", "-m", "definitions", "-j", job, "--tags", tags]
    with (home / f"{job}.log").open("w") as log:
        subprocess.run(command, cwd=home, env=environment, stdout=log, stderr=log, check=False)
    with dg.DagsterInstance.from_config(str(home / "dagster")) as instance:
        return instance.get_runs(dg.RunsFilter(job_name=job), limit=1)[0].run_id


def _wait_for_server(address: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        with suppress(OSError), urlopen(address):
            return
        time.sleep(1)
    raise TimeoutError(f"{address}: Dagster's web server does not answer")


def _wait_for_text(browser: webdriver.Chrome, text: str) -> None:
    WebDriverWait(browser, PATIENCE_S).until(lambda _: text in browser.find_element(By.TAG_NAME, "body").text)


def _wait_for_editor(browser: webdriver.Chrome, text: str) -> None:
    content = "return document.querySelector('.CodeMirror')?.CodeMirror.getValue() ?? ''"
    WebDriverWait(browser, PATIENCE_S).until(lambda _: text in browser.execute_script(content))


def _click(browser: webdriver.Chrome, element: str) -> None:
    """Click an element as soon as it is there. The page may replace it while it loads."""
    WebDriverWait(browser, PATIENCE_S, ignored_exceptions=[Exception]).until(
        lambda _: browser.find_element(By.XPATH, element).click() or True
    )


def _save(browser: webdriver.Chrome, file: Path, scrolled_to: str = "") -> None:
    if scrolled_to:
        _wait_for_text(browser, scrolled_to)
        heading = browser.find_element(By.XPATH, f"//*[normalize-space(text())='{scrolled_to}']")
        browser.execute_script("arguments[0].scrollIntoView()", heading)
    time.sleep(5)  # until the page is drawn
    browser.execute_script(_RENAME, sys.prefix, "/srv/dagster/.venv")
    browser.save_screenshot(str(file))
