"""The leases of a run, of its claim and of its messages: each is renewed when it is due."""

import threading
import time
from unittest.mock import Mock

import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore, ControlStoreError
from pipeline_platform.lake.decisions.decision import FencedError, UnhandledError
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.task_report import TaskReport
from pipeline_platform.run import lease, steps
from pipeline_platform.run.finish import finish_others
from pipeline_platform.run.lease import alive, fence_and_release
from pipeline_platform.run.receive_state import Phase, ReceiveState
from pipeline_platform.source.contract import SourceAwayError
from pipeline_platform.source.pauses import Patience
from tests.fixtures.flow import flow_of, received, worked
from tests.fixtures.flow_pipelines import Obedient
from tests.fixtures.small_lake import Keeping, Memory, Run, numbered


def test_a_control_store_that_does_not_answer_costs_no_lease_at_the_source(filled, monkeypatch):
    flow = filled(Obedient, [b"one"])
    receive = received(flow)
    extended: list[str] = []

    def unreachable(*args: object, **options: object) -> bool:
        raise ControlStoreError("no route")

    monkeypatch.setattr(ControlStore, "beat", unreachable)
    monkeypatch.setattr(TableQueue, "extend", lambda queue, receive_id, held: extended.append(receive_id) or True)
    flow.beats.clear()  # both leases are due
    with alive(flow, receive):
        pass

    assert extended == [receive.receive_id]


def test_leases_are_renewed_when_they_are_due_however_many_steps_there_are(filled, monkeypatch):
    flow = filled(Obedient, [b"one"])
    receive = received(flow)
    beaten: list[str] = []
    monkeypatch.setattr(ControlStore, "beat", lambda *_, **__: beaten.append("claim") or True)
    monkeypatch.setattr(TableQueue, "extend", lambda *_: beaten.append("messages") or True)

    for _ in range(3):
        with alive(flow, receive):
            time.sleep(0.05)
    assert beaten == []
    monkeypatch.setattr(lease, "CLAIM_S", 0.1)
    with alive(flow, receive):
        time.sleep(0.2)

    assert set(beaten) == {"claim"}


def test_a_claim_is_renewed_again_by_a_store_that_failed_over(filled, monkeypatch):
    flow = filled(Obedient, [b"one"])
    receive = received(flow)
    beats = Mock(side_effect=[ControlStoreError("no route"), *[True] * 100])
    monkeypatch.setattr(ControlStore, "beat", beats)
    monkeypatch.setattr(lease, "CLAIM_S", 0.1)
    with alive(flow, receive):
        time.sleep(0.3)
    assert beats.call_count > 1


def test_a_decision_waits_for_a_source_that_is_away_only_as_long_as_that_source_says(filled, monkeypatch):
    flow = filled(Obedient, [b"one"])
    receive = worked(flow)
    asked: list[str] = []

    def away(queue: TableQueue, receive_id: str, held: object) -> bool:
        asked.append(receive_id)
        raise SourceAwayError("it does not answer")

    monkeypatch.setattr(TableQueue, "extend", away)
    monkeypatch.setattr(TableQueue, "patience", Patience("stop"))
    flow.beats.clear()  # both leases are due

    with pytest.raises(SourceAwayError):
        steps.decide(flow, receive)

    assert asked == [receive.receive_id]


def test_a_source_that_does_not_answer_costs_no_claim(filled, monkeypatch):
    monkeypatch.setattr(lease, "CLAIM_S", 1.0)
    flow = filled(Obedient, [b"one"])
    receive = received(flow)
    answered = threading.Event()
    monkeypatch.setattr(TableQueue, "extend", lambda *_: answered.wait(60))
    threading.Timer(4, answered.set).start()

    flow.beats.clear()  # both leases are due
    with alive(flow, receive):
        time.sleep(2)
        assert not answered.is_set()
        assert [claim.run_id for claim in flow.control.in_flight("obedient")] == ["test"]
        assert finish_others(flow) == [], "another run leaves it alone"
    # The step has ended; its last call to the source still waits.
    assert answered.is_set()
    assert [claim.run_id for claim in flow.control.in_flight("obedient")] == ["test"]


@pytest.fixture
def flow(tmp_path):
    return flow_of(tmp_path, Keeping, Memory())


def test_a_receive_goes_through_its_phases_and_is_acknowledged_only_once_it_is_published(flow):
    run = Run(flow.tables, Memory(deliveries_=numbered(b"one", b"fail")), "r1")
    seen = [ReceiveState(flow, "r1").phase]
    run.ledger.write(run.receive, "receive", Manifest(reports=[TaskReport(step="receive")]))
    for step in (lambda: None, run.work, run.decide):
        step()
        seen.append(ReceiveState(flow, "r1").phase)
        if step == run.work:
            with pytest.raises(UnhandledError, match="not published"):
                steps.acknowledge(flow, run.receive)
    with pytest.raises(UnhandledError, match="decided, not published"):
        steps.acknowledge(flow, run.receive)

    steps.publish(flow, run.receive)
    seen.append(ReceiveState(flow, "r1").phase)
    steps.acknowledge(flow, run.receive)

    passed = [Phase.BEGUN, Phase.LEASED, Phase.BATCHED, Phase.DECIDED, Phase.PUBLISHED, Phase.ACKNOWLEDGED]
    assert [*seen, ReceiveState(flow, "r1").phase] == passed


def test_a_receive_that_one_table_does_not_show_is_not_published(flow, monkeypatch):
    run = Run(flow.tables, Memory(deliveries_=numbered(b"one", b"fail")), "r1").work().decide()
    monkeypatch.setattr(flow.tables["kept"], "swap", Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        steps.publish(flow, run.receive)
    assert flow.tables["failed"].open().version() == 1, "the tables before it show it"
    assert ReceiveState(flow, "r1").phase is Phase.DECIDED


def test_a_step_of_a_receive_that_was_given_up_fails_by_that_and_not_by_the_files_that_are_gone(filled):
    flow = filled(Obedient, [b"one"])
    receive = received(flow)

    def work() -> None:
        with lease.working(flow, receive):
            fence_and_release(flow, receive)
            raise FileNotFoundError("lake/numbered/messages/1.parquet")

    with pytest.raises(FencedError, match="fenced"):
        work()


def test_a_step_that_fails_for_another_reason_keeps_its_own_error(filled):
    flow = filled(Obedient, [b"one"])
    with pytest.raises(FileNotFoundError), lease.working(flow, received(flow)):
        raise FileNotFoundError("settings.toml")
