"""Rows of batchers in PostgreSQL, each once: a real server, with crashes, lost answers and several publishers."""

import enum
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, ClassVar
from uuid import UUID

import psycopg
import pyarrow as pa
import pytest
from psycopg.rows import dict_row
from pydantic import BaseModel, Json

from pipeline_platform import Batcher, BatchInfo, Message, Pipeline, Producer, TableBatcher
from pipeline_platform.run import steps
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.receive_state import Phase, ReceiveState
from pipeline_platform.sinks.contract import Publication, SinkAwayError, SinkError
from pipeline_platform.sinks.postgres import PostgresSink
from tests.fixtures.flow import begun, handled, kinds, rows, run
from tests.fixtures.postgres import administrator, cut_all_others


class Colour(enum.Enum):
    RED = "red"


class Part(BaseModel):
    size: int


class Everything(BaseModel):
    number: int
    real: float
    text: str | None
    raw: bytes
    flag: bool
    price: Decimal
    at: datetime
    day: date
    clock: time
    took: timedelta
    id: UUID
    colour: Colour
    tags: list[str]
    part: Part
    sizes: dict[str, int]
    free: Json[Any] | None = None


VALUES = Everything(
    number=-(2**63),
    real=float("inf"),
    text='quoted "text", with a comma,\nlines, \\N and é',
    raw=b"\x00\xff\\",
    flag=True,
    price=Decimal("12345678901234567.890000001"),
    at=datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC),
    day=date(1, 1, 1),
    clock=time(23, 59, 59, 999_999),
    took=timedelta(days=-1, microseconds=1),
    id=UUID(int=7),
    colour=Colour.RED,
    tags=["a", ""],
    part=Part(size=3),
    sizes={"x": 1},
)


class Typed(Pipeline):
    """Each payload makes a row, with an empty and a null text."""

    name = "typed"
    producer = Producer(source="queue")
    batchers: ClassVar[Any] = {
        "values": TableBatcher(schema=Everything, sink="warehouse"),
        "batched": Batcher(sink="warehouse"),
    }

    def handle_message(self, message: Message, context: Any) -> Message:
        if message.data == b"batch":
            return message.put({"said": "batch"}, batcher="batched")
        texts = {b"empty": "", b"null": None, b"nul": "a\0b", b"inside": VALUES.text}
        values: dict[str, Any] = {"text": texts[message.data]} if message.data in texts else {}
        if message.data == b"inside":
            values["tags"] = ["a\0"]
        return message.put(VALUES.model_copy(update=values), batcher="values")

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        return messages


@pytest.fixture
def warehouse(postgres_url: str) -> Iterator[PostgresSink]:
    with closing(PostgresSink(name="warehouse", url=postgres_url)) as sink:
        yield sink


def with_sink(flow: Flow, sink: PostgresSink) -> Flow:
    return replace(flow, sinks=dict.fromkeys(flow.pipeline.batchers, sink))


def stored(url: str, table: str = "typed_values") -> list[dict[str, Any]]:
    with psycopg.connect(url, row_factory=dict_row) as connection:
        return connection.execute(f"SELECT * FROM {table} ORDER BY message_id").fetchall()


def test_every_value_arrives_unchanged(filled, warehouse, postgres_url):
    flow = with_sink(filled(Typed, [b"all", b"empty", b"null", b"batch"]), warehouse)
    receive = run(flow)
    first, empty, null = stored(postgres_url)
    expected = {
        "number": VALUES.number,
        "real": VALUES.real,
        "text": VALUES.text,
        "raw": VALUES.raw,
        "flag": True,
        "price": VALUES.price,
        "day": VALUES.day,
        "id": str(VALUES.id),
        "colour": "red",
        "tags": ["a", ""],
        "part": {"size": 3},
        "sizes": {"x": 1},
        "free": None,
        "receive_id": receive.receive_id,
        "message_id": "1",
        "window": receive.window,
    }
    assert {name: first[name] for name in expected} == expected
    assert (empty["text"], null["text"]) == ("", None)
    (batched,) = stored(postgres_url, "typed_batched")
    assert batched["data"] == '{"said":"batch"}'
    with psycopg.connect(postgres_url) as connection:
        row = connection.execute('SELECT extract(epoch FROM "at"), clock::text FROM typed_values').fetchone()
    assert row is not None
    assert row[0] == Decimal("253402300799.999999")


def test_a_text_that_the_sink_cannot_store_fails_its_message_alone(filled, warehouse, postgres_url):
    flow = with_sink(filled(Typed, [b"all", b"nul", b"inside"]), warehouse)
    run(flow)
    assert [row["message_id"] for row in stored(postgres_url)] == ["1"]
    assert kinds(flow) == {"nul": "ColumnError", "inside": "ColumnError"}


def test_a_receive_is_stored_once(filled, warehouse, postgres_url):
    flow = with_sink(filled(Typed, [b"all"] * 3), warehouse)
    receive = handled(flow)
    steps.decide(flow, receive)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda _: steps.publish(flow, receive), range(8)))
    assert len(stored(postgres_url)) == 3
    assert ReceiveState(flow, receive.receive_id).phase is Phase.PUBLISHED


def test_a_decided_receive_is_unpublished_until_the_sink_has_it(filled, warehouse, postgres_url):
    flow = filled(Typed, [b"all"])
    warehouse.ensure("typed", "values", flow.tables["values"].schema)
    receive = handled(flow)
    steps.decide(flow, receive)
    steps.publish(flow, receive)  # without the sink
    again = with_sink(flow, warehouse)
    assert ReceiveState(again, receive.receive_id).phase is Phase.DECIDED
    run(again)
    assert len(stored(postgres_url)) == 1
    assert again.source.backlog().messages == 0


def test_an_answer_that_is_lost_after_the_commit_stores_nothing_twice(
    filled, warehouse, postgres_url, postgres_server, monkeypatch
):
    flow = with_sink(filled(Typed, [b"all"] * 2), warehouse)
    real, calls = PostgresSink.publish, []

    def publish(self: PostgresSink, publication: Publication) -> bool:
        calls.append(real(self, publication))
        if len(calls) == 1:
            raise SinkAwayError("the answer is lost")
        return calls[-1]

    monkeypatch.setattr(PostgresSink, "publish", publish)
    run(flow)
    assert calls == [True, False]
    assert len(stored(postgres_url)) == 2


def test_sessions_that_the_server_ends_are_opened_again(filled, warehouse, postgres_url):
    flow = with_sink(filled(Typed, [b"all"]), warehouse)
    run(flow)
    with administrator(postgres_url) as connection:
        assert cut_all_others(connection)
    flow.source.send([b"all"])
    run(flow)
    assert len(stored(postgres_url)) == 2


def test_a_replay_replaces_the_rows_of_its_window(filled, warehouse, postgres_url):
    flow = with_sink(filled(Typed, [b"all", b"empty"]), warehouse)
    run(flow)
    replayed = run(flow, "messages")
    assert [(row["message_id"], row["receive_id"]) for row in stored(postgres_url)] == [
        ("1", replayed.receive_id),
        ("2", replayed.receive_id),
    ]
    assert len(rows(flow, "values")) == 2


def test_a_new_field_becomes_a_column_and_a_changed_type_is_refused(warehouse, postgres_url):
    columns = pa.schema([("number", pa.int64()), ("receive_id", pa.string()), ("window", pa.string())])
    warehouse.ensure("typed", "values", columns)
    warehouse.ensure("typed", "values", columns.append(pa.field("note", pa.string())))
    with psycopg.connect(postgres_url) as connection:
        connection.execute("INSERT INTO typed_values (number, note) VALUES (1, 'x')")
    with pytest.raises(SinkError, match=r"typed_values.number has the type BIGINT"):
        warehouse.ensure("typed", "values", columns.set(0, pa.field("number", pa.string())))


def test_a_run_leases_nothing_while_the_sink_is_unavailable(filled):
    sink = PostgresSink(name="warehouse", url="postgresql://loader:secret@127.0.0.1:1/none")
    flow = with_sink(filled(Typed, [b"all"]), sink)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PostgresSink, "patience", sink.patience._replace(within_s=0.5))
        with pytest.raises(SinkAwayError) as raised:
            begun(flow)
    assert "secret" not in str(raised.value)
    assert flow.source.backlog().messages == 1


@pytest.mark.parametrize("url", ["sqlite:///x.sqlite", "mysql://h/d", "postgresql://u:p@x@h/d"])
def test_an_unsuitable_address_is_refused(url):
    with pytest.raises(SinkError, match="warehouse"):
        PostgresSink(name="warehouse", url=url).is_published("typed", "values", "a")
