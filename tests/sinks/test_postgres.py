"""Values in PostgreSQL, one row per key, and connections. The promises of all sinks are in test_sink_contract."""

import enum
from collections.abc import Iterator
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
from pipeline_platform.run.flow import Flow
from pipeline_platform.sinks.contract import Publication, SinkError
from pipeline_platform.sinks.postgres import PostgresSink
from tests.fixtures.flow import run
from tests.fixtures.postgres import administrator, cut_all_others, new_database


class Colour(enum.Enum):
    RED = "red"


class Part(BaseModel):
    size: int
    raw: bytes = b"\xff\x00"


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
    raws: list[bytes]
    files: dict[str, bytes]
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
    raws=[b"\xff\x00", b""],
    files={"x": b"\x00"},
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
        texts = {b"empty": "", b"null": None}
        values: dict[str, Any] = {"text": texts[message.data]} if message.data in texts else {}
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
        "part": {"size": 3, "raw": "_wA="},
        "sizes": {"x": 1},
        "raws": ["_wA=", ""],
        "files": {"x": "AA=="},
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


def test_sessions_that_the_server_ends_are_opened_again(filled, warehouse, postgres_url):
    flow = with_sink(filled(Typed, [b"all"]), warehouse)
    run(flow)
    with administrator(postgres_url) as connection:
        assert cut_all_others(connection)
    flow.source.send([b"all"])
    run(flow)
    assert len(stored(postgres_url)) == 2


@pytest.mark.parametrize("url", ["sqlite:///x.sqlite", "mysql://h/d", "postgresql://u:p@x@h/d"])
def test_an_unsuitable_address_is_refused(url):
    with pytest.raises(SinkError, match="warehouse"):
        PostgresSink(name="warehouse", url=url).is_published("typed", "values", "a")


def test_a_database_that_cannot_store_every_text_is_refused(postgres_server):
    with (
        new_database(postgres_server, "LATIN1") as url,
        closing(PostgresSink(name="warehouse", url=url)) as sink,
        pytest.raises(SinkError, match="the database has the encoding LATIN1, which cannot store every text"),
    ):
        sink.ensure("changes", "rows", CHANGES)


CHANGES = pa.schema(
    [("number", pa.int64()), ("version", pa.int64()), ("receive_id", pa.string()), ("window", pa.string())]
)


@pytest.fixture
def by_number(postgres_url: str) -> Iterator[PostgresSink]:
    with closing(PostgresSink(name="warehouse", url=postgres_url, key=("number",), order="version")) as sink:
        sink.ensure("changes", "rows", CHANGES)
        yield sink


def publish(
    sink: PostgresSink, receive_id: str, *rows: tuple[int | None, int | None], window: str = "w", **more: Any
) -> None:
    values = [dict(zip(CHANGES.names, (*row, receive_id, window), strict=True)) for row in rows]
    batch = pa.RecordBatch.from_pylist(values, schema=CHANGES)
    defaults = {"columns": CHANGES, "windows": (window,), "replaces": (), "rows": lambda: iter([batch])}
    publication = Publication(receive_id, "changes", "rows", started_at=datetime.now(UTC), **defaults | more)
    assert sink.publish(publication)


def newest(url: str) -> list[tuple[int | None, int | None, str]]:
    with psycopg.connect(url) as connection:
        found = "SELECT number, version, receive_id FROM changes_rows ORDER BY number NULLS FIRST"
        return connection.execute(found).fetchall()


def test_a_key_has_its_newest_row(by_number, postgres_url):
    publish(by_number, "a", (1, 2), (1, 1), (2, None), (3, 1), (3, 1), (None, 1), (None, 2))
    assert newest(postgres_url) == [(None, 2, "a"), (1, 2, "a"), (2, None, "a"), (3, 1, "a")]
    publish(by_number, "b", (1, 1), (2, 0), (3, 1), (None, 1), (4, None))
    assert newest(postgres_url) == [(None, 2, "a"), (1, 2, "a"), (2, 0, "b"), (3, 1, "b"), (4, None, "b")]


def test_a_replaced_row_keeps_columns_of_users_and_of_removed_fields(by_number, postgres_url):
    with_note = CHANGES.append(pa.field("note", pa.string()))
    by_number.ensure("changes", "rows", with_note)
    batch = pa.RecordBatch.from_pylist([{"number": 1, "version": 1, "note": "old"}], schema=with_note)
    publish(by_number, "a", columns=with_note, rows=lambda: iter([batch]))
    with psycopg.connect(postgres_url) as connection:
        connection.execute("ALTER TABLE changes_rows ADD COLUMN seen boolean")
        connection.execute("UPDATE changes_rows SET seen = true")
    publish(by_number, "b", (1, 2), (2, 1))
    with psycopg.connect(postgres_url) as connection:
        found = connection.execute("SELECT number, version, note, seen FROM changes_rows ORDER BY number").fetchall()
    assert found == [(1, 2, "old", True), (2, 1, None, None)]


def test_a_replay_overwrites_no_newer_row_and_brings_no_older_row_back(by_number, postgres_url):
    publish(by_number, "a", (1, 1), (2, 1), (3, 1))
    publish(by_number, "b", (1, 2), (3, 2), window="later")
    publish(by_number, "replayed", (1, 1), (4, 1), replaces=("a",))
    assert newest(postgres_url) == [(1, 2, "b"), (3, 2, "b"), (4, 1, "replayed")]
    publish(by_number, "again", (3, 2), window="later", replaces=("b",))
    assert newest(postgres_url) == [(3, 2, "again"), (4, 1, "replayed")]


def test_a_key_of_another_table_is_refused(by_number, warehouse, postgres_url):
    with pytest.raises(SinkError, match=r"unique index .* over \('number',\), and key is \(\)\. Drop the index"):
        warehouse.ensure("changes", "rows", CHANGES)
    warehouse.ensure("changes", "others", CHANGES)
    for receive_id in "ab":
        publication = Publication(receive_id, "changes", "others", CHANGES, datetime.now(UTC), ("w",), (), rows=list)
        batch = pa.RecordBatch.from_pylist([{"number": 1, "receive_id": receive_id}], schema=CHANGES)
        warehouse.publish(replace(publication, rows=lambda batch=batch: iter([batch])))
    with pytest.raises(SinkError, match=r"changes_others has several rows of a key"):
        by_number.ensure("changes", "others", CHANGES)
