"""The order of failures of a partition: of messages without a sequence, and of receives that are not published yet."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from pipeline_platform import Message, Share
from pipeline_platform.lake.decisions.ledger import Receive
from pipeline_platform.lake.failures.failure_events import Selection
from pipeline_platform.run import steps
from pipeline_platform.run.flow import Flow
from tests.fixtures.flow import flow_of, kinds, run, worked
from tests.fixtures.small_lake import Memory
from tests.run.test_held import Held, HeldBatches, failures, numbers, payloads


class RefusedEarly(HeldBatches):
    """Messages with `refuse` fail in `handle_message`, before the batches of earlier messages fail."""

    name = "refused_early"

    def handle_message(self, message: Message, context: Any) -> Message:
        if message.data.endswith(b"refuse") and message.attempt == 1:
            raise ValueError("as told")
        return super().handle_message(message, context)


class Fresh(Memory):
    """Delivers each message for the first time, and few of them."""

    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        return [Share(messages=len(self.deliveries_))]

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        for rows in super().read(share, receive_id):
            at = rows.schema.get_field_index("redelivered")
            yield rows.set_column(at, "redelivered", pa.repeat(False, rows.num_rows))


@pytest.fixture(params=["1 2 fail", "1 2 refuse"])
def failed(local_worker, tmp_path, request) -> Flow:
    """A partition in which both messages fail. They have no sequence, and the later has the smaller id."""
    both = (("b", b"1 1 fail"), ("a", request.param.encode()))
    flow = flow_of(tmp_path, RefusedEarly, Fresh(deliveries_=both), worker=local_worker)
    run(flow)
    assert failures(flow, Selection()) == 2
    return flow


def test_the_later_failure_waits_for_the_earlier_which_a_retry_of_a_part_handles_first(failed):
    run(failed, "failed", selection=Selection(message_id="a"))
    assert failures(failed, Selection()) == 2
    run(failed, "failed", demand=1)
    assert numbers(failed) == {"1": [1]}


def test_failures_of_a_receive_that_cannot_be_published_yet_hold_their_partitions(filled, monkeypatch):
    flow, publish = filled(Held, payloads(6, at_4="fail")), steps.publish
    stuck = worked(flow)
    steps.decide(flow, stuck)
    flow.control.let_go("test")

    def refuse(flow: Flow, receive: Receive) -> Any:
        if receive.receive_id == stuck.receive_id:
            raise OSError("a table cannot be written")
        return publish(flow, receive)

    monkeypatch.setattr(steps, "publish", refuse)
    flow.source.send([b"1 7", b"2 8"])
    run(flow)
    assert (numbers(flow), kinds(flow)) == ({"2": [8]}, {"1 7": "held"})
    monkeypatch.undo()
    run(flow)
    run(flow, "failed")
    assert numbers(flow) == {"0": [0, 3], "1": [1, 4, 7], "2": [2, 5, 8]}
