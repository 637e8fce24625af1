"""`pipeline-platform pull`: what one run from the source would lease, and its launch."""

import json
from datetime import UTC, datetime

import pytest

from pipeline_platform import Breaker
from pipeline_platform.cli.loading import SetUpError
from pipeline_platform.orchestration.asset_windows import window_now
from tests.fixtures.pipelines_under_test import Coasts, Told
from tests.fixtures.small_lake import Memory, numbered


@pytest.fixture
def cli(beside, tmp_path, monkeypatch):
    call = beside(
        Coasts, Told, queue=Memory(deliveries_=numbered(b"a", b"b")), beside_queue=Memory(deliveries_=numbered(b"c"))
    )
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "none"))
    return call


def test_one_run_is_launched_into_the_current_window(cli, launched):
    answer = cli("pull", "told", "--demand", "30")
    assert answer.exit_code == 0, answer.output
    window = window_now(Told, datetime.now(UTC))
    assert answer.stdout.splitlines()[1:] == [
        f"run run-1 pulls up to 30 messages from queue into window {window}",
        "30 messages in 1 run.",
    ]
    ((job, config, tags),) = launched
    assert (job, config) == ("told_pull", {"origin": "source", "demand": 30})
    assert tags["dagster/partition"] == window
    assert tags["told/demand"] == "30"


def test_dry_run_prints_backlog_capacity_and_demand_and_launches_nothing(cli, control, launched):
    control.claim("told", "r1", "run", wanted=30, capacity=200, lease_s=60)
    said = cli("pull", "told", "--dry-run").stdout.splitlines()[1:]
    assert said[:3] == [
        "backlog: 2 messages",
        "capacity: 200 messages, 30 in flight, 170 free",
        "demand: 100 messages, at most 100 in a run",
    ]
    assert said[3].startswith("would launch told_pull: pulls up to 100 messages from queue into window ")
    printed = json.loads(cli("pull", "told", "--dry-run", "--json").stdout)
    (run,) = printed["runs"]
    assert (printed["job"], run["run_id"], run["messages"], run["status"]) == ("told_pull", None, 100, None)
    assert launched == []


def test_a_demand_beyond_the_free_capacity_is_reduced(cli, control, launched):
    control.claim("told", "r1", "run", wanted=190, capacity=200, lease_s=60)
    assert "pulls up to 10 messages" in cli("pull", "told", "--demand", "1000").stdout


def test_without_free_capacity_the_reason_is_a_warning(cli, control, launched):
    control.claim("told", "r1", "run", wanted=200, capacity=200, lease_s=60)
    answer = cli("pull", "told")
    assert "capacity of 200" in answer.stderr
    assert len(launched) == 1


@pytest.mark.parametrize(("options", "producer"), [([], "east"), (["--producer", "west"], "west")])
def test_without_a_producer_the_largest_backlog_is_pulled(cli, launched, options, producer):
    assert cli("pull", "coasts", *options).exit_code == 0
    ((_, config, tags),) = launched
    assert config["producer"] == tags["coasts/producer"] == producer


def test_an_unknown_producer_is_rejected(cli, launched):
    assert cli("pull", "coasts", "--producer", "north").exit_code == 2
    assert launched == []


def test_a_paused_pipeline_is_pulled_only_with_ignore_pause(cli, control, launched):
    control.pause("told", "moves")
    assert "told is paused: moves" in str(cli("pull", "told").exception)
    assert launched == []
    assert cli("pull", "told", "--ignore-pause").exit_code == 0
    assert launched[0][1]["ignore_pause"] is True


def test_a_producer_whose_breaker_pauses_it_is_pulled_only_with_ignore_pause(cli, control, launched, monkeypatch):
    breaker = Breaker(of_last=10)
    monkeypatch.setattr(Told, "producer", Told.producer.model_copy(update={"breaker": breaker}))
    control.judge("told", breaker, 40, 30)
    assert isinstance(cli("pull", "told").exception, SetUpError)
    assert launched == []
    assert cli("pull", "told", "--ignore-pause").exit_code == 0
    assert launched[0][1]["ignore_pause"] is True


def test_a_draining_pipeline_is_not_pulled(cli, control, launched):
    control.drain("told", "moves", Told.shutdown * 100)
    assert "told is draining: moves" in str(cli("pull", "told", "--ignore-pause").exception)
    assert launched == []
