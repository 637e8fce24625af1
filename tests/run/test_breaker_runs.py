"""Runs of a pipeline with a breaker while a service that its callbacks call is down."""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pipeline_platform import Backoff, Breaker, Message, Pipeline, Producer, Retry, TableBatcher
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.breaker import BreakerState
from pipeline_platform.run.finish import finish_others
from pipeline_platform.run.flow import Flow
from pipeline_platform.source.contract import Refused
from tests.fixtures.flow import rows, run
from tests.fixtures.flow_pipelines import Place
from tests.fixtures.small_lake import Row

PAUSES = Backoff(first=timedelta(seconds=1), most=timedelta(seconds=2))


class Bank(Pipeline):
    """Fails while the file `down` exists, and always for an invalid payload."""

    name = "bank"
    producer = Producer(source="queue", breaker=Breaker(of_last=20, pause=PAUSES))
    batchers = {"kept": TableBatcher(schema=Row)}
    retry = Retry(max_attempts=3)
    context = Place()

    def handle_message(self, message: Message, context: Place) -> Any:
        if message.data == b"invalid":
            return message.put(message.json(Row), batcher="kept")
        if Path(context.folder, "down").exists():
            raise ConnectionError("the bank is unavailable")
        return message.put({"text": message.data.decode()}, batcher="kept")


def until_the_next_attempt(flow: Flow) -> None:
    until = flow.control.breaker("bank").until
    assert until is not None
    time.sleep(max(0, (until - datetime.now(UTC)).total_seconds()) + 0.01)


def test_runs_receive_nothing_until_an_attempt_with_a_few_messages_succeeds(filled, tmp_path):
    down = tmp_path / "down"
    down.touch()
    place = {"folder": str(tmp_path)}
    flow = filled(Bank, [f"{number}".encode() for number in range(30)])
    run(flow, context=place)
    flow.source.send([f"later {number}".encode() for number in range(30)])

    reason, paused = flow.quota.paused, run(flow, context=place)
    assert reason is not None
    assert reason.startswith("30 of the last 30 messages failed; next attempt at ")
    assert paused.demand == 0

    until_the_next_attempt(flow)
    assert run(flow, context=place).demand == 10
    assert flow.quota.paused is not None
    down.unlink()
    until_the_next_attempt(flow)
    assert run(flow, context=place).demand == 10
    assert flow.quota.paused is None
    run(flow, context=place)
    assert rows(flow, "kept").height == 20
    assert flow.source.backlog().messages == 0


def test_failures_of_a_receive_that_a_later_run_acknowledges_count_once(filled, tmp_path, monkeypatch):
    Path(tmp_path, "down").touch()
    flow = filled(Bank, [b"7"] * 15)
    with monkeypatch.context() as refusing:
        refusing.setattr(TableQueue, "acknowledge", lambda queue, action, ref, ids: [Refused(id_, "no") for id_ in ids])
        receive = run(flow, context={"folder": str(tmp_path)})
        assert finish_others(flow) == []
    assert finish_others(flow) == [receive.receive_id]
    assert flow.control.breaker("bank") == BreakerState(15, 15)


class OneAttempt(Bank):
    """Sends its failures elsewhere instead of retrying them."""

    name = "one_attempt"
    retry = Retry(max_attempts=1)


def test_failures_without_a_further_attempt_count(filled, tmp_path):
    Path(tmp_path, "down").touch()
    flow = filled(OneAttempt, [b"7"] * 30)
    run(flow, context={"folder": str(tmp_path)})
    assert flow.control.breaker("one_attempt").until is not None


def test_a_retry_receives_during_a_pause_of_the_breaker(filled, tmp_path):
    Path(tmp_path, "down").touch()
    place = {"folder": str(tmp_path)}
    flow = filled(Bank, [b"7"] * 30)
    run(flow, context=place)
    assert run(flow, context=place).demand == 0
    assert run(flow, "failed", context=place).demand == 30


def test_failures_of_a_retry_do_not_count(filled, tmp_path):
    Path(tmp_path, "down").touch()
    flow = filled(Bank, [b"7"] * 15)
    run(flow, context={"folder": str(tmp_path)})
    run(flow, "failed", context={"folder": str(tmp_path)})
    assert flow.control.breaker("bank") == BreakerState(15, 15)


def test_messages_that_are_never_retried_pause_nothing(filled, tmp_path):
    flow = filled(Bank, [b"invalid"] * 30)
    run(flow, context={"folder": str(tmp_path)})
    assert flow.quota.paused is None
