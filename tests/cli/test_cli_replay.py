"""`pipeline-platform replay` and `--since`: the runs that are planned, launched and followed."""

import json
from datetime import UTC, datetime

import pytest

from pipeline_platform.cli.runs import replay_command
from pipeline_platform.cli.time_range import windows_between
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from tests.fixtures.failures import LATER, event, record
from tests.fixtures.small_lake import WINDOW, Keeping, Memory, Run

FAR = "2026-01-02T0000"


@pytest.fixture
def cli(beside, tmp_path, monkeypatch):
    call = beside(Keeping, memory=Memory())
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    return call


@pytest.fixture
def tables(tmp_path):
    """Three windows with messages: two contiguous, one a day later."""
    tables = Tables(Lake(root=str(tmp_path / "lake")), Keeping)
    Run(tables, Memory(deliveries_=(("a", b"a"), ("b", b"b"), ("c", b"fail"))), "r1").finish()
    Run(tables, Memory(deliveries_=(("d", b"d"),)), "r2", windows=(LATER,)).finish()
    Run(tables, Memory(deliveries_=(("e", b"e"),)), "r3", windows=(FAR,)).finish()
    return tables


def test_each_contiguous_range_of_windows_is_one_run(cli, tables, launched):
    answer = cli("replay", "keeping", "--since", "2026-01-01", "--until", "2026-01-03")
    assert answer.exit_code == 0, answer.output
    assert answer.stdout.splitlines() == [
        f"run run-1 replays 4 messages of {WINDOW} to {LATER}",
        f"run run-2 replays 1 message of {FAR}",
        "5 messages in 2 runs.",
    ]
    (job, config, first), (_, _, second) = launched
    assert (job, config) == ("keeping_replay", {"origin": "messages"})
    assert first["dagster/asset_partition_range_start"] == WINDOW
    assert first["dagster/asset_partition_range_end"] == LATER
    assert first["keeping/demand"] == "4"
    assert second["dagster/partition"] == FAR


def test_dry_run_prints_messages_and_replaced_rows_and_launches_nothing(cli, tables, launched, monkeypatch):
    monkeypatch.delenv("DAGSTER_HOME")
    answer = cli("replay", "keeping", "--window", WINDOW, "--window", LATER, "--dry-run")
    assert answer.exit_code == 0, answer.output
    assert answer.stdout.splitlines() == [
        f"window {WINDOW}: 3 messages; replaces 2 rows of kept, 1 open failure",
        f"window {LATER}: 1 message; replaces 1 row of kept",
        f"would launch keeping_replay: replays 4 messages of {WINDOW} to {LATER}",
        "Dry run: launched none of 1 run.",
    ]
    assert launched == []


def test_dry_run_reports_messages_that_retention_has_removed(cli, tables):
    with tables["messages"].look() as handle:
        handle.delete(f"window = '{WINDOW}'")
    said = cli("replay", "keeping", "--window", WINDOW, "--dry-run").stdout
    assert "The raw log lacks 3 messages" in said


def test_messages_are_counted_in_buckets_of_bounded_size(cli, tables, monkeypatch):
    monkeypatch.setattr("pipeline_platform.lake.replay.BUCKET_ROWS", 1)
    counts = replay_command.decided_messages(tables, [WINDOW, LATER, FAR])
    assert counts == {WINDOW: 3, LATER: 1, FAR: 1}


def test_a_message_that_failed_and_was_retried_counts_once(cli, tables):
    Run(tables, Memory(deliveries_=(("c", b"fail"),)), "r4", base=0).finish()
    assert replay_command.decided_messages(tables, [WINDOW]) == {WINDOW: 3}


@pytest.mark.parametrize(
    "options", [["--window", "2026-01-05T0000"], ["--since", "2026-01-04", "--until", "2026-01-05"]]
)
def test_windows_without_messages_launch_nothing(cli, tables, launched, options):
    answer = cli("replay", "keeping", *options)
    assert (answer.exit_code, launched) == (0, [])
    assert "nothing launched" in answer.stdout


def test_a_new_lake_has_nothing_to_replay(cli, launched):
    assert "nothing launched" in cli("replay", "keeping", "--window", WINDOW).stdout


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "either --window or --since"),
        (["--window", WINDOW, "--since", "2h"], "either --window or --since"),
        (["--until", "2h"], "--until needs --since"),
        (["--window", "2026-01-01T0030"], "not a window of keeping"),
        (["--window", "yesterday"], "not a window of keeping"),
        (["--since", "yesterday"], "'yesterday' is not a valid time"),
        (["--since", "2h", "--until", "3h"], "must be before the end of the range"),
        (["--since", "2020-01-01", "--until", "2020-02-01"], "no window of keeping overlaps"),
    ],
)
def test_invalid_choices_of_windows_are_rejected(cli, tables, launched, options, reason):
    answer = cli("replay", "keeping", *options)
    assert (answer.exit_code, launched) == (2, [])
    assert reason in answer.stderr


def test_a_paused_pipeline_is_replayed_only_with_ignore_pause(cli, tables, control, launched):
    control.pause("keeping", "moves")
    refused = cli("replay", "keeping", "--window", WINDOW)
    assert (str(refused.exception), launched) == (
        "keeping is paused: moves. Resume the pipeline, or add --ignore-pause.",
        [],
    )
    assert cli("replay", "keeping", "--window", WINDOW, "--ignore-pause").exit_code == 0
    assert launched[0][1] == {"origin": "messages", "ignore_pause": True}


@pytest.mark.parametrize(("succeeds", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_is_the_result_of_the_runs_that_are_waited_for(
    cli, tables, launched, monkeypatch, succeeds, code
):
    followed: list[list[str]] = []

    def follow(pipeline, run_ids, *, err):
        followed.append(run_ids)
        return dict.fromkeys(run_ids, "success" if succeeds else "failure")

    monkeypatch.setattr("pipeline_platform.cli.runs.planned_runs.follow", follow)
    answer = cli("replay", "keeping", "--since", "2026-01-01", "--until", "2026-01-03", "--wait", "--json")
    assert (answer.exit_code, followed) == (code, [["run-1", "run-2"]])
    printed = json.loads(answer.stdout)
    assert printed["job"] == "keeping_replay"
    status = "success" if succeeds else "failure"
    assert [(run["run_id"], run["status"]) for run in printed["runs"]] == [("run-1", status), ("run-2", status)]


def test_failures_are_chosen_by_a_range_of_time(cli, tmp_path, launched):
    lake = Lake(root=str(tmp_path / "lake"))
    record(lake, "r8", event("a"))
    record(lake, "r9", event("far"), window=FAR)
    range_ = ("--since", "2026-01-01T23:30", "--until", "2026-01-02T00:01")

    assert "1 failure is open" in cli("failures", "list", "keeping", *range_).stdout
    planned = cli("failures", "retry", "keeping", *range_, "--dry-run")
    assert planned.stdout.splitlines()[0] == f"would launch keeping_retry: retries 1 failure of {FAR}"
    assert launched == []
    assert cli("failures", "retry", "keeping", *range_).exit_code == 0
    assert [tags["dagster/partition"] for _, _, tags in launched] == [FAR]
    assert cli("failures", "close", "keeping", *range_, "--why", "test").stdout == "Closed 1 failure.\n"
    assert cli("failures", "retry", "keeping", "--window", WINDOW, *range_).exit_code == 2


@pytest.mark.parametrize(
    ("since", "until", "first", "last"),
    [
        ("2h", None, "2026-01-02T0100", "2026-01-02T0300"),
        ("2026-01-02T01:00", "2026-01-02T02:00", "2026-01-02T0100", "2026-01-02T0100"),
        ("2026-01-02T01:59", "2026-01-02T02:01+00:00", "2026-01-02T0100", "2026-01-02T0200"),
        ("2026-01-02T02:59+01:00", "2026-01-02T03:00+01:00", "2026-01-02T0100", "2026-01-02T0100"),
        ("2026-01-02T0100", "80m", "2026-01-02T0100", "2026-01-02T0200"),
        ("1w", "1d", "2026-01-01T0000", "2026-01-01T0300"),
    ],
)
def test_windows_belong_to_a_range_of_time_that_they_overlap(since, until, first, last):
    now = datetime(2026, 1, 2, 3, 30, tzinfo=UTC)
    windows = windows_between(Keeping, since, until, now) or []
    assert (windows[0], windows[-1]) == (first, last)
