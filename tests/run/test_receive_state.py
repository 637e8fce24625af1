"""The state of a receive from its beginning to its end: what every step, the clear-up and `status` go by."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.decision import UnhandledError
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.storage import Lake
from pipeline_platform.run import steps
from pipeline_platform.run.clear_up import clear_up
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.receive_state import Phase, ReceiveState
from tests.fixtures.small_lake import Keeping, Memory, Run, numbered


def no_spark() -> Any:
    raise AssertionError("these few messages need no Spark")


@pytest.fixture
def flow(tmp_path: Path) -> Flow:
    control = ControlStore(f"sqlite:///{tmp_path}/control.sqlite")
    return Flow(Keeping, Memory(), Lake(root=str(tmp_path / "lake")), control, no_spark)


def test_a_receive_goes_through_its_phases_and_is_acknowledged_only_once_it_is_published(flow: Flow) -> None:
    run = Run(flow.tables, Memory(deliveries_=numbered(b"one", b"fail")), "r1")
    seen = [ReceiveState(flow, "r1").phase]
    flow.ledger.write(run.receive, "receive", Manifest(notes=[{"step": "receive"}]))
    for step in (lambda: None, run.work, run.decide):
        step()
        seen.append(ReceiveState(flow, "r1").phase)
    with pytest.raises(UnhandledError, match="r1 is not published"):
        steps.acknowledge(flow, run.receive)

    steps.publish(flow, run.receive)
    seen.append(ReceiveState(flow, "r1").phase)
    steps.acknowledge(flow, run.receive)

    assert [*seen, ReceiveState(flow, "r1").phase] == [*Phase][1:]


def test_a_receive_whose_run_died_before_its_decision_is_given_up(flow: Flow) -> None:
    Run(flow.tables, Memory(deliveries_=numbered(b"one")), "r1").work()

    assert clear_up(flow) == ["r1"]

    assert ReceiveState(flow, "r1").phase is Phase.GIVEN_UP


def test_a_receive_that_one_table_does_not_show_is_not_published(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(flow.tables, Memory(deliveries_=numbered(b"one", b"fail")), "r1").work().decide()
    monkeypatch.setattr(flow.tables["kept"], "swap", Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        steps.publish(flow, run.receive)

    assert flow.tables["failed"].open().version() == 1, "the tables before it show it"
    assert ReceiveState(flow, "r1").phase is Phase.DECIDED
