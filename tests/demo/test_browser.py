"""A walk through the UI after a demo, in a real headless Chromium."""

import os
import re
import shutil
import signal
import time
from contextlib import contextmanager

import dagster as dg
import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from tests.fixtures.demo_under_test import Demo

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

        return self._wait().until(all_there, f"never saw all of {texts}")

    def click(self, text):
        def clicked(browser):
            buttons = browser.find_elements(By.XPATH, f"//button[contains(., '{text}')]")
            button = next((button for button in buttons if button.is_displayed() and button.is_enabled()), None)
            if button is not None:
                button.click()
            return button is not None

        self._wait().until(clicked, f"there was no {text!r} to click")

    def _wait(self):
        # The page may render an element again between two calls.
        return WebDriverWait(self.browser, PATIENCE_S, ignored_exceptions=[StaleElementReferenceException])


@contextmanager
def dev(demo):
    process = demo.start("dev")
    try:
        line = next(line for line in process.stdout if "The Dagster UI:" in line)
        yield re.search(r"(http://\S+)/asset-groups", line)[1]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


@pytest.mark.timeout(600)
@pytest.mark.faults  # a demo, its UI and a browser: two minutes
def test_the_ui_shows_what_came_of_the_demo_and_retries_failed_alone(browser, tmp_path):
    demo = Demo(tmp_path / "demo")
    said, _ = (run := demo.start()).communicate(timeout=400)
    assert run.returncode == 0, said
    with dev(demo) as url:
        walk = Walk(browser, url, tmp_path)

        walk.go("/asset-groups", "delays_per_carrier", "100% filled", "1 / 1 Passed")
        assert "0% filled" not in walk.see("lake").replace("100% filled", "")
        walk.go(
            f"{LOCATION}/sensors/flights_producer", "flights_producer", "the queue is empty|0 messages|runs? requested"
        )
        walk.go("/assets/flights/failed", "alone, with no configuration, to retry those that are open")
        walk.click("Materialize")
        walk.see("Launch runs to materialize flights / failed", "Partition selection")
        walk.click("All")
        walk.click("Launch")

        run = _ended(demo.instance())
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
