"""`pipeline-platform history`, and the commands that record acts."""

import json
import socket
from getpass import getuser

import pytest

from pipeline_platform.cli import history_command
from pipeline_platform.lake.storage import Lake
from tests.fixtures.failures import event, record
from tests.fixtures.pipelines_under_test import Coasts, Told
from tests.fixtures.small_lake import Keeping, Memory

ME = f"{getuser()}@{socket.gethostname()}"


@pytest.fixture
def cli(beside):
    return beside(Keeping, Told, Coasts, memory=Memory())


@pytest.mark.parametrize(
    ("command", "name", "reason", "options"),
    [
        (["pause", "told", "--reason", "moves"], "pause", "moves", {}),
        (["resume", "told", "--reason", "moved"], "resume", "moved", {}),
        (["drain", "told"], "drain", "drained on the command line", {}),
        (["limit", "told", "--allowed", "5", "--interval", "2"], "limit", "", {"allowed": 5, "interval": 2.0}),
        (["limit", "told", "--reset", "--reason", "over"], "limit", "over", {"reset": True}),
        (["scale", "told", "--max-runs", "3"], "scale", "", {"max_runs": 3}),
    ],
)
def test_a_change_of_limits_is_recorded_with_its_user_and_options(cli, control, command, name, reason, options):
    cli(*command)
    (act,) = control.acts()
    assert act[1:] == ("told", name, ME, reason, options)


@pytest.mark.parametrize("command", [["limit", "told"], ["scale", "told"], ["limit", "told", "--interval", "-1"]])
def test_a_command_that_changes_nothing_is_not_recorded(cli, control, command):
    cli(*command)
    assert control.acts() == []


def test_closed_and_reopened_failures_are_recorded_without_the_text_that_chose_them(cli, control, tmp_path):
    record(Lake(root=str(tmp_path / "lake")), "r1", event("a"), event("b", kind="KeyError"))
    cli("failures", "close", "keeping", "--reason", "price", "--why", "test orders", "--by", "anna")
    cli("failures", "reopen", "keeping", "--id", "a", "--why", "wrong")

    closed, reopened = control.acts()

    assert closed[2:] == (
        "failures close",
        f"anna@{socket.gethostname()}",
        "test orders",
        {"messages": 2, "state": "open", "by_reason": True},
    )
    assert reopened[2:] == ("failures reopen", ME, "wrong", {"message_id": "a", "state": "open", "messages": 1})


def test_acts_are_shown_in_80_columns_newest_last(cli, control):
    cli("pause", "told", "--reason", "moves to another cluster because of its disk " * 4)
    control.record_act(
        "coasts/east", "scale", "run 8c1f5b0e-4f0d-4ae4-b6d3-0d58ef0ea1a9 of anna@example.com", max_runs=9
    )
    control.record_act("told", "replay", ME, windows=["2026-01-01T0000", "2026-01-01T0100"])

    said = cli("history").stdout.splitlines()

    assert max(map(len, said)) <= 80
    assert next(line.split(": ")[1] for line in said if line.startswith("20")) == f"pause by {ME}"
    assert "  max_runs 9" in said
    assert said[-2:] == ["  windows 2026-01-01T0000 2026-01-01T0100", "3 acts."]


def test_acts_are_chosen_by_pipeline_and_time_and_printed_for_programs(cli, control):
    cli("pause", "told")
    cli("pause", "coasts", "--producer", "east")
    acts = json.loads(cli("history", "coasts", "--since", "1h", "--json").stdout)["acts"]
    assert [(act["key"], act["name"], act["who"]) for act in acts] == [("coasts/east", "pause", ME)]
    assert cli("history", "--since", "2030-01-01").stdout == "0 acts.\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["unknown"], "pipeline 'unknown' does not exist"),
        (["told", "--since", "soon"], "'soon' is not a valid time"),
    ],
)
def test_a_wrong_option_is_refused(cli, options, said):
    refused = cli("history", *options)
    assert refused.exit_code == 2
    assert said in refused.stderr


def test_a_removed_pipeline_keeps_its_acts(cli, control):
    control.record_act("gone", "pause", ME)
    assert "gone: pause by" in cli("history", "gone").stdout


def test_a_user_without_a_name_is_recorded_by_number(cli, control, monkeypatch):
    def unknown() -> str:
        raise OSError("no username set in the environment")

    monkeypatch.setattr(history_command, "getuser", unknown)
    monkeypatch.setattr(history_command.os, "getuid", lambda: 4711)
    cli("pause", "told")
    assert control.acts()[0].who == f"4711@{socket.gethostname()}"
