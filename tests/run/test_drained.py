"""Runs of a pipeline that is paused or drained: what they take on, give back and keep."""

from collections import Counter
from datetime import timedelta

import pytest

from pipeline_platform.model.pipeline import PipelineError
from pipeline_platform.run import steps
from pipeline_platform.run.begin import begin
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import intake_of
from tests.fixtures.flow import WINDOW, Filled, rows, run
from tests.fixtures.flow_pipelines import Columns, Obedient

SLOW = 120


def outcomes(flow: Flow, receive_id: str) -> Counter[str]:
    found = rows(flow, "outcomes")
    return Counter(found.filter(found["receive_id"] == receive_id)["outcome"].to_list())


def test_a_run_that_is_drained_keeps_what_it_handled_and_gives_back_the_rest_at_once(filled: Filled) -> None:
    texts = [f"sleep 0.2{number:05}" for number in range(SLOW)]
    flow = filled(Obedient, [b"batch trigger", *(text.encode() for text in texts)])
    receive = begin(flow, origin="source", run_id="test", windows=[WINDOW])
    steps.receive_messages(flow, receive)
    flow.control.drain("obedient", "moves", timedelta(seconds=4))

    steps.handle_messages(flow, receive)
    steps.batch_messages(flow, receive, "batches")
    steps.decide(flow, receive)
    steps.publish(flow, receive)
    answer = steps.acknowledge(flow, receive)

    came_to = outcomes(flow, receive.receive_id)
    assert came_to["handled"] + came_to["returned"] == SLOW + 1
    assert came_to["returned"] > SLOW / 2, "two tasks handle ten a second"
    assert rows(flow, "batches")["data"].to_list() == ['{"word":"flush"}'], "in a batch that is not full"
    assert flow.source.backlog().messages == came_to["returned"], "no lease is waited for"
    assert (answer.acknowledged, answer.unacknowledged) == (SLOW + 1, 0)
    assert flow.control.in_flight("obedient") == []

    assert begin(flow, origin="source", run_id="next", windows=[WINDOW]).demand == 0
    flow.control.resume("obedient")
    run(flow)
    assert sorted(rows(flow, "words")["word"]) == texts, "each once"
    assert flow.source.backlog().messages == 0


def test_a_backfill_that_is_drained_leaves_open_what_it_did_not_begin(filled: Filled) -> None:
    flow = filled(Obedient, [b"raise"] * 3)
    run(flow)
    receive = begin(flow, origin="failed", run_id="test", windows=[WINDOW])
    steps.receive_messages(flow, receive)
    flow.control.drain("obedient", "moves", timedelta(microseconds=1))

    steps.handle_messages(flow, receive)
    steps.decide(flow, receive)
    steps.publish(flow, receive)
    steps.acknowledge(flow, receive)

    assert outcomes(flow, receive.receive_id) == {"returned": 3}
    assert intake_of(flow, receive).asked(None) == 3, "they can be driven again"
    flow.control.resume("obedient")
    assert outcomes(flow, run(flow, "failed").receive_id) == {"failed": 3}


@pytest.mark.parametrize("origin", ["source", "failed", "messages"])
def test_a_run_of_a_paused_pipeline_takes_on_nothing_and_says_why(filled: Filled, origin) -> None:
    flow, said = filled(Obedient, [b"one"]), []
    flow.control.pause("obedient", "moves")

    receive = begin(flow, origin=origin, run_id="test", windows=[WINDOW], log=said.append)

    assert (receive.demand, flow.control.in_flight("obedient")) == (0, [])
    assert said == [
        "takes on nothing: obedient is paused: moves. Resume it, or start a run with `although_paused`",
    ]
    assert flow.source.backlog().messages == 1


def test_a_pause_that_comes_while_a_run_begins_holds_for_it(filled: Filled) -> None:
    flow = filled(Obedient, [b"one"])

    class Late(type(flow.control)):  # type: ignore[misc]
        def claim(self, *arguments: object, **options: object) -> int:
            granted = super().claim(*arguments, **options)
            self.pause("obedient", "moves")
            return int(granted)

    flow.control.__class__ = Late

    assert begin(flow, origin="source", run_id="test", windows=[WINDOW]).demand == 0
    assert flow.control.in_flight("obedient") == [], "its room is free"


def test_a_run_that_is_forced_takes_on_messages_unless_the_pipeline_is_drained(filled: Filled) -> None:
    flow = filled(Obedient, [b"one"])
    flow.control.drain("obedient", "moves", timedelta(seconds=30))
    with pytest.raises(PipelineError, match="although_paused is set, but runs under way are drained"):
        begin(flow, origin="source", run_id="test", windows=[WINDOW], although_paused=True)

    flow.control.pause("obedient", "moves")
    receive = begin(flow, origin="source", run_id="test", windows=[WINDOW], although_paused=True)

    assert receive.demand == Obedient.processors.per_run


def test_what_cannot_be_given_back_is_not_cut(filled: Filled) -> None:
    """A replay takes the place of what was; the fast lane is one query."""
    flow = filled(Columns, [b"one", b"two"])
    receive = begin(flow, origin="source", run_id="test", windows=[WINDOW])
    steps.receive_messages(flow, receive)
    flow.control.drain("columns", "moves", timedelta(microseconds=1))

    manifest = steps.handle_messages(flow, receive)

    assert (manifest.total("handled"), manifest.total("returned")) == (2, 0)
    replay = receive.model_copy(update={"origin": "messages"})
    assert not intake_of(filled(Obedient, []), replay).gives_back
