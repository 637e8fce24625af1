"""`show`, `scale` and `drain`: a pipeline inspected and changed at run time."""

import json
from datetime import timedelta
from typing import ClassVar

import pytest

from pipeline_platform.cli.main import main
from pipeline_platform.model.options import Overrides, RateLimiting
from pipeline_platform.model.pipeline import Pipeline
from tests.fixtures.pipelines_under_test import Coasts, Lettered, Talkative, Told
from tests.fixtures.small_lake import Memory


@pytest.fixture
def cli(beside):
    return beside(Coasts, Told, queue=Memory(), beside_queue=Memory())


def test_show_tells_what_a_pipeline_is_made_of(cli):
    said = cli("show", "told").stdout.splitlines()[3:]
    begins = [
        "told",
        "  producer: queue (Memory), concurrency 2, max_runs 2, patience 30 s, interval 5 s, ",
        "  processors: handle_message by row; concurrency 2, max_demand 50, chunk_size 1,000, ",
        "  batcher lines: TableBatcher of Line, batch_size 1,000,000",
        "  batcher letters: Batcher of JSON, concurrency 1, batch_size 3",
        "  options: first_window 2025-01-01 00:00:00+00:00, owners team:tests",
        "  tables: told/messages, told/outcomes, told/lines, told/letters, told/failed",
        "  windows: 0 * * * * (cron, UTC)",
        "  shutdown: 1 s",
    ]
    assert [line[: len(begin)] for line, begin in zip(said, begins, strict=True)] == begins
    assert "rescue False" in "\n".join(said)


def test_what_changes_a_pipeline_prints_it_as_json_alone(cli):
    limited = cli("limit", "told", "--allowed", "5", "--interval", "2", "--json")
    scaled = cli("scale", "told", "--max-runs", "7", "--json")
    assert json.loads(limited.stdout) == {"key": "told", "rate_limit": {"allowed_messages": 5, "interval_s": 2.0}}
    assert json.loads(scaled.stdout) == {"key": "told", "overrides": {"max_runs": 7}}
    assert json.loads(cli("limit", "told", "--reset", "--json").stdout) == {"key": "told", "rate_limit": None}
    repaired = {"unreadable": [], "is_removed": False, "recorded_failures": 0}
    assert json.loads(cli("repair", "told", "--json").stdout) == repaired


@pytest.mark.filterwarnings("error::UserWarning")
def test_show_names_functions_and_what_the_class_itself_says(beside):
    cli = beside(Talkative, Lettered, queue=Memory())
    talkative, lettered = cli("show", "talkative").stdout, cli("show", "lettered").stdout
    assert "batch_size Splitter(initial 0, step by_three)" in talkative
    assert ", retry Retry(max_attempts 1, backoff Backoff(" in lettered
    assert ", dead_letters letters" in lettered
    assert "retry" not in talkative, "an option with its default is not shown"


def test_show_names_the_functions_of_telemetry(beside):
    class Heard(Told):
        name = "heard"
        telemetry: ClassVar = {"batch": print, "decide": print}

    cli = beside(Heard, queue=Memory())
    assert ", telemetry (batch print, decide print), owners " in cli("show", "heard").stdout
    assert json.loads(cli("show", "heard", "--json").stdout)["pipelines"]["heard"]["options"]["telemetry"] == {
        "batch": "print",
        "decide": "print",
    }


def test_show_as_json_contains_each_option_of_the_class_except_the_context(cli):
    shown = json.loads(cli("show", "told", "--json").stdout)["pipelines"]["told"]
    shown |= shown.pop("options")
    assert set(Pipeline.__annotations__) - set(shown) == {"name", "producer", "context"}


def test_show_tells_what_is_changed_and_of_which_producer(cli, control):
    control.override(Coasts, Overrides(max_runs=7), "east")
    control.override(Coasts, Overrides(max_demand=20))
    control.set_rate_limiting("coasts/west", RateLimiting(allowed_messages=5, interval=timedelta(seconds=2)))
    control.pause("coasts/west", "moves")
    said = [line.strip() for line in cli("show").stdout.splitlines()]
    east, west = said.index("coasts") + 1, said.index("rate limit: 5 messages every 2 s, set at run time")
    assert said[east].startswith("producer east: queue (Memory), concurrency 2, max_runs 7, ")
    assert said[east + 1] == "set at run time: max_runs 7"
    assert said[west + 1] == "paused: moves"
    assert "set at run time: max_demand 20" in said
    assert "told" in said, "all pipelines of the deployment"


def test_scale_changes_options_says_what_is_changed_and_takes_it_back(cli, control):
    assert cli("scale", "told").stdout.endswith("Overrides of told: none.\n")
    cli("scale", "told", "--max-runs", "4")
    said = cli("scale", "told", "--concurrency", "3", "--max-demand", "1000").stdout
    assert said.endswith("Overrides of told: concurrency 3, max_demand 1,000, max_runs 4.\n")
    assert control.processors_of(Told).per_run == 3_000
    assert "set at run time" in cli("status", "told").stdout
    cli("scale", "told", "--reset")
    assert control.overrides("told") == Overrides()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["told", "--max-runs", "0"], "Overrides.max_runs: must be an int from 1 to 1,000, got 0"),
        (["told", "--reset", "--max-runs", "2"], "--reset cannot be combined with other options."),
        (["coasts", "--max-runs", "2"], "max_runs applies to a single producer. Name one of east, west"),
        (["coasts", "--producer", "north", "--max-runs", "2"], "has no producer 'north'"),
    ],
)
def test_scale_refuses_what_cannot_hold(cli, arguments, said):
    answer = cli("scale", *arguments)
    assert answer.exit_code == 2
    assert said in answer.stderr


def test_drain_waits_for_nothing_where_nothing_is_under_way(cli, control):
    said = cli("drain", "told", "--reason", "moves").stdout.splitlines()
    assert said[-1] == "told is drained and paused: moves"
    assert (control.paused("told"), control.draining("told")) == ("moves", None)
    printed = json.loads(cli("drain", "told", "--json").stdout)
    assert printed == {"key": "told", "state": "paused", "reason": "moves", "active_runs": 0, "crashed_runs": 0}


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_drain_that_somebody_cancels_fails_and_counts_the_active_runs(cli, control, monkeypatch, arguments):
    control.stand_by("told", "run", 600)
    control.claim("told", "r1", "run", wanted=5, capacity=10, lease_s=600)
    monkeypatch.setattr(control, "draining", lambda _: None)  # as after a resume
    answer = cli("drain", "told", *arguments)
    assert answer.exit_code == 1
    assert "5 messages in 1 run still active" in str(answer.exception)
    if arguments:
        assert json.loads(answer.stdout)["active_runs"] == 1


def test_status_tells_since_when_no_message_begins(cli, control):
    control.drain("told", "moves", timedelta(seconds=30))
    assert f"paused: moves; draining: runs start no messages after {control.draining('told'):%H:%M:%S} UTC" in (
        cli("status", "told").stdout
    )


def test_a_reason_steers_no_terminal_and_forges_no_line(cli, control):
    cli("pause", "told", "--reason", "\x1b[31mred\nERROR forged")

    assert control.paused("told") == r"\x1b[31mred\nERROR forged"
    shown = cli("status", "told").stdout + cli("show", "told").stdout + cli("resume", "told").stdout
    assert "\x1b" not in shown
    assert r"paused: \x1b[31mred\nERROR forged" in shown


def test_status_shows_no_control_characters(cli, control):
    control.pause("told", "old")
    with control.writing() as connection:
        connection.exec_driver_sql("UPDATE control_pipelines SET paused = 'a\x1b[2Jb'")
    assert r"a\x1b[2Jb" in cli("status", "told").stdout


@pytest.mark.parametrize("argument", ["caf\udce9", "\udcff"])
def test_an_argument_that_is_not_utf_8_is_refused_in_one_line(monkeypatch, capsys, argument):
    monkeypatch.setattr("sys.argv", ["pipeline-platform", "pause", "told", "--reason", argument])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{argument!r}: an argument must be valid UTF-8.")
