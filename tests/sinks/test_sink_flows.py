"""Whole flows with a sink: decided receives, replays, outages and texts. Each kind of sink keeps its promises."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from pydantic import BaseModel, Field

from pipeline_platform import Batcher, BatchInfo, Message, Pipeline, Producer, TableBatcher
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.run import steps
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.receive_state import Phase, ReceiveState
from pipeline_platform.sinks.contract import Sink, SinkAwayError
from pipeline_platform.testing import Store
from tests.fixtures.flow import begun, finish, handled, kinds, rows, run
from tests.fixtures.table_queue import do
from tests.sinks.test_sink_contract import SINKS


class Line(BaseModel):
    text: str
    words: list[str]


class Lines(Pipeline):
    """Each payload makes a row."""

    name = "lines"
    producer = Producer(source="queue")
    batchers: ClassVar[Any] = {"lines": TableBatcher(schema=Line, sink="warehouse")}

    def handle_message(self, message: Message, context: Any) -> Message:
        text = message.data.decode()
        return message.put(Line(text=text.strip("*"), words=text.split()), batcher="lines")


class BatchedLines(Lines):
    """Makes the rows in batches."""

    name = "lines"
    batchers: ClassVar[Any] = {"lines": Batcher(schema=Line, sink="warehouse")}

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        return messages


class BlocksOfLines(Pipeline):
    """Makes the rows in blocks."""

    name = "lines"
    producer = Producer(source="queue")
    batchers = Lines.batchers

    def handle_messages(self, messages: pa.Table, context: Any) -> pa.Table:
        texts, count = messages["data"].cast(pa.string()), messages.num_rows
        columns = {"text": texts, "words": pa.array([[]] * count, pa.list_(pa.string())), "batcher": ["lines"] * count}
        return pa.table(dict(zip(messages.schema.names, messages.columns, strict=True)) | columns)


@pytest.fixture
def warehouse(request: pytest.FixtureRequest) -> Iterator[tuple[Sink, Store]]:
    new, store = SINKS["postgresql"](request)
    with closing(new()) as sink:
        yield sink, store


def with_sink(flow: Flow, sink: Sink) -> Flow:
    return replace(flow, sinks={"lines": sink})


def stored(warehouse: tuple[Sink, Store]) -> list[tuple[str, str]]:
    sink, store = warehouse
    return sorted((row["message_id"], row["receive_id"]) for row in store.read(sink, "lines", "lines"))


def test_a_decided_receive_is_unpublished_until_the_sink_has_it(filled, warehouse):
    flow = filled(Lines, [b"a"])
    warehouse[0].ensure("lines", "lines", flow.tables["lines"].schema)
    receive = handled(flow)
    steps.decide(flow, receive)
    steps.publish(flow, receive)  # without the sink
    again = with_sink(flow, warehouse[0])
    assert ReceiveState(again, receive.receive_id).phase is Phase.DECIDED
    run(again)
    assert stored(warehouse) == [("1", receive.receive_id)]
    assert again.source.backlog().messages == 0


def test_a_receive_is_finished_although_the_sink_forgot_its_id(filled, warehouse):
    sink, store = warehouse
    flow = with_sink(filled(Lines, [b"a"]), sink)
    receive = handled(flow)
    steps.decide(flow, receive)
    steps.publish(flow, receive)
    flow.source.send([b"b"])
    later = handled(flow)
    steps.decide(flow, later)
    steps.publish(flow, later)
    store.forget(sink, "lines", "lines")
    assert ReceiveState(flow, receive.receive_id).phase is Phase.DECIDED
    finish(flow, receive)
    assert stored(warehouse) == [("1", receive.receive_id), ("2", later.receive_id)]


def test_a_replay_replaces_the_rows_of_its_window(filled, warehouse):
    flow = with_sink(filled(Lines, [b"a", b"b"]), warehouse[0])
    run(flow)
    replayed = run(flow, "messages")
    assert stored(warehouse) == [("1", replayed.receive_id), ("2", replayed.receive_id)]
    assert len(rows(flow, "lines")) == 2


class Priced(BaseModel):
    price: Decimal


class ShortPriced(BaseModel):
    price: Decimal = Field(max_digits=10, decimal_places=2)


def test_a_sink_gets_the_columns_of_the_table_in_the_lake(filled, warehouse):
    """The table keeps its digits when the field gets other limits."""

    class Prices(Lines):
        name = "prices"
        batchers: ClassVar[Any] = {"lines": TableBatcher(schema=Priced)}

        def handle_message(self, message: Message, context: Any) -> Message:
            return message.put({"price": Decimal(message.data.decode())}, batcher="lines")

    class ShortPrices(Prices):
        name = "prices"
        batchers: ClassVar[Any] = {"lines": TableBatcher(schema=ShortPriced, sink="warehouse")}

    run(filled(Prices, [b"1.5"]))
    sink, store = warehouse
    flow = with_sink(filled(ShortPrices, [b"2.125"]), sink)
    run(flow)
    assert rows(flow, "lines")["price"].sort().to_list() == [Decimal("1.5"), Decimal("2.125")]
    assert [row["price"] for row in store.read(sink, "prices", "lines")] == [Decimal("2.125")]


def test_a_text_that_a_sink_cannot_store_fails_its_message_alone(filled, warehouse):
    flow = with_sink(filled(Lines, [b"a", b"b\0", b"inside \0**"]), warehouse[0])
    run(flow)
    assert [message_id for message_id, _ in stored(warehouse)] == ["1"]
    assert {*kinds(flow).values()} == {"ColumnError"}


@pytest.mark.parametrize("kind", [Lines, BatchedLines, BlocksOfLines])
def test_an_id_that_a_sink_cannot_store_fails_its_message_alone(filled, warehouse, tmp_path, kind):
    url = f"sqlite:///{tmp_path}/texts.sqlite"
    do(url, "CREATE TABLE messages (id TEXT PRIMARY KEY, data TEXT)")
    for key in "1", "2\0", "3":
        do(url, "INSERT INTO messages VALUES (:key, :data)", key=key, data=key.strip("\0"))
    queue = TableQueue(name="queue", url=url)
    queue.create()
    flow = replace(with_sink(filled(kind, []), warehouse[0]), source=queue)
    run(flow)
    assert [message_id for message_id, _ in stored(warehouse)] == ["1", "3"]
    assert kinds(flow) == {"2": "ColumnError"}


def test_a_run_leases_nothing_while_the_sink_is_unavailable(filled, warehouse):
    sink, store = warehouse
    away = store.away(sink)
    flow = with_sink(filled(Lines, [b"a"]), away)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(away), "patience", away.patience._replace(within_s=0.5))
        with pytest.raises(SinkAwayError):
            begun(flow)
    assert flow.source.backlog().messages == 1
