"""`pipeline-platform dashboard`: the picture of real runs, and of deployments in trouble."""

import io
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from rich.console import Console

from pipeline_platform.cli.dagster_instance import unavailable
from pipeline_platform.cli.dashboard.command import follow, to_html
from pipeline_platform.cli.dashboard.gathering import Gatherer
from pipeline_platform.cli.dashboard.looks import Paced
from pipeline_platform.cli.dashboard.picture import Picture
from pipeline_platform.cli.dashboard.reports import MOST, by_minute
from pipeline_platform.cli.status.status_data import Health
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.asset_windows import window_now
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.orchestration.reports.stage_figures import Report
from pipeline_platform.source.backlog import Backlog
from tests.fixtures.dagster import Location
from tests.fixtures.dashboards import deployment, fail_in_windows, text_of
from tests.fixtures.heartbeats import beat
from tests.fixtures.pipelines_under_test import Bare, Beside, Steady, Told
from tests.fixtures.small_lake import Memory


def gatherer(location: Location, *pipelines: type[Pipeline], **sources: Any) -> Gatherer:
    opened = deployment(location.root, location.control, *pipelines, queue=location.queue, **sources)
    return Gatherer(opened, location.instance, pipelines)


def test_the_picture_shows_what_real_runs_did(location):
    beat(location.instance, "SENSOR", ago_s=5)
    location.enqueue("one", "two", "letter a", "letter b", *(f"fail {each}{'x' * 300}" for each in (1, 2)))
    run = location.run("told_pull")
    location.enqueue("waits")

    picture = gatherer(location, Told, Bare).picture(10)
    told, bare = picture.pipelines

    status = told.look.status
    assert "✓ daemon seen" in text_of(picture)[0]
    assert (status.state, status.failures.open, status.producers[""].backlog.messages) == (Health.FAILING, 2, 1)
    assert sum(minute.messages for minute in told.minutes) == 6
    assert sum(minute.failed for minute in told.minutes) == 2
    assert (told.stages["handle"].rate, told.stages["letters"].rate) == (6 / 300, 2 / 300)
    assert told.stages["letters"].batch == 1
    assert told.stages["lines"].stored_in == "table"
    assert all(told.stages[name].seconds > 0 for name in ("receive", "handle", "letters"))
    assert 0 < told.stages["handle"].busy < 1
    p50, p95, p99 = told.latency
    assert 0 < p50 <= p95 <= p99 < 600
    line = told.runs[0]
    assert (line.run_id, line.state, line.origin, len(line.work)) == (run.run_id, "succeeded", "source", 1)
    assert [(cause.messages, cause.cause) for cause in told.look.causes.causes] == [(2, "asked to fail")]
    assert (bare.look.status.state, bare.runs, bare.latency) == (Health.HEALTHY, (), ())

    cause = told.look.causes.causes[0]._replace(cause=f"<script>alert(1)</script>\x1b[2J{'x' * 300}")
    look = told.look._replace(causes=told.look.causes._replace(causes=(cause,)))
    picture = replace(picture, pipelines=(replace(told, look=look),))
    for width in (80, 130, 200):
        assert_lines_fit(picture, width)
    assert_a_page_needs_no_other_file_and_escapes_texts(picture)


def test_a_second_picture_adds_later_reports_and_a_run_of_rounds_is_one_line(location):
    shown = gatherer(location, Steady)
    location.enqueue("first")
    location.run("steady_pull", window_now(Steady))
    assert shown.picture(10).pipelines[0].stages["handle"].rate == 1 / 300
    location.enqueue("second", "third")
    run = location.run("steady_pull", window_now(Steady), rounds=True)

    steady = shown.picture(10).pipelines[0]

    assert steady.stages["handle"].rate == 3 / 300
    assert steady.runs[0].run_id == run.run_id
    assert len(steady.runs) == 2


def test_a_killed_daemon_and_a_crashed_run_are_named(location):
    beat(location.instance, "SENSOR", ago_s=121)
    location.control.claim("told", "a" * 32, "run-crashed", wanted=7, capacity=100, lease_s=-1)

    picture = gatherer(location, Told).picture(10)

    lines = text_of(replace(picture, daemon_seen=picture.at - timedelta(seconds=121)))
    assert "✗ daemon silent for 121 s" in lines[0]
    assert [line for line in lines if line.startswith("run-cras") and line.endswith(" crashed, 7")]
    assert any("no runs are requested" in line for line in lines)


def test_the_fill_of_a_source_is_the_share_of_leased_messages(location):
    tags = RunTags.of(Steady)
    of_rounds = {tags.origin: "source", tags.received: "50", tags.rounds: "5"}
    run = location.instance.add_run(dg.DagsterRun("any", tags=of_rounds, status=dg.DagsterRunStatus.STARTED))
    location.control.stand_by("steady", run.run_id, 60)
    location.control.claim("steady", "r5", run.run_id, wanted=50, capacity=200, lease_s=60)

    lines = text_of(gatherer(location, Steady).picture(10), 120)

    (source,) = [line.split() for line in lines if line.startswith("queue ")]
    assert source[3] == "50%"
    assert source[-3:] == ["50", "in", "flight"]


def test_a_source_that_hangs_delays_neither_the_picture_nor_other_pipelines(location):
    ends = threading.Event()

    class Hanging(Memory):
        def backlog(self) -> Backlog:
            ends.wait(60)
            return Backlog(3)

    shown = gatherer(location, Told, Beside, beside_queue=Hanging())
    try:
        began, (told, beside) = time.monotonic(), shown.picture(0.5).pipelines
        while told.look.status is None and time.monotonic() - began < 50:
            told, beside = shown.picture(0.5).pipelines
        assert told.look.status is not None
        assert (beside.look.status, beside.look.waits_for) == (None, "the source beside_queue")
        assert any("waiting for the source beside_queue" in line for line in text_of(shown.picture(0)))
    finally:
        ends.set()
    beside = shown.picture(10).pipelines[1]
    assert (beside.look.status.producers[""].backlog.messages, beside.look.waits_for) == (3, "")


def test_causes_are_read_in_the_background_and_an_error_leaves_the_other_parts(location, monkeypatch):
    fail_in_windows(deployment(location.root, location.control).lake, "told", 2)
    reads, goes_on = threading.Event(), threading.Event()

    def unreadable(*_: Any) -> None:
        reads.set()
        goes_on.wait(60)
        raise OSError("the file is damaged")

    monkeypatch.setattr("pipeline_platform.cli.dashboard.causes.grouped", unreadable)
    shown = gatherer(location, Told)
    shown.picture(0)
    assert reads.wait(60)
    (told,) = shown.picture(0).pipelines
    assert (told.look.status.failures.open, told.look.waits_for) == (2, "the lake")
    goes_on.set()
    (told,) = shown.picture(60).pipelines
    assert told.unknown == {"causes": "unavailable: OSError: the file is damaged"}


def test_dagster_that_does_not_answer_leaves_the_control_store_and_the_lake(tmp_path, control):
    queue = TableQueue(name="queue", url=f"sqlite:///{tmp_path}/queue.sqlite")
    queue.create()
    control.claim("told", "a" * 32, "run-alive", wanted=7, capacity=100, lease_s=60)
    opened = deployment(tmp_path, control, Told, queue=queue)

    picture = Gatherer(opened, unavailable(ConnectionError("refused")), [Told]).picture(10)

    (told,) = picture.pipelines
    assert picture.daemon_unknown == "unavailable: ConnectionError: refused"
    assert [(run.run_id, run.state, run.messages) for run in told.runs] == [("run-alive", "working", 7)]
    assert told.unknown == {"reports": "unavailable: ConnectionError: refused"}


@pytest.mark.parametrize("pipelines", [(), (Told,)])
def test_an_empty_deployment_has_a_picture(tmp_path, control, pipelines):
    queue = TableQueue(name="queue", url=f"sqlite:///{tmp_path}/queue.sqlite")
    queue.create()
    picture = Gatherer(deployment(tmp_path, control, *pipelines, queue=queue), "no instance yet", pipelines).picture(10)
    lines = text_of(picture)
    assert "daemon unknown: no instance yet" in lines[0]
    assert any("no runs in the last 10 min" in line for line in lines) == bool(pipelines)
    assert ("This deployment has no pipelines." in lines) != bool(pipelines)


def test_failures_in_many_windows_are_one_line_and_only_the_newest_are_read(location):
    fail_in_windows(deployment(location.root, location.control).lake, "told", 60)

    (told,) = (picture := gatherer(location, Told).picture(60)).pipelines

    assert (told.look.status.failures.open, told.look.causes.messages) == (60, 50)
    assert [cause.cause for cause in told.look.causes.causes] == ["order * has no price"]
    lines = text_of(picture)
    assert len(lines) < 25
    assert any("60 open in 60 windows, 0 dead" in line for line in lines)
    assert any("causes of the 50 newest failures" in line for line in lines)


def test_thirty_pipelines_fit_on_a_screen_and_the_worst_come_first(location):
    pipelines = [type(f"P{number}", (Told,), {"name": f"p{number:02}"}) for number in range(30)]
    location.control.claim("p17", "a" * 32, "run-crashed", wanted=7, capacity=100, lease_s=-1)
    beat(location.instance, "SENSOR", ago_s=5)

    picture = gatherer(location, *pipelines).picture(60)
    screen = text_of(picture, 80, 24)

    assert len(screen) <= 24
    assert screen[2].startswith("p17 ")
    assert "✗ failing" in screen[2]
    assert sum(line.startswith("p") and "healthy" in line for line in text_of(picture, 120)[2:32]) == 29


def assert_lines_fit(picture: Picture, width: int) -> None:
    lines = text_of(picture, width)
    assert max(map(len, lines)) <= width
    for part in ("handle", "├─ letters", "└─ failures", "p95", "last hour", "causes of open failures"):
        assert any(part in line for line in lines), part


def assert_a_page_needs_no_other_file_and_escapes_texts(picture: Picture) -> None:
    html = to_html(picture)
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert "\x1b" not in html
    assert not any(reference in html for reference in ("http:", "https:", "src=", "href=", "@import", "url("))


def test_work_is_repeated_after_a_time_in_proportion_to_its_cost(monkeypatch):
    now = 100.0
    monkeypatch.setattr("pipeline_platform.cli.dashboard.looks.time", SimpleNamespace(monotonic=lambda: now))
    pace = Paced(0.1)
    assert pace.is_due
    pace.ended(0.5)
    now = 104.9
    assert not pace.is_due
    now = 105.0
    assert pace.is_due


def test_failures_are_unknown_for_minutes_before_the_oldest_of_many_reports():
    since = datetime(2026, 1, 1, tzinfo=UTC)
    reports = [
        Report(since + timedelta(minutes=40, seconds=each), "r", 1, 1, {}, (1.0, 2.0, 3.0)) for each in range(MOST)
    ]
    some, many = by_minute(reports[1:], since), by_minute(reports, since)
    assert [some[minute] for minute in (0, 39, 40, 41, 42)] == [(0, None), (0, None), (59, 2.0), (40, 2.0), (0, None)]
    assert [many[minute] for minute in (0, 39, 40, 41, 42)] == [
        (None, None),
        (None, None),
        (60, 2.0),
        (40, 2.0),
        (0, None),
    ]


def test_the_command_prints_a_picture_or_writes_a_page(beside, tmp_path):
    queue = TableQueue(name="queue", url=f"sqlite:///{tmp_path}/queue.sqlite")
    queue.create()
    cli = beside(Told, Bare, queue=queue)

    printed = cli("dashboard", "--once").stdout
    written = cli("dashboard", "told", "--html", str(tmp_path / "page.html"))

    assert "daemon unknown: DAGSTER_HOME is not set" in printed
    assert "told" in printed
    assert "bare" in printed
    page = (tmp_path / "page.html").read_text()
    assert written.exit_code == 0
    assert "told" in page
    assert "bare" not in page
    assert cli("dashboard", "absent").exit_code == 2


def test_a_live_picture_is_drawn_again_until_the_user_ends_it(tmp_path, control):
    queue = TableQueue(name="queue", url=f"sqlite:///{tmp_path}/queue.sqlite")
    queue.create()
    shown = Gatherer(deployment(tmp_path, control, Told, queue=queue), "no instance yet", [Told])
    pictures = iter([shown.picture(10), shown.picture(10)])

    def picture(_: float) -> Any:
        try:
            return next(pictures)
        except StopIteration:
            raise KeyboardInterrupt from None

    screen = io.StringIO()
    follow(SimpleNamespace(picture=picture), Console(file=screen, force_terminal=True, width=80, height=24), 0.1)
    assert screen.getvalue().count("no runs in the last 10 min") == 2
