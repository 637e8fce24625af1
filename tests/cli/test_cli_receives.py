"""`receives`, and the JSON output of commands."""

import json

import pytest
from typer.testing import CliRunner

from pipeline_platform.cli.main import app
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from tests.fixtures.small_lake import Keeping, Memory, Run


@pytest.fixture
def runs(tmp_path, control, beside):
    """A handled receive with a claim, an expired one, and a receive whose run has recorded nothing."""
    tables = Tables(Lake(root=str(tmp_path / "lake")), Keeping)
    for receive_id, lease_s in (("held", 60), ("left", -9), ("begun", 60)):
        control.claim("keeping", receive_id, f"run of {receive_id}", wanted=7, capacity=100, lease_s=lease_s)
    control.stand_by("keeping", "run of held", 60)
    Run(tables, Memory(deliveries_=(("1", b"one"),)), "held").work()
    Run(tables, Memory(), "left")
    Run(tables, Memory(deliveries_=(("2", b"two"),)), "unclaimed").work().decide()
    return beside(Keeping, memory=Memory())


def test_receives_tell_run_next_step_messages_and_lease(runs):
    found = {row["receive_id"]: row for row in json.loads(runs("receives", "--json").stdout)["receives"]}
    assert {receive: (row["run_id"], row["step"], row["messages"]) for receive, row in found.items()} == {
        "held": ("run of held", "decide", 7),
        "left": ("run of left", "receive", 7),
        "begun": ("run of begun", "receive", 7),
        "unclaimed": ("run", "publish", 1),
    }
    assert 55 <= found["held"]["lease_s"] <= 60
    assert found["left"]["lease_s"] <= -9
    assert found["unclaimed"]["lease_s"] is None
    assert all(row["age_s"] >= 0 for row in found.values())
    shown = runs("receives", "keeping").stdout
    assert "run of held" in shown
    assert shown.endswith("4 unfinished receives.\n")


def test_in_80_columns_ids_and_errors_are_whole(runs, control, tmp_path):
    control.claim("keeping", "Q" * 32, "Z" * 36, wanted=7, capacity=100, lease_s=60)
    Lake(root=str(tmp_path / "lake")).write(f"keeping/_receives/{'X' * 32}/receive.json", b"{")
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["receives"]).stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert [shown.count(letter) for letter in "QZX"] == [32, 36, 64], "X: the id, and the path in its error"
