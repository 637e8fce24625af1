"""The latest rows under a real daemon and over a real Kafka, while runs are killed."""

import os
import signal
from pathlib import Path

import polars as pl
import pytest
from deltalake.exceptions import TableNotFoundError

from tests.deployment.test_daemon import deployment
from tests.fixtures.source_of_truth import Customers, send

pytestmark = pytest.mark.faults


def test_the_latest_rows_are_those_of_the_database_although_runs_are_killed(
    tmp_path, kafka_server, kafka_topic, monkeypatch
):
    """Kill a run of the pipeline before it acknowledges, and a run of the asset between its two commits."""
    topic, database = kafka_topic(3), Customers(seed=11)
    monkeypatch.setenv("KAFKA_UNDER_TEST", kafka_server)
    monkeypatch.setenv("TOPIC_UNDER_TEST", topic)
    with deployment(tmp_path, tmp_path / "spark", module="tests.fixtures.customers_under_test") as deployed:

        def change(count: int) -> None:
            send(kafka_server, topic, database.changes(count))

        def is_equal() -> bool:
            there = [(row["id"], row["name"], row["city"]) for row in database.rows.values()]
            return latest(tmp_path) == sorted(there)

        change(60)
        deployed.until("the first rows", is_equal)
        for point in ("tombstones", "publish"):
            gate = tmp_path / point
            gate.touch()
            change(40)
            pid = int(deployed.until(f"a run is at {point}", lambda gate=gate: process_at(gate)))
            os.kill(pid, signal.SIGKILL)
            gate.unlink()
            change(5)
            deployed.until(f"the rows after {point}", is_equal)


def latest(folder: Path) -> list[tuple[int, str, str]]:
    try:
        rows = pl.read_delta(str(folder / "lake" / "customers" / "changes_latest"))
    except (FileNotFoundError, TableNotFoundError):
        return []
    return sorted(rows.select("id", "name", "city").rows())


def process_at(gate: Path) -> str:
    """Return the process that waits at a gate; empty before."""
    file = gate.with_suffix(".pid")
    return file.read_text() if file.exists() else ""
