"""Failures retried: by whole runs, a part of them at a time, until they are dead."""

from datetime import UTC, datetime, timedelta

import pytest

from pipeline_platform.lake.failed import FailedMessages
from pipeline_platform.lake.failure_events import Selection
from pipeline_platform.model.pipeline import PipelineError
from pipeline_platform.model.retry import Retry
from pipeline_platform.run.begin import begin
from pipeline_platform.run.flow import Flow
from tests.fixtures.flow import WINDOW, Filled, rows, run
from tests.fixtures.flow_pipelines import Obedient

DUE = Selection(state="due")
SOON = Selection(state="due", due_by=datetime.now(UTC) + timedelta(minutes=30))


class Soon(Obedient):
    """What fails is due within a second, and tried twice."""

    name = "soon"
    retry = Retry(max_attempts=2, backoff=timedelta(microseconds=1))


class Late(Soon):
    """What fails is due in an hour."""

    name = "late"
    retry = Retry(max_attempts=2, backoff=timedelta(hours=1))


def counted(flow: Flow) -> list[tuple[int, int]]:
    failed = FailedMessages(name="queue", lake=flow.lake, pipeline=flow.pipeline.name)
    return [(counts.open, counts.dead) for counts in failed.by_window().values()]


def test_a_run_that_drives_what_is_due_leaves_dead_ones_alone(filled: Filled) -> None:
    flow = filled(Soon, [b"raise", b"word", b"none", b"batch raise"])
    run(flow)
    assert counted(flow) == [(3, 0)]

    assert run(flow, "failed", SOON).demand == 3
    assert counted(flow) == [(3, 3)], "each was the last attempt"

    assert run(flow, "failed", SOON).demand == 0
    assert run(flow, "failed", Selection(state="waiting")).demand == 0
    assert run(flow, "failed").demand == 3, "people drive dead ones, too"
    assert rows(flow, "failed")["attempt"].max() == 3
    assert counted(flow) == [(3, 3)]


def test_what_is_not_due_waits_and_can_be_driven_by_hand(filled: Filled) -> None:
    flow = filled(Late, [b"raise", b"none"])
    run(flow)

    assert run(flow, "failed", SOON).demand == 0
    assert run(flow, "failed", Selection(kind="ValueError")).demand == 1
    assert counted(flow) == [(2, 1)], "and the other was not touched"


def test_what_a_run_goes_by_is_in_its_record(filled: Filled) -> None:
    flow = filled(Soon, [b"raise"])
    run(flow)

    receive = begin(flow, origin="failed", run_id="test", windows=[WINDOW], selection=SOON)

    assert receive.selection == SOON
    assert flow.ledger.get(receive.receive_id) == receive
    later = begin(flow, origin="failed", run_id="test", windows=[WINDOW], selection=DUE)
    assert later.selection.due_by is not None, "each later look finds the same failures due"


@pytest.mark.parametrize("origin", ["source", "messages"])
def test_a_selection_is_refused_where_no_failures_are_driven(filled: Filled, origin) -> None:
    flow = filled(Soon, [b"raise"])

    with pytest.raises(PipelineError, match="drives no failures: leave `failures` out"):
        begin(flow, origin=origin, run_id="test", windows=[WINDOW], selection=DUE)
