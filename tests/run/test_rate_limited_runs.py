"""A pipeline over a table at ten messages an interval: the sensor's demand, batches of ten, and one acknowledgement."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control import demand
from pipeline_platform.model.message import BatchInfo, Message
from pipeline_platform.model.options import Batcher, Producer, RateLimiting
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.producers import limits
from pipeline_platform.run import steps
from pipeline_platform.run.begin import begin
from pipeline_platform.run.flow import Flow
from pipeline_platform.source.contract import Refused
from tests.fixtures.flow import WINDOW, Filled, rows

TEN_A_DAY = RateLimiting(allowed_messages=10, interval=timedelta(days=1))


class Trackings(Pipeline):
    """Ten an interval, in batches of ten."""

    name = "trackings"
    producer = Producer(source="queue", concurrency=1, rate_limiting=TEN_A_DAY)
    batchers = {"tens": Batcher(batch_size=10)}

    def handle_message(self, message: Message, context: Any) -> Message:
        return message.put_data({"text": message.data.decode()}).put_batcher("tens")

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        return [message.put_data({"size": batch_info.size}) for message in messages]


def asked(flow: Flow) -> demand.Ask:
    """What the sensor would ask for now, with nothing under way."""
    bounds = limits(Trackings, flow.control, datetime.now(UTC))
    return demand.decide(flow.source.backlog(), bounds, demand.NOTHING, None)


def test_each_interval_s_ten_are_one_run_one_batch_and_one_acknowledgement(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow, acknowledged = filled(Trackings, (b"%d" % number for number in range(25))), []
    ack = TableQueue.ack

    def seen(self: TableQueue, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        acknowledged.append(len(ack_ids))
        return ack(self, ack_ref, ack_ids)

    monkeypatch.setattr(TableQueue, "ack", seen)

    for _ in range(2):
        ask = asked(flow)
        receive = begin(flow, origin="source", run_id="test", windows=[WINDOW], demand=ask.demand)
        steps.receive_messages(flow, receive)
        steps.handle_messages(flow, receive)
        steps.batch_messages(flow, receive, "tens")
        steps.decide(flow, receive)
        steps.publish(flow, receive)
        assert steps.acknowledge(flow, receive).acknowledged == 10
        assert asked(flow).because.startswith("the rate limit leaves nothing until")
        # The next interval: of another length, which has given nothing yet.
        longer = TEN_A_DAY.interval + timedelta(days=1)
        flow.control.set_rate_limiting("trackings", RateLimiting(allowed_messages=10, interval=longer))

    assert acknowledged == [10, 10]
    assert set(rows(flow, "tens")["data"]) == {'{"size":10}'}
    assert flow.source.backlog().messages == 5
