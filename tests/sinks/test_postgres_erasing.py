"""Erasing of rows in PostgreSQL, together with the rows in the lake."""

from dataclasses import replace
from typing import Any

import psycopg
import pytest
from pydantic import BaseModel

from pipeline_platform import Message, Pipeline, Producer, TableBatcher
from pipeline_platform.lake.erasing.erasing import Erased, Erasing, searched_columns
from pipeline_platform.lake.erasing.erasure_choice import ErasureChoice
from pipeline_platform.lake.tables import Tables
from pipeline_platform.sinks.postgres import PostgresSink
from tests.fixtures.flow import rows, run


class Line(BaseModel):
    text: str


class Lines(Pipeline):
    """Stores each payload also in the sink."""

    name = "lines"
    producer = Producer(source="queue")
    batchers = {"lines": TableBatcher(schema=Line, sink="warehouse")}

    def handle_message(self, message: Message, context: Any) -> Message:
        return message.put(Line(text=message.data.decode()), batcher="lines")


def erase(tables: Tables, sink: PostgresSink) -> Erased:
    tables.sinks = {"lines": sink}
    choice = ErasureChoice.of(searched_columns(tables), ["queue"], where=["text=anna"])
    return Erasing(tables, choice).erase(0)


@pytest.fixture
def flow(filled, postgres_url):
    sink = PostgresSink(name="warehouse", url=postgres_url)
    flow = replace(filled(Lines, [b"anna", b"ben", b"anna"]), sinks={"lines": sink})
    run(flow)
    return flow


def stored(url: str) -> list[str]:
    with psycopg.connect(url) as connection:
        return [text for (text,) in connection.execute("SELECT text FROM lines_lines ORDER BY text").fetchall()]


def test_rows_are_erased_in_the_sink_too(flow, postgres_url):
    assert stored(postgres_url) == ["anna", "anna", "ben"]
    erased = erase(flow.tables, flow.sinks["lines"])
    assert (erased.is_complete, erased.sinks) == (True, {"lines": 2})
    assert stored(postgres_url) == [*rows(flow, "lines")["text"]] == ["ben"]


def test_after_an_outage_of_the_sink_the_same_command_finds_the_rows(flow, postgres_url):
    away = PostgresSink(name="warehouse", url="postgresql://user@127.0.0.1:1/nothing")
    erased = erase(flow.tables, away)
    assert not erased.is_complete
    assert [*rows(flow, "lines")["text"]] == ["ben"]
    erased = erase(flow.tables, flow.sinks["lines"])
    assert (erased.is_complete, erased.sinks) == (True, {"lines": 2})
    assert stored(postgres_url) == ["ben"]


def test_a_sink_without_the_table_has_nothing_to_erase(postgres_url):
    assert PostgresSink(name="warehouse", url=postgres_url).erase("lines", "lines", {"queue": ["1"]}) == 0


def test_an_id_that_the_sink_cannot_store_has_no_rows_there(flow, postgres_url):
    (message_id, *_), sink = rows(flow, "lines")["message_id"], flow.sinks["lines"]
    assert sink.erase("lines", "lines", {"queue": ["a\0", message_id]}) == 1
