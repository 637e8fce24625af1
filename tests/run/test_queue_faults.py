"""A PostgreSQL queue that fails during a run: each message once in every table, none lost, and a clear error."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pipeline_platform.connectors.table_queue import TableQueue, queue_reading
from pipeline_platform.connectors.table_queue.leased_table import LeasedTable
from pipeline_platform.run import lease, steps
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.steps import Acknowledgement
from pipeline_platform.source.contract import SourceAwayError
from pipeline_platform.tasks.acknowledge.acknowledger import Acknowledger
from servers.server import Server
from tests.fixtures.flow import flow_of, publish, rows, worked
from tests.fixtures.flow import run as run_through
from tests.fixtures.flow_pipelines import Obedient
from tests.fixtures.postgres import administrator, cut_all_others

COUNT = 60
PAYLOADS = [b"raise" if n % 10 == 0 else b"word %d" % n for n in range(COUNT)]
WORDS = [payload.decode() for payload in PAYLOADS if payload != b"raise"]
"""Few: the run's own process reads and acknowledges them, where a test can interfere."""


@pytest.fixture
def flow_over(tmp_path, tasks_here, monkeypatch):
    """A pipeline over a queue of `PAYLOADS`; the claim of a failed run expires after a second."""
    monkeypatch.setattr(lease, "CLAIM_S", 1.0)
    monkeypatch.setattr(queue_reading, "ROWS_PER_BATCH", 20)

    def over(url: str) -> Flow:
        queue = TableQueue(name="queue", url=url, lease_s=2)
        queue.create()
        queue.enqueue(PAYLOADS)
        return flow_of(tmp_path, Obedient, queue)

    return over


def run_to_end(flow: Flow, deadline_s: float = 60) -> None:
    """Run until the queue is empty and no receive is unfinished."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        run_through(flow)
        if not remaining(flow.source) and not flow.ledger.unfinished():
            return
        time.sleep(0.2)
    raise AssertionError(f"{remaining(flow.source)} messages are left, and {flow.ledger.unfinished()}")


def remaining(queue: Any) -> int:
    return int(queue.backlog().messages) + sum(messages for _, _, messages in queue.held())


def assert_each_message_once(flow: Flow) -> None:
    assert Counter(rows(flow, "words")["word"]) == Counter(WORDS)
    assert rows(flow, "failed").height == COUNT - len(WORDS)
    assert rows(flow, "outcomes")["message_id"].n_unique() == rows(flow, "outcomes").height == COUNT


def acknowledged_by(flow: Flow, **patience: Any) -> Acknowledgement:
    """Run once, with a function to inspect the last step."""
    receive = worked(flow)
    publish(flow, receive)
    return steps.acknowledge(flow, receive, Acknowledger(**patience))


def once(monkeypatch: pytest.MonkeyPatch, method: str, fault: Callable[[], Any]) -> None:
    """Call a function in the middle of the queue's next transaction of a kind."""
    place: Any = queue_reading if method == "read" else LeasedTable
    work = getattr(place, method)
    happened = threading.Event()

    def then_fault(*arguments: Any, **options: Any) -> Any:
        done = work(*arguments, **options)
        if not happened.is_set():
            happened.set()
            fault()
        return done

    def after_a_batch(*arguments: Any) -> Any:
        for batch in work(*arguments):
            yield batch
            if not happened.is_set():
                happened.set()
                fault()

    monkeypatch.setattr(place, method, after_a_batch if method == "read" else then_fault)


def restart(server: Server, away_s: float) -> None:
    """Stop a server, to be restarted a little later."""
    server.stop()
    threading.Timer(away_s, server.start).start()


@pytest.mark.parametrize("method", ["count_waiting", "lease", "is_live", "acknowledge"])
def test_a_run_waits_for_a_server_that_restarts(flow_over, own_postgres_server, monkeypatch, method):
    """In the middle of the read: messages that were read are recorded."""
    flow = flow_over(own_postgres_server.address)
    once(monkeypatch, method, lambda: restart(own_postgres_server, 1))
    assert acknowledged_by(flow, attempts=3, wait_s=1)[:4] == (COUNT, 0, 0, [])
    assert remaining(flow.source) == 0
    assert_each_message_once(flow)


@pytest.mark.parametrize("method", ["lease", "read", "acknowledge"])
def test_a_connection_that_is_cut_costs_nothing(flow_over, postgres_url, monkeypatch, method):
    flow = flow_over(postgres_url)

    def cut() -> None:
        with administrator(postgres_url) as connection:
            assert cut_all_others(connection)

    once(monkeypatch, method, cut)
    if method == "read":
        with pytest.raises(SourceAwayError, match="ended the session"):
            run_through(flow)
        run_to_end(flow)
    else:
        assert acknowledged_by(flow, attempts=2, wait_s=0).acknowledged == COUNT

    assert remaining(flow.source) == 0
    assert_each_message_once(flow)
