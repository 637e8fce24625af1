"""`pipeline-platform failures`: list, show, retry, close and reopen failures."""

import json
from datetime import UTC, datetime
from uuid import uuid4

import pytest
from click.testing import Result
from typer.testing import CliRunner

from pipeline_platform import Processors, Producer
from pipeline_platform.cli import launch
from pipeline_platform.cli.loading import SetUpError
from pipeline_platform.cli.main import app
from pipeline_platform.cli.runs import planned_runs
from pipeline_platform.cli.runs.planned_runs import windows_text
from pipeline_platform.lake.storage import Lake
from tests.fixtures.failures import LATER, MINUTE, NOON, event, failures, record
from tests.fixtures.small_lake import WINDOW, Keeping, Memory


@pytest.fixture
def lake(tmp_path):
    lake = Lake(root=str(tmp_path / "lake"))
    record(
        lake, "r1", event("a", due_at=NOON), event("b", kind="KeyError", reason="'price'"), event("gone", data=b"\xff")
    )
    record(lake, "r2", event("gone", 2, "dead", data=b"\xff\x00", metadata='{"k": 1}', stage="handle_message"))
    record(lake, "r3", event("later"), event("done"), event("done", 2, "closed"), window=LATER)
    return lake


@pytest.fixture
def cli(lake, beside, tmp_path, monkeypatch):
    call = beside(Keeping, memory=Memory())
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    return lambda *arguments: call("failures", *arguments)


def listed(answer: Result) -> list[tuple[str, int, str]]:
    assert answer.exit_code == 0, answer.output
    groups = json.loads(answer.stdout)["causes"]
    return [(group["state"], group["messages"], group["example"]) for group in groups]


def test_failures_are_listed_by_cause_the_most_frequent_first(cli, lake):
    record(lake, "r4", *(event(f"z{n}", reason=f"no price: {n}", at=NOON + n * MINUTE) for n in range(2, 5)))
    said = cli("list", "keeping").stdout.splitlines()
    assert said[:4] == [
        "        4  ValueError: no price: *",
        "           waiting; 2026-01-01 12:00 to 12:04; id z2",
        "        1  ValueError: no price: 7",
        "           dead; 2026-01-01 12:00; id gone",
    ]
    assert said[-1] == "7 failures are open."


@pytest.mark.parametrize("command", [["list", "keeping"], ["show", "keeping", "a"], ["retry", "keeping"]])
def test_what_is_no_window_is_refused(cli, command):
    for bogus in ("bogus", "2026-01-01", "2026-1-01T0000"):
        refused = cli(*command, "--window", bogus)
        assert refused.exit_code == 2
        assert f"{bogus!r} is not the key of a window" in refused.stderr
    with pytest.raises(ValueError, match="'bogus' is not the key of a window"):
        launch.retry_failures("keeping", windows=["bogus"])


def test_in_80_columns_reasons_and_ids_are_whole(cli, lake):
    ids = ["b2TgZguRTuqz3sv8Y8QfCg:0:17", "1f0e2a9c-0b0f-4c57-9d0f-5b0f0c1f7f11"]
    reasons = ["no answer from the bank " * 9, "closed " * 9]
    for number, (message_id, reason) in enumerate(zip(ids, reasons, strict=True)):
        failed = event(message_id, kind="TimeoutError", reason=reason, due_at=datetime(2030, 1, 1, tzinfo=UTC))
        record(lake, f"long{number}", failed, {**failed, "message_id": f"{message_id}z", "at": NOON - 90 * MINUTE * 24})
    said = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["failures", "list", "keeping"]).stdout
    assert set(ids) <= set(said.split())
    assert all(" ".join(f"2  TimeoutError: {reason}".split()) in " ".join(said.split()) for reason in reasons)
    assert max(map(len, said.splitlines())) <= 80


def test_failures_are_listed_by_criteria_for_programs(cli):
    for options, expected in (
        ([], {"a": "due", "b": "waiting", "gone": "dead", "later": "waiting"}),
        (["--state", "waiting"], {"a": "due", "b": "waiting", "later": "waiting"}),
        (["--state", "due"], {"a": "due"}),
        (["--state", "dead"], {"gone": "dead"}),
        (["--state", "closed"], {"done": "closed"}),
        (["--kind", "KeyError"], {"b": "waiting"}),
        (["--reason", "no price"], {"a": "due", "gone": "dead", "later": "waiting"}),
        (["--cause", "no price: *"], {"a": "due", "gone": "dead", "later": "waiting"}),
        (["--cause", "no price: 8", "--state", "dead"], {"gone": "dead"}),
        (["--window", LATER], {"later": "waiting"}),
        (["--window", LATER, "--window", WINDOW, "--state", "dead"], {"gone": "dead"}),
        (["--window", "2030-01-01T0000"], {}),
    ):
        groups = listed(cli("list", "keeping", "--json", *options))
        assert {message_id: state for state, _, message_id in groups} == expected, options


def test_what_a_list_leaves_out_is_said(cli):
    said = cli("list", "keeping", "--limit", "1").stdout
    assert "3 failures with other causes not shown" in said


def test_a_message_is_shown_with_all_that_became_of_it(cli):
    said = cli("show", "keeping", "gone").stdout
    assert said.splitlines()[0] == f"Message gone of memory, window {WINDOW}: dead"
    assert "attempt 1: open" in said
    assert "attempt 2: dead in handle_message, ValueError: no price: 7; receive r2" in said
    assert 'Metadata: {"k": 1}' in said
    assert "Payload (2 bytes), as hex:\nff00" in said


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"", "Payload (0 bytes), as text:\n\n"),
        (b"a\x1b[2J\nb", "as text:\na\\x1b[2J\nb\n"),
        ("é".encode() * 4_000, f"Payload (8,000 bytes, first 4,000 bytes), as text:\n{'é' * 2_000}\n"),
        (b"x" + "é".encode() * 4_000, f"as text:\nx{'é' * 1_999}\n"),
        (b"\xff" * 4_001, f"Payload (4,001 bytes, first 4,000 bytes), as hex:\n{'ff' * 4_000}\n"),
    ],
)
def test_a_payload_is_bounded_and_cannot_steer_a_terminal(cli, lake, data, shown):
    record(lake, "r9", event("odd", data=data))
    assert shown in cli("show", "keeping", "odd").stdout


def test_ids_and_reasons_forge_no_line(cli, lake):
    record(lake, "r9", event("odd\nhealthy", reason="no\n0 failures are open.", metadata='{"k": 1}\nMetadata: none'))
    for command in (["list", "keeping"], ["show", "keeping", "odd\nhealthy"]):
        lines = cli(*command).stdout.splitlines()
        assert not {"healthy", "0 failures are open.", "Metadata: none"} & {line.strip() for line in lines}


def test_a_message_is_shown_to_programs(cli):
    events = json.loads(cli("show", "keeping", "gone", "--json").stdout)["events"]
    assert [(shown["attempt"], shown["state"], shown["data"]) for shown in events] == [
        (1, "open", {"bytes": 1, "text": None, "hex": "ff"}),
        (2, "dead", {"bytes": 2, "text": None, "hex": "ff00"}),
    ]


def test_a_failure_that_a_retry_closed_has_a_cause_in_the_list(cli, lake):
    record(lake, "r10", {**event("done", 2, "closed"), "kind": None, "reason": None}, window=LATER)
    assert cli("list", "keeping", "--state", "closed").stdout.split("\n")[0].strip() == "1  a later attempt succeeded"


def test_a_message_that_has_not_failed_is_not_there(cli):
    answer = cli("show", "keeping", "nobody")
    assert answer.exit_code == 2
    assert "keeping has no failure of message 'nobody'" in answer.output


def test_failures_are_driven_by_criteria_that_travel_in_the_run_config(cli, launched):
    for options, selection, messages in (
        (["--id", "gone"], {"message_id": "gone"}, [1]),
        (["--kind", "KeyError"], {"kind": "KeyError"}, [1]),
        (["--reason", "no price"], {"reason": "no price"}, [3]),
        (["--cause", "no price: *"], {"cause": "no price: *"}, [3]),
        (["--state", "dead"], {"state": "dead"}, [1]),
        (["--state", "due"], {"state": "due"}, [1]),
        (["--window", LATER], {}, [1]),
        (["--all"], {}, [4]),
        (["--id", "done"], {}, []),
    ):
        launched.clear()
        answer = cli("retry", "keeping", *options)
        assert answer.exit_code == 0, answer.output
        assert [int(tags["keeping/demand"]) for _, _, tags in launched] == messages, options
        for job, config, tags in launched:
            assert job == "keeping_retry"
            assert config == {"origin": "failed", **({"failures": selection} if selection else {})}
            assert tags["keeping/origin"] == "failed"


def test_failures_of_a_paused_pipeline_are_retried_only_with_ignore_pause(cli, control, launched):
    control.pause("keeping", "moves")
    assert isinstance(cli("retry", "keeping", "--all").exception, SetUpError)
    with pytest.raises(SetUpError):
        launch.retry_failures("keeping")
    assert launched == []
    assert cli("retry", "keeping", "--all", "--ignore-pause").exit_code == 0
    launch.retry_failures("keeping", ignore_pause=True)
    assert [config for _, config, _ in launched] == [{"origin": "failed", "ignore_pause": True}] * 2


def test_failures_of_a_draining_pipeline_are_not_retried(cli, control, launched):
    control.drain("keeping", "moves", Keeping.shutdown * 100)
    assert isinstance(cli("retry", "keeping", "--all", "--ignore-pause").exception, SetUpError)
    assert launched == []


def test_each_range_of_windows_is_a_run_of_its_own(cli, lake, launched):
    record(lake, "r9", event("far"), window="2026-01-02T0000")
    said = cli("retry", "keeping", "--all").stdout.splitlines()
    assert said == [
        f"run run-1 retries 4 failures of {WINDOW} to {LATER}",
        "run run-2 retries 1 failure of 2026-01-02T0000",
        "5 failures in 2 runs.",
    ]
    (_, _, first), (_, _, second) = launched
    assert first["dagster/asset_partition_range_end"] == LATER
    assert second["dagster/partition"] == "2026-01-02T0000"


@pytest.mark.parametrize("options", [[], ["--all", "--kind", "KeyError"]])
def test_which_failures_has_to_be_said(cli, launched, options):
    answer = cli("retry", "keeping", *options)
    assert (answer.exit_code, launched) == (2, [])
    assert "Choose failures by --id" in answer.output


def test_status_counts_dead_failures_apart(cli):
    said = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["status", "keeping"]).stdout.splitlines()
    (every,) = [line.split(maxsplit=2)[2] for line in said if line.startswith(" open failures")]
    assert every.strip() == "4, 1 of them dead"


def test_without_an_instance_nothing_is_launched(cli, monkeypatch):
    monkeypatch.delenv("DAGSTER_HOME")
    assert "DAGSTER_HOME is not set" in str(cli("retry", "keeping", "--all").exception)


def test_python_does_the_same(cli, launched):
    (run,) = launch.retry_failures("keeping", kind="KeyError", windows=[WINDOW])
    assert run == launch.Launched("run-1", [WINDOW], 1)
    assert launched[0][1]["failures"] == {"kind": "KeyError"}
    assert launch.retry_failures("keeping", message_id="nobody") == []


def test_of_an_id_that_several_sources_have_the_source_has_to_be_said(cli, lake, launched):
    record(lake, "r9", {**event("a"), "source": "other"}, {**event("gone", 3, "closed"), "source": "other"})

    said = str(cli("retry", "keeping", "--id", "a").exception)
    assert "several sources have failures with the id 'a'. Choose a source: memory, other" in said
    assert launched == []

    assert "1 failure in 1 run." in cli("retry", "keeping", "--id", "a", "--source", "other").stdout
    assert "1 failure in 1 run." in cli("retry", "keeping", "--id", "gone").stdout, "what is closed is not driven"
    assert "1 failure in 1 run." in cli("retry", "keeping", "--source", "other").stdout
    assert "No matching failures" in cli("retry", "keeping", "--id", "a", "--source", "third").stdout
    assert [config["failures"] for _, config, _ in launched] == [
        {"message_id": "a", "source": "other"},
        {"message_id": "gone"},
        {"source": "other"},
    ]


def test_failures_are_closed_by_hand_and_opened_again(cli):
    before = listed(cli("list", "keeping", "--json"))
    assert cli("close", "keeping", "--id", "gone", "--why", "sold out", "--by", "ana").stdout == "Closed 1 failure.\n"

    assert [group for group in before if "gone" not in group] == listed(cli("list", "keeping", "--json"))
    shown = cli("show", "keeping", "gone").stdout
    assert "attempt 2: closed by hand by ana: sold out" in shown
    assert "gone" in str(listed(cli("list", "keeping", "--state", "closed", "--json")))

    assert cli("reopen", "keeping", "--id", "gone").stdout == "Reopened 1 failure.\n"
    (event,) = [e for e in json.loads(cli("show", "keeping", "gone", "--json").stdout)["events"] if e["attempt"] == 3]
    assert (event["state"], event["due_at"], event["metadata"], event["stage"]) == (
        "open",
        None,
        '{"k": 1}',
        "handle_message",
    )
    assert event["data"] == {"bytes": 2, "text": None, "hex": "ff00"}
    assert cli("reopen", "keeping", "--all").stdout == "Reopened 0 failures.\n", "each once; a retry's end stays"


def test_failures_are_closed_by_what_they_say(cli):
    assert (
        cli("close", "keeping", "--kind", "KeyError", "--reason", "pric", "--why", "x").stdout == "Closed 1 failure.\n"
    )
    assert cli("close", "keeping", "--all", "--why", "x").stdout == "Closed 3 failures.\n"
    assert listed(cli("list", "keeping", "--json")) == []
    assert cli("close", "keeping", "--why", "x").exit_code == 2, "none is chosen"
    assert cli("reopen", "keeping", "--kind", "KeyError").stdout == "Reopened 1 failure.\n"
    assert cli("reopen", "keeping", "--window", WINDOW).stdout == "Reopened 2 failures.\n"


def test_the_number_is_said_first_and_a_dry_run_changes_nothing(cli):
    options = ["keeping", "--cause", "no price: *"]
    assert cli("close", *options, "--why", "x", "--dry-run").stdout == "would close 3 failures.\n"
    closed = cli("close", *options, "--why", "x")
    assert (closed.stderr, closed.stdout) == ("Closing 3 failures.\n", "Closed 3 failures.\n")
    assert json.loads(cli("reopen", *options, "--dry-run", "--json").stdout) == {"failures": 3, "dry_run": True}
    assert cli("reopen", *options, "--dry-run").stdout == "would reopen 3 failures.\n"
    reopened = cli("reopen", *options)
    assert (reopened.stderr, reopened.stdout) == ("Reopening 3 failures.\n", "Reopened 3 failures.\n")


def close_some(lake: Lake, windows: list[str], most: int) -> int:
    """Close the oldest failures of some windows, as a run does that retries them; return their number."""
    failed = failures(lake, windows=tuple(windows))
    rows = [
        {**row, "state": "closed", "window": share.window}
        for share in failed.plan(most, 1, "r")
        for batch in failed.read(share, "r")
        for row in batch.to_pylist()
    ]
    for number, row in enumerate(rows):
        ended = event(row["message_id"], row["attempt"], "closed")
        record(lake, f"{uuid4().hex}-{number}", ended, window=row["window"])
    return len(rows)


class Small(Keeping):
    """A pipeline that may have three messages in flight, and two in a run."""

    name = "keeping"
    processors = Processors(concurrency=1, max_demand=2)
    producer = Producer(source="memory", max_runs=1)


@pytest.fixture
def small(beside, tmp_path, monkeypatch):
    call = beside(Small, memory=Memory())
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    return lambda *arguments: call("failures", *arguments)


@pytest.mark.parametrize("retried", [2, 0], ids=["retried", "paused"])
def test_one_command_retries_more_failures_than_a_run_may(small, lake, launched, monkeypatch, retried):
    def follow(pipeline: object, run_ids: list[str], *, err: bool) -> dict[str, str]:
        _, _, tags = launched[-1]
        ends = [tags.get(f"dagster/asset_partition_range_{end}") for end in ("start", "end")]
        windows = [WINDOW, LATER] if ends[0] else [tags["dagster/partition"]]
        close_some(lake, windows, retried)
        return dict.fromkeys(run_ids, "success")

    monkeypatch.setattr(planned_runs, "follow", follow)
    answer = small("retry", "keeping", "--all")

    if not retried:
        assert "retried no failures" in str(answer.exception)
        return
    assert answer.exit_code == 0, answer.output
    assert answer.stdout.splitlines() == [
        "4 failures to retry, up to 2 at once.",
        f"run run-1 retries 2 of 4 failures of {WINDOW} to {LATER}",
        "2 failures in 1 run.",
        "Retried 2 of 4 failures.",
        "run run-2 retries 2 failures of " + windows_text([WINDOW, LATER]),
        "2 failures in 1 run.",
        "Retried 4 of 4 failures.",
    ]
    first, second = (config for _, config, _ in launched)
    assert first == second
    assert first["demand"] == 2
    assert first["failures"].keys() == {"failed_before"}


def test_a_dry_run_says_how_many_runs_are_needed(small, lake, launched):
    said = small("retry", "keeping", "--all", "--dry-run").stdout.splitlines()
    assert said == [
        f"would launch keeping_retry: retries 4 failures of {WINDOW} to {LATER} in 2 runs",
        "Dry run: launched none of 2 runs.",
    ]
    runs = json.loads(small("retry", "keeping", "--all", "--dry-run", "--json").stdout)["runs"]
    assert [(run["windows"], run["messages"]) for run in runs] == [([WINDOW, LATER], 2)] * 2
    assert launched == []
