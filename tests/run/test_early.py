"""Early acknowledgements: each message has one outcome or one open failure, despite crashes."""

from dataclasses import replace

import pytest

from pipeline_platform import Producer
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.lake.decisions import decision
from pipeline_platform.lake.tables import CommitConflictError
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.run import begin as beginning
from pipeline_platform.run import lease, steps
from pipeline_platform.run.finish import finish_others
from pipeline_platform.run.flow import Flow
from tests.fixtures.early import POINTS, Early, handle_here, killed
from tests.fixtures.flow import received, rows, run
from tests.run.test_finish import failing_once


def acknowledged(flow: Flow) -> dict[str, list[str]]:
    """Return the outcomes of each message, by payload."""
    outcomes, messages = rows(flow, "outcomes"), rows(flow, "messages").unique("message_id")
    decided = outcomes.join(messages.select("message_id", "data"), on="message_id")
    found: dict[str, list[str]] = {}
    for row in decided.filter(decided["outcome"].is_in(["handled", "failed"])).sort("outcome").to_dicts():
        found.setdefault(row["data"].decode(), []).append(row["outcome"])
    return found


def test_a_run_tells_early_once_and_keeps_what_fails_later(filled, monkeypatch):
    payloads = [b"early", b"early raise", b"early kill", b"early return", b"early batch", b"batch late", b"plain"]
    flow = filled(Early, payloads)
    told_late = []
    acknowledge = TableQueue.acknowledge
    monkeypatch.setattr(TableQueue, "acknowledge", lambda *args: told_late.append(len(args[3])) or acknowledge(*args))

    run(flow)

    assert sum(told_late) == 1, "the others were told by tasks, and are not told again"
    assert acknowledged(flow) == {
        "early": ["handled"],
        "early raise": ["failed"],
        "early kill": ["failed"],
        "early return": ["failed"],  # by its own ack action it would go back to a source that has forgotten it
        "early batch": ["failed"],
        "batch late": ["failed"],
        "plain": ["handled"],
    }
    assert set(rows(flow, "failed")["data"]) == {payload for payload in payloads if payload not in (b"early", b"plain")}
    assert flow.source.backlog().messages == 0
    assert flow.ledger.unfinished() == []


def test_a_task_that_lives_while_its_receive_is_given_up_tells_the_source_nothing(filled, monkeypatch):
    flow, fence = filled(Early, [b"early"]), decision.fence
    stalled = received(flow)
    flow.control.end(stalled.receive_id)
    monkeypatch.setattr(decision, "fence", lambda *given: handle_here(flow, stalled) or fence(*given))
    assert finish_others(flow) == [stalled.receive_id]
    assert flow.source.backlog().messages == 1


@pytest.mark.parametrize("moment", ["KeepForgotten", "decide", "acknowledge"])
def test_a_recovery_that_fails_half_way_is_done_again(filled, monkeypatch, moment):
    flow = filled(Early, [b"early", b"plain"])
    dead = killed(flow, "before the decision")
    # What the class says by then does not matter.
    later = replace(flow, producer=BoundProducer(type("Early", (Early,), {"acks_immediately": False})))

    def fail(*_: object, **__: object) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch:
        room = {"KeepForgotten": lease, "decide": decision, "acknowledge": steps}[moment]
        patch.setattr(room, moment, fail)
        assert finish_others(later) == [], dead
    assert finish_others(later)
    run(flow)

    assert acknowledged(flow) == {"early": ["failed"], "plain": ["handled"]}
    assert rows(flow, "failed")["kind"].to_list() == ["not decided"]
    assert flow.ledger.unfinished() == []


@pytest.mark.parametrize("error", [CommitConflictError, OSError])
def test_a_recovery_whose_commit_lost_its_answer_loses_no_message(filled, monkeypatch, error):
    flow = filled(Early, [b"early", b"plain"])
    killed(flow, "before the decision")
    with monkeypatch.context() as patch:
        failing_once(patch, error, commits=True)
        finish_others(flow)
    run(flow)
    assert acknowledged(flow) == {"early": ["failed"], "plain": ["handled"]}


@pytest.mark.parametrize("moment", POINTS)
def test_what_a_dead_run_acknowledged_early_is_an_open_failure(filled, moment):
    flow = filled(Early, [b"early", b"plain", b"early too"])
    dead = killed(flow, moment)

    assert finish_others(flow) == [dead]
    run(flow)

    forgotten = {
        "before it is noted": set[bytes](),
        "before it is told": {b"early"},
        "once it is told": {b"early"},
    }[moment]
    payloads = ("early", "plain", "early too")
    expected = {payload: ["failed" if payload.encode() in forgotten else "handled"] for payload in payloads}
    assert acknowledged(flow) == expected
    if forgotten:
        failed = rows(flow, "failed")
        assert set(failed["data"]) == forgotten
        assert set(zip(failed["state"], failed["kind"], strict=True)) == {("open", "not decided")}
        failures = rows(flow, "outcomes").filter(outcome="failed")
        assert failures["action"].to_list() == ["acknowledged early"]
    assert {*rows(flow, "messages")["receive_id"]} == {*rows(flow, "outcomes")["receive_id"]}
    assert dead not in rows(flow, "messages")["receive_id"]
    assert flow.source.backlog().messages == 0
    assert flow.ledger.unfinished() == []


@pytest.mark.parametrize("waits", [False, True])
def test_a_replay_includes_messages_that_its_own_recovery_records(filled, monkeypatch, waits):
    """Also if the earlier run crashes while the replay waits for its turn."""
    flow = filled(Early, [b"first"])
    first = run(flow).receive_id
    flow.source.enqueue([b"early", b"plain"])
    dead = killed(flow, "before the decision")
    if waits:
        taking_turns = {"partition_by": staticmethod(lambda _: 1), "producer": Producer(source="queue")}
        flow = replace(flow, producer=BoundProducer(type("Early", (Early,), taking_turns)))
        looks = iter([False])
        monkeypatch.setattr(beginning, "finish_others", lambda *args: finish_others(*args) if next(looks, True) else [])

    receive = run(flow, "messages")

    replaced = set(receive.replaces)
    assert (receive.demand, len(replaced), first in replaced, dead in replaced) == (2, 2, True, False)
    assert acknowledged(flow) == {"first": ["handled"], "early": ["handled"]}
