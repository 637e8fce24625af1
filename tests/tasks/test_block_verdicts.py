"""Payloads that `columns` refuses fail with the model's error, even if the callback changes the row."""

from typing import Any

import polars as pl
import pytest
from pydantic import BaseModel

from pipeline_platform import Message, Pipeline, TableBatcher, columns
from pipeline_platform.testing import test_batch
from tests.fixtures.obedient import Obedient


class Page(BaseModel):
    page: str


class Loose(BaseModel):
    page: str | None = None
    number: int = 0


def kind_of(made: Any, model: type[BaseModel] = Page) -> type[Pipeline]:
    class Pages(Pipeline):
        name = "pages"
        producer = Obedient.producer
        batchers = {"default": TableBatcher(schema=model)}

        def handle_messages(self, messages: pl.DataFrame, context: Any) -> pl.DataFrame:
            return made(messages)

    return Pages


def seen(pipeline: type[Pipeline], *payloads: str) -> list[tuple[str, str, str]]:
    return [
        (message.failure.kind, message.failure.reason, message.failure.stage)
        for message in test_batch(pipeline, payloads).failed
    ]


def as_ok(messages: pl.DataFrame) -> pl.DataFrame:
    return columns(messages, Page).with_columns(status=pl.lit("ok"))


def as_failed(messages: pl.DataFrame) -> pl.DataFrame:
    return columns(messages, Page).with_columns(status=pl.lit("failed"), reason=pl.lit("as told"))


def without_decoding(messages: pl.DataFrame) -> pl.DataFrame:
    return columns(messages, Page)


@pytest.mark.parametrize("made", [as_ok, without_decoding])
def test_a_refused_payload_fails_as_it_does_in_rows(made):
    class Rows(Pipeline):
        name = "rows"
        producer = Obedient.producer
        batchers = {"default": TableBatcher(schema=Page)}

        def handle_message(self, message: Message, context: Any) -> Message:
            return message.put(message.json(Page))

    payloads = ['{"page": "a"}', '{"page": 5}', "{}"]
    in_rows = [(kind, reason) for kind, reason, _ in seen(Rows, *payloads)]
    assert [(kind, reason) for kind, reason, _ in seen(kind_of(made), *payloads)] == in_rows
    assert [kind for kind, _ in in_rows] == ["ValidationError", "ValidationError"]


def test_a_refused_payload_never_becomes_a_row_of_nulls():
    def made(messages: pl.DataFrame) -> pl.DataFrame:
        return columns(messages, Loose).with_columns(status=pl.lit("ok"), number=pl.lit(0))

    result = test_batch(kind_of(made, Loose), ["{}", '{"page": 5}'])
    assert [message.data["page"] for message in result.successful] == [None]
    assert [message.failure.kind for message in result.failed] == ["ValidationError"]


def test_a_reason_that_the_callback_gives_is_kept():
    assert seen(kind_of(as_failed), '{"page": 5}') == [("failed", "as told", "handle_messages")]


def test_a_later_call_may_decode_what_an_earlier_one_refused():
    class Number(BaseModel):
        page: int

    def made(messages: pl.DataFrame) -> pl.DataFrame:
        known = columns(messages, Page)
        refused = messages.filter(known["status"] == "failed")
        numbers = columns(refused, Number).with_columns(pl.col("page").cast(pl.String))
        return pl.concat([known.filter(pl.col("status") == "ok"), numbers.select(known.columns)])

    result = test_batch(kind_of(made), ['{"page": "a"}', '{"page": 5}'])
    assert [message.data["page"] for message in result.successful] == ["a", "5"]


def test_a_value_that_fits_no_column_has_the_kind_and_stage_of_rows():
    class Number(BaseModel):
        number: int

    def made(messages: pl.DataFrame) -> pl.DataFrame:
        return columns(messages, Number)

    ((kind, reason, stage),) = seen(kind_of(made, Number), '{"number": 99999999999999999999}')
    assert (kind, stage) == ("ColumnError", "lake")
    assert reason.startswith("number does not fit")
