"""Acknowledged before the decision: each message once as an outcome or an open failure, whatever dies."""

import signal
from multiprocessing import get_context
from pathlib import Path

import pytest

from pipeline_platform.run.clear_up import clear_up
from pipeline_platform.run.flow import Flow
from resources.table_queue import TableQueue
from tests.fixtures.early import MOMENTS, Early, killed_at
from tests.fixtures.flow import Filled, rows, run


def settled(flow: Flow) -> dict[str, list[str]]:
    """What decided each message, by payload."""
    outcomes, messages = rows(flow, "outcomes"), rows(flow, "messages").unique("message_id")
    decided = outcomes.join(messages.select("message_id", "data"), on="message_id")
    found: dict[str, list[str]] = {}
    for row in decided.filter(decided["outcome"].is_in(["handled", "failed"])).sort("outcome").to_dicts():
        found.setdefault(row["data"].decode(), []).append(row["outcome"])
    return found


def test_a_run_tells_early_once_and_keeps_what_fails_later(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    payloads = [b"early", b"early raise", b"early die", b"early return", b"early batch", b"batch late", b"plain"]
    flow = filled(Early, payloads)
    told_late = []
    settle = TableQueue.settle
    monkeypatch.setattr(TableQueue, "settle", lambda *args: told_late.append(len(args[3])) or settle(*args))

    run(flow)

    assert sum(told_late) == 1, "the others were told by tasks, and are not told again"
    assert settled(flow) == {
        "early": ["handled"],
        "early raise": ["failed"],
        "early die": ["failed"],
        "early return": ["failed"],  # by its own word it would go back to a source that has forgotten it
        "early batch": ["failed"],
        "batch late": ["failed"],
        "plain": ["handled"],
    }
    assert set(rows(flow, "failed")["data"]) == {one for one in payloads if one not in (b"early", b"plain")}
    assert flow.source.backlog().messages == 0
    assert flow.ledger.unfinished() == []


def test_a_failure_that_goes_back_early_decides_nothing(filled: Filled) -> None:
    flow = filled(Early, [b"early nack"])

    run(flow)

    assert rows(flow, "outcomes")["outcome"].to_list() == ["returned"]
    assert flow.source.backlog().messages == 1


def test_a_backfill_tells_nobody(filled: Filled) -> None:
    flow = filled(Early, [b"early raise"])
    run(flow)

    run(flow, "failed")

    assert rows(flow, "outcomes")["action"].to_list().count("told early") == 1
    assert rows(flow, "failed")["state"].to_list() == ["open", "open"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_a_dead_run_acknowledged_early_is_an_open_failure(filled: Filled, tmp_path: Path, moment: str) -> None:
    flow = filled(Early, [b"early", b"plain", b"early too"])
    process = get_context("spawn").Process(target=killed_at, args=(moment, str(tmp_path)))
    process.start()
    process.join()
    (dead,) = flow.ledger.unfinished()
    flow.control.end(dead)

    assert clear_up(flow) == [dead]
    run(flow)

    assert process.exitcode == -signal.SIGKILL, "it was not hit: the moment is gone"
    forgotten = {
        "before it is noted": set[bytes](),
        "before it is told": {b"early"},
        "once it is told": {b"early"},
        "before the decision": {b"early", b"early too"},
    }[moment]
    expected = {one: ["failed" if one.encode() in forgotten else "handled"] for one in ("early", "plain", "early too")}
    assert settled(flow) == expected
    if forgotten:
        failed = rows(flow, "failed")
        assert set(failed["data"]) == forgotten
        assert set(zip(failed["state"], failed["kind"], strict=True)) == {("open", "not decided")}
    assert flow.source.backlog().messages == 0
    assert flow.ledger.unfinished() == []
