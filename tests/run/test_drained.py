"""Runs of a paused or drained pipeline: messages that they receive, release and keep."""

import signal
import time
from collections import Counter
from datetime import timedelta

import pytest

from pipeline_platform import PipelineError
from pipeline_platform.control.overrides import Overrides
from pipeline_platform.lake.decisions.decision import FencedError
from pipeline_platform.run import steps, stopping
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import intake_of
from tests.fixtures.flow import begun, finish, received, rows, run
from tests.fixtures.flow_pipelines import Columns, Obedient
from tests.fixtures.small_lake import Keeping
from tests.fixtures.telemetry import flow_here

SLOW = 30


def outcomes(flow: Flow, receive_id: str) -> Counter[str]:
    found = rows(flow, "outcomes")
    return Counter(found.filter(found["receive_id"] == receive_id)["outcome"].to_list())


def test_a_run_that_is_drained_keeps_what_it_handled_and_gives_back_the_rest_at_once(filled):
    texts = [f"sleep 0.1{number:05}" for number in range(SLOW)]
    flow = filled(Obedient, [b"batch trigger", *(text.encode() for text in texts)])
    receive = received(flow)
    flow.control.drain("obedient", "moves", timedelta(seconds=1))

    steps.handle_messages(flow, receive)
    steps.batch_messages(flow, receive, "batches")
    answer = finish(flow, receive)

    came_to = outcomes(flow, receive.receive_id)
    assert came_to["handled"] + came_to["returned"] == SLOW + 1
    assert came_to["returned"] > SLOW / 2, "a task handles ten a second"
    assert rows(flow, "batches")["data"].to_list() == ['{"word":"flush"}'], "in a batch that is not full"
    assert flow.source.backlog().messages == came_to["returned"], "no lease is waited for"
    assert (answer.acknowledged, answer.unacknowledged) == (SLOW + 1, 0)
    assert flow.control.in_flight("obedient") == []

    assert begun(flow, run_id="next").demand == 0
    flow.control.resume("obedient")
    run(flow)
    assert sorted(rows(flow, "words")["word"]) == texts, "each once"
    assert flow.source.backlog().messages == 0


def test_a_backfill_that_is_drained_leaves_open_what_it_did_not_begin(filled):
    flow = filled(Obedient, [b"raise"] * 3)
    run(flow)
    receive = received(flow, origin="failed")
    flow.control.drain("obedient", "moves", timedelta(microseconds=1))
    steps.handle_messages(flow, receive)
    finish(flow, receive)
    assert outcomes(flow, receive.receive_id) == {"returned": 3}
    assert intake_of(flow, receive).asked(None) == 3, "they can be retried"
    flow.control.resume("obedient")
    assert outcomes(flow, run(flow, "failed").receive_id) == {"failed": 3}


def test_a_run_of_a_paused_pipeline_takes_on_nothing_and_says_why(filled):
    flow, said = filled(Obedient, [b"one"]), []
    flow.control.pause("obedient", "moves")
    for origin in ("source", "failed", "messages"):
        receive = begun(flow, origin=origin, log=said.append)
        assert (receive.demand, flow.control.in_flight("obedient")) == (0, [])
    assert said == ["Receives nothing: obedient is paused: moves. Resume it, or start a run with `ignore_pause`"] * 3
    assert flow.source.backlog().messages == 1


def test_a_pause_that_comes_while_a_run_begins_holds_for_it(filled):
    flow = filled(Obedient, [b"one"])

    class Late(type(flow.control)):  # type: ignore[misc]
        def claim(self, *arguments: object, **options: object) -> int:
            granted = super().claim(*arguments, **options)
            self.pause("obedient", "moves")
            return int(granted)

    flow.control.__class__ = Late

    assert begun(flow).demand == 0
    assert flow.control.in_flight("obedient") == [], "its room is free"


def test_a_run_that_is_forced_takes_on_messages_unless_the_pipeline_is_drained(filled):
    flow = filled(Obedient, [b"one"])
    flow.control.drain("obedient", "moves", timedelta(seconds=30))
    with pytest.raises(PipelineError, match="ignore_pause does not apply during a drain"):
        begun(flow, ignore_pause=True)
    flow.control.pause("obedient", "moves")
    receive = begun(flow, ignore_pause=True)
    assert receive.demand == Obedient.processors.per_run


def test_a_replay_that_is_drained_leaves_its_windows_as_they_were(filled):
    """A part of a replay would lose rows: it replaces all rows of the windows."""
    flow = filled(Obedient, [b"raise", *(b"sleep 0.1%d" % number for number in range(20))])
    words = run(flow)
    flow.control.override(Obedient, Overrides(concurrency=1))
    before = {table: sorted(rows(flow, table).rows()) for table in ("words", "failed", "outcomes")}
    receive = received(flow, origin="messages")
    flow.control.drain("obedient", "moves", timedelta(seconds=1))

    with pytest.raises(PipelineError, match=r"replay with .* unstarted messages"):
        steps.handle_messages(flow, receive)

    assert {table: sorted(rows(flow, table).rows()) for table in before} == before
    assert flow.control.in_flight("obedient", of_all=True) == flow.control.over("obedient") == []
    assert flow.ledger.unfinished() == []
    with pytest.raises(FencedError):
        steps.decide(flow, receive)
    flow.control.resume("obedient")
    assert outcomes(flow, run(flow, "messages").receive_id) == {"handled": 20, "failed": 1}
    assert outcomes(flow, words.receive_id) == {}


def test_the_spark_lane_is_not_cut(filled):
    """The Spark lane is a single query."""
    flow = filled(Columns, [b"one", b"two"])
    receive = received(flow)
    flow.control.drain("columns", "moves", timedelta(microseconds=1))
    manifest = steps.handle_messages(flow, receive)
    assert (manifest.totals.handled.total(), manifest.totals.returned.total()) == (2, 0)


class Quick(Keeping):
    """A pipeline with a short `shutdown`."""

    name = "quick"
    shutdown = timedelta(milliseconds=50)


def test_a_message_that_is_stuck_keeps_its_run_no_longer_than_twice_shutdown(tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, "_FINISH_S", 0.0)
    monkeypatch.setattr(stopping, "_ASKED", {})
    flow, went_on = flow_here(tmp_path, Quick, [b"stuck"]), []
    receive = begun(flow)

    def hang() -> None:
        signal.raise_signal(signal.SIGINT)
        went_on.append(receive)
        time.sleep(20)

    with pytest.raises(KeyboardInterrupt), stopping.heeding(flow, receive):
        hang()

    assert went_on == [receive], "the first signal interrupts nothing"
