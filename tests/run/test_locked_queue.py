"""A queue that is locked for long: it costs a live run neither its claim nor its messages."""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.run import lease, steps
from pipeline_platform.run.begin import begin
from pipeline_platform.run.clear_up import clear_up
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.lease import alive
from tests.fixtures.flow_pipelines import Obedient

WINDOW = "2026-11-21T0000"
CLAIM_S = 1.0
LOCKED_S = 4 * CLAIM_S
Lock = Callable[[], closing]  # type: ignore[type-arg]


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Flow, Lock]:
    """A flow over a queue of one message, and how another locks all of that queue."""
    monkeypatch.setattr(lease, "CLAIM_S", CLAIM_S)
    on_sqlite = request.param == "sqlite"
    url = f"sqlite:///{tmp_path}/queue.sqlite" if on_sqlite else request.getfixturevalue("postgres_url")
    queue = TableQueue(name="queue", url=url, lease_s=60)
    queue.create()
    queue.enqueue([b"one"])

    def of_sqlite() -> closing[sqlite3.Connection]:
        connection = sqlite3.connect(tmp_path / "queue.sqlite", isolation_level=None, check_same_thread=False)
        connection.execute("BEGIN IMMEDIATE")
        return closing(connection)

    def of_postgres() -> closing[psycopg.Connection]:
        connection = psycopg.connect(url)
        connection.execute("LOCK TABLE messages, messages_leases, messages_receives IN ACCESS EXCLUSIVE MODE")
        return closing(connection)

    def no_spark() -> None:
        raise AssertionError("this needs Spark")

    control = ControlStore(f"sqlite:///{tmp_path}/control.sqlite")
    flow = Flow(Obedient, queue, Lake(root=str(tmp_path / "lake")), control, no_spark)  # type: ignore[arg-type]
    return flow, of_sqlite if on_sqlite else of_postgres


@contextmanager
def locked(lock: Lock) -> Iterator[threading.Event]:
    """Hold the queue for a while; tells when it has been released."""
    held, released = lock(), threading.Event()

    def release() -> None:
        held.__exit__(None, None, None)
        released.set()

    timer = threading.Timer(LOCKED_S, release)
    timer.start()
    try:
        yield released
    finally:
        timer.join()


def test_a_queue_that_is_locked_for_long_costs_no_claim(place: tuple[Flow, Lock]) -> None:
    flow, lock = place
    receive = begin(flow, origin="source", run_id="stalled", windows=[WINDOW])
    assert steps.receive_messages(flow, receive).rows("messages") == 1

    flow.beats.clear()  # both leases are due
    with locked(lock) as released:
        with alive(flow, receive):
            time.sleep(LOCKED_S / 2)
            assert not released.is_set()
            assert [claim.run_id for claim in flow.control.in_flight("obedient")] == ["stalled"]
            assert clear_up(flow) == [], "another run leaves it alone"
        # The step is over; its last word to the source still waits for the lock.
        assert released.is_set()
        assert [claim.run_id for claim in flow.control.in_flight("obedient")] == ["stalled"]
