"""`Batcher(table=False)` in whole flows: no rows, changes of the option, replays, and a trace."""

from dataclasses import replace
from typing import Any

import pytest

from pipeline_platform import Batcher, BatchInfo, Message, Pipeline, Processors, Producer, TableBatcher
from pipeline_platform.cli.lake.deliveries import deliveries_of
from pipeline_platform.lake.erasing.erasing import searched_columns
from pipeline_platform.lake.maintenance.maintenance import maintain
from pipeline_platform.lake.removed_batchers import removed_batchers
from pipeline_platform.lake.replay import decided_messages, preview
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.options import Retention
from pipeline_platform.run import steps
from pipeline_platform.run.flow import Flow
from tests.fixtures.flow import WINDOW, handled, rows, run
from tests.fixtures.small_lake import Row, Shared

CALLS = Shared(0)


class Stored(Pipeline):
    """Stores rows in one batcher, and sends rows to a service in another one, which has a table at first."""

    name = "sending"
    producer = Producer(source="queue")
    processors = Processors(concurrency=1)
    batchers = {"kept": TableBatcher(schema=Row), "service": Batcher(schema=Row, batch_size=2)}

    def handle_message(self, message: Message, context: Any) -> Message | list[Message]:
        text = message.data.decode()
        if text.startswith("both"):
            return [message.put(Row(text=text), batcher=batcher) for batcher in ("kept", "service")]
        return message.put(Row(text=text), batcher="service")

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        CALLS.value += 1
        assert all(type(message.data) is Row for message in messages)
        assert len(messages) == batch_info.size <= 2
        return [message.failed("refused") if "bad" in message.data.text else message for message in messages]


class Sent(Stored):
    """The same without a table."""

    batchers = {**Stored.batchers, "service": Batcher(schema=Row, batch_size=2, table=False)}


class Careless(Sent):
    """Returns data that would fit no column."""

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        return [message.put(object()) for message in messages]


def as_(flow: Flow, pipeline: type[Pipeline]) -> Flow:
    """Return the flow after an edit of its class."""
    return replace(flow, producer=BoundProducer(pipeline))


def ends(flow: Flow) -> list[str]:
    return sorted(rows(flow, "outcomes")["outcome"])


def test_it_stores_outcomes_and_failures_and_no_rows(filled):
    flow = filled(Sent, [b"a", b"b", b"c", b"bad"])
    CALLS.value = 0

    run(flow)

    assert CALLS.value == 2
    assert ends(flow) == ["failed", "handled", "handled", "handled"]
    assert rows(flow, "failed")["reason"].to_list() == ["refused"]
    assert set(flow.lake.names("sending")) >= {"messages", "outcomes", "failed", "kept"}
    assert "service" not in flow.lake.names("sending")
    assert flow.source.backlog().messages == 0


@pytest.mark.parametrize(("payload", "outcome", "kept"), [(b"both", "handled", 1), (b"both bad", "failed", 0)])
def test_a_message_with_children_ends_with_them(filled, payload, outcome, kept):
    flow = filled(Sent, [payload])

    run(flow)

    assert ends(flow) == [outcome]
    assert rows(flow, "kept").height == kept


def test_the_returned_data_need_not_fit_a_column(filled):
    flow = filled(Careless, [b"a"])

    run(flow)

    assert ends(flow) == ["handled"]


def test_a_retry_calls_it_again_and_closes_the_failure(filled):
    flow = filled(Sent, [b"bad"])
    run(flow)

    class Fixed(Sent):
        handle_batch = Careless.handle_batch

    run(as_(flow, Fixed), "failed")

    assert sorted(rows(flow, "failed")["state"]) == ["closed", "open"]


def test_without_its_table_the_old_rows_stay_until_a_replay_replaces_them(filled):
    stored = filled(Stored, [b"a", b"b"])
    run(stored)
    sent, calls = as_(stored, Sent), CALLS.value
    sent.source.enqueue([b"c"])

    run(sent)

    assert sorted(rows(stored, "service")["text"]) == ["a", "b"]
    assert removed_batchers(sent.tables) == ["service"]
    assert "service" in maintain(sent.tables, Retention())
    (window,) = preview(sent.tables, decided_messages(sent.tables, [WINDOW]))
    assert (window.messages, window.rows) == (3, {"service": 2})
    run(sent, "messages")
    assert rows(stored, "service").height == 0
    assert CALLS.value == calls + 3
    assert ends(sent) == ["handled"] * 3


def test_with_its_table_again_only_new_messages_and_replays_add_rows(filled):
    sent = filled(Sent, [b"a"])
    run(sent)
    stored = as_(sent, Stored)
    stored.source.enqueue([b"b"])

    run(stored)

    assert sorted(rows(stored, "service")["text"]) == ["b"]
    run(stored, "messages")
    assert sorted(rows(stored, "service")["text"]) == ["a", "b"]


def test_a_receive_that_was_decided_with_a_table_is_published_after_the_change(filled):
    stored = filled(Stored, [b"a"])
    receive = handled(stored)
    steps.batch_messages(stored, receive)
    steps.decide(stored, receive)
    sent = as_(stored, Sent)

    run(sent)

    assert rows(stored, "service")["text"].to_list() == ["a"]


def test_a_trace_and_an_erasure_need_no_table(filled):
    flow = filled(Sent, [b"a"])
    run(flow)

    (delivery,) = deliveries_of(flow, rows(flow, "messages")["message_id"][0])

    assert (delivery.outcome, delivery.rows) == ("handled", [])
    assert Tables(flow.lake, Sent).refusals() == {}
    assert list(searched_columns(flow.tables)) == ["kept"]
