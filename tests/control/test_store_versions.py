"""Control stores of other releases: earlier versions are migrated, later versions are refused."""

from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta

import pytest
import sqlalchemy as sa

from pipeline_platform.control import store as store_module
from pipeline_platform.control.database import Database
from pipeline_platform.control.store import ControlStore, ControlStoreError
from pipeline_platform.model.options import RateLimiting
from tests.fixtures.processes import PROCESSES

FIRST_RELEASE = """
CREATE TABLE control_pipelines (
    pipeline TEXT NOT NULL, paused TEXT, allowed_messages BIGINT, interval_us BIGINT, PRIMARY KEY (pipeline));
CREATE TABLE control_intervals (
    pipeline TEXT NOT NULL, interval_us BIGINT NOT NULL, starts_at BIGINT NOT NULL, used BIGINT NOT NULL,
    PRIMARY KEY (pipeline, interval_us, starts_at));
CREATE TABLE control_receives (
    receive_id TEXT NOT NULL, pipeline TEXT NOT NULL, run_id TEXT NOT NULL, messages BIGINT NOT NULL,
    capacity BIGINT NOT NULL, started_at BIGINT NOT NULL, expires_at BIGINT NOT NULL, PRIMARY KEY (receive_id));
CREATE INDEX ix_control_receives_pipeline ON control_receives (pipeline);
INSERT INTO control_pipelines VALUES ('flights', 'the lake is full', 10, 86400000000), ('trains', NULL, NULL, NULL);
INSERT INTO control_intervals VALUES ('flights', 86400000000, 4102358400000000, 7);
INSERT INTO control_receives VALUES ('a', 'flights', 'run', 60, 100, 1767225600000000, 4102444800000000)
"""
"""Statements of the release without a version. Its interval and its claim end in 2099."""

STEPS = list(store_module.STEPS)
NEWEST = len(STEPS) + 1
IN_2099 = 4_102_358_400.0 + 3_600
DAY = RateLimiting(allowed_messages=10, interval=timedelta(days=1))


def in_2099() -> float:
    return IN_2099


def run(url: str, *statements: str) -> None:
    with Database(url, "a test", ControlStoreError).writing() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def look(url: str) -> tuple[object, ...]:
    """Return a run's view of the store and its permits, from a separate process."""
    store = ControlStore(url, now=in_2099)
    taken = store.take({"flights": None}, 2).messages
    granted = store.claim("flights", f"new {taken}", "another", wanted=30, capacity=100, lease_s=60)
    return store.paused("flights"), store.rate_limiting("flights", None), taken, granted, store.beat("a", 60)


def add_host(connection: sa.Connection) -> None:
    connection.exec_driver_sql("ALTER TABLE control_receives ADD COLUMN host TEXT")
    connection.exec_driver_sql("UPDATE control_receives SET host = 'unknown'")


def version(url: str) -> list[tuple[int, ...]]:
    with Database(url, "a test", ControlStoreError).reading() as connection:
        return [tuple(row) for row in connection.exec_driver_sql("SELECT version FROM control_version")]


def test_two_processes_at_once_open_a_live_store_of_the_first_release(control_url):
    run(control_url, *FIRST_RELEASE.split(";"))
    with ProcessPoolExecutor(2, mp_context=PROCESSES) as pool:
        seen = list(pool.map(look, [control_url] * 2))
    assert [(paused, limit, alive) for paused, limit, _, _, alive in seen] == [("the lake is full", DAY, True)] * 2
    assert sum(taken for _, _, taken, _, _ in seen) == 3, "of ten a day, seven were taken"  # type: ignore[misc]
    assert sum(granted for _, _, _, granted, _ in seen) == 40, "of a hundred in flight, sixty are"  # type: ignore[misc]
    assert version(control_url) == [(NEWEST,)]


@pytest.mark.parametrize("steps_known", [1, 2])
def test_steps_run_once_and_in_order(control_url, monkeypatch, steps_known):
    run(control_url, *FIRST_RELEASE.split(";"))
    ran: list[int] = []
    steps = [lambda connection, nth=nth: ran.append(nth) for nth in range(2)]
    monkeypatch.setattr(store_module, "STEPS", [*STEPS, add_host, *steps][: len(STEPS) + steps_known])

    for _ in range(2):
        store = ControlStore(control_url, now=in_2099)
        assert [claim.receive_id for claim in store.in_flight("flights")] == ["a"]
        store.close()

    assert version(control_url) == [(NEWEST + steps_known,)]
    assert ran == list(range(steps_known - 1))
    monkeypatch.setattr(store_module, "STEPS", [*STEPS, add_host, *steps])
    assert ControlStore(control_url).paused("flights")
    assert ran == [0, 1]


def test_a_step_that_fails_leaves_the_store_as_it_was(control_url, monkeypatch):
    run(control_url, *FIRST_RELEASE.split(";"))
    broken = [*STEPS, add_host, lambda connection: connection.exec_driver_sql("ALTER TABLE nowhere ADD COLUMN x TEXT")]
    with monkeypatch.context() as newer:
        newer.setattr(store_module, "STEPS", broken)
        with pytest.raises(ControlStoreError, match="nowhere"):
            ControlStore(control_url).paused("flights")
    assert look(control_url)[0] == "the lake is full"
    assert version(control_url) == [(NEWEST,)]


def test_a_new_store_needs_no_step(control_url, monkeypatch):
    monkeypatch.setattr(store_module, "STEPS", [*STEPS, add_host])
    assert ControlStore(control_url).paused("flights") is None
    assert version(control_url) == [(NEWEST + 1,)]


def test_a_store_of_a_later_release_is_refused_with_the_way_out(control_url):
    ControlStore(control_url).pause("flights", "why")
    run(control_url, "UPDATE control_version SET version = 70")
    for _ in range(2):
        with pytest.raises(ControlStoreError) as refused:
            ControlStore(control_url).paused("flights")
    known = f"its tables have version 70, and this release supports versions up to {NEWEST}. Upgrade pipeline-platform"
    assert known in str(refused.value)
    assert "or use another store" in str(refused.value)
    run(control_url, f"UPDATE control_version SET version = {NEWEST}")
    assert ControlStore(control_url).paused("flights") == "why"
