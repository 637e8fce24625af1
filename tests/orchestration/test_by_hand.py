"""Manual runs from asset pages, the command line or GraphQL: some assets only, some checks only."""

import sqlite3

import dagster as dg

from tests.fixtures.dagster import NEXT, WINDOW, figures
from tests.fixtures.jobs_under_test import assets_at

SUCCESS = dg.DagsterRunStatus.SUCCESS
TABLES = ("messages", "lines", "letters", "failed")


def test_failed_alone_retries_the_open_failures_of_its_windows_and_pulls_nothing(location):
    location.enqueue("fail 1", "one")
    location.run("told_pull", WINDOW)
    location.enqueue("fail 2")
    location.run("told_pull", NEXT)
    location.enqueue("two")

    run = location.by_hand("failed", windows=(WINDOW, NEXT), forgiving=True)

    assert run.status == SUCCESS
    assert location.open_failures() == {}
    assert location.texts() == ["fail 1", "fail 2", "one"]
    assert location.waiting() == 1
    for table in TABLES:
        windows = [event.partition for event in location.materialisations(run, table)]
        assert windows == [WINDOW, NEXT], f"{table} has changed too"
    assert figures(location.materialisations(run, "lines")[0])["rows"] == 1
    assert figures(location.materialisations(run, "failed")[0])["open"] == 0


def test_any_other_asset_alone_pulls(location):
    location.enqueue("a line")

    run = location.by_hand("lines")

    assert run.status == SUCCESS
    assert location.waiting() == 0
    assert {table for table in TABLES if location.materialisations(run, table)} == set(TABLES)
    assert location.texts() == ["a line"]


def test_a_refused_acknowledgement_is_shown_by_checks_executed_alone_and_repeated_by_the_next_run(location):
    location.enqueue("fail", "one")
    mood = location.root / "no ack"
    mood.touch()

    first = location.run("told_pull")

    check = location.checks(first)["acknowledged"]
    assert first.status == SUCCESS
    assert (check.passed, check.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert check.metadata["unacknowledged"].value == 2
    assert "told to refuse" in str(check.metadata["errors"].value)
    assert figures(location.materialisations(first, "messages")[0])["unacknowledged"] == 2

    location.enqueue("two")
    named = (("messages", "acknowledged"), ("failed", "open_failures"))
    keys = [dg.AssetCheckKey(dg.AssetKey(["told", asset]), name) for asset, name in named]
    job = assets_at(str(location.root), str(location.spark_folder))

    alone = job.get_subset(asset_selection=set(), asset_check_selection=set(keys))
    result = alone.execute_in_process(instance=location.instance)

    found = location.checks(location.stored(result.run_id))
    assert location.waiting() == 1
    assert {name: check.passed for name, check in found.items()} == {"acknowledged": False, "open_failures": False}
    assert "1 decided receive is not acknowledged" in found["acknowledged"].description
    assert "1 open failure in window" in found["open_failures"].description

    mood.unlink()
    assert location.checks(location.run("told_pull"))["acknowledged"].passed
    assert location.texts() == ["one", "two"], "once, although an acknowledgement was refused"
    with sqlite3.connect(location.root / "queue.sqlite") as database:
        assert database.execute("SELECT count(*) FROM messages").fetchone() == (0,)
