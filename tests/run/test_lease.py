"""The two leases of a run, of its claim and of its messages: each is renewed when it is due."""

import time

import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore, ControlStoreError
from pipeline_platform.run import lease, steps
from pipeline_platform.run.begin import begin
from pipeline_platform.run.lease import alive
from pipeline_platform.source.contract import Patience, SourceAwayError
from tests.fixtures.flow import WINDOW, Filled, worked
from tests.fixtures.flow_pipelines import Obedient


def test_a_control_store_that_does_not_answer_costs_no_lease_at_the_source(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = filled(Obedient, [b"one"])
    receive = begin(flow, origin="source", run_id="test", windows=[WINDOW])
    steps.receive_messages(flow, receive)
    extended: list[str] = []

    def unreachable(*args: object, **options: object) -> bool:
        raise ControlStoreError("no route")

    monkeypatch.setattr(ControlStore, "beat", unreachable)
    monkeypatch.setattr(TableQueue, "extend", lambda queue, receive_id, held: extended.append(receive_id) or True)
    flow.beats.clear()  # both leases are due
    with alive(flow, receive):
        pass

    assert extended == [receive.receive_id]


def test_leases_are_renewed_when_they_are_due_however_many_steps_there_are(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = filled(Obedient, [b"one"])
    receive = begin(flow, origin="source", run_id="test", windows=[WINDOW])
    steps.receive_messages(flow, receive)
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


def test_a_decision_waits_for_a_source_that_is_away_only_as_long_as_that_source_says(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
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
