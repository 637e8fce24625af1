"""A table keeps the precision of its Decimals when fields of its model get other limits."""

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pydantic import BaseModel, Field

from pipeline_platform import Batcher, Message, Pipeline, TableBatcher, columns
from pipeline_platform.run.flow import Flow
from tests.fixtures.flow import rows, run
from tests.fixtures.obedient import Obedient


class Line(BaseModel):
    price: Decimal


class Order(BaseModel):
    total: Decimal
    lines: list[Line] = []


class ShortLine(BaseModel):
    price: Decimal = Field(max_digits=5, decimal_places=2)


class ShortOrder(BaseModel):
    total: Decimal = Field(max_digits=12, decimal_places=2)
    lines: list[ShortLine] = []
    tip: Decimal = Field(Decimal("0.1"), max_digits=4, decimal_places=1)


def in_rows(model: type[BaseModel]) -> type[Pipeline]:
    class Orders(Pipeline):
        name = "orders"
        producer = Obedient.producer
        batchers = {"default": TableBatcher(schema=model)}

        def handle_message(self, message: Message, context: Any) -> Message:
            return message.put(message.json(model))

    return Orders


def in_batches(model: type[BaseModel]) -> type[Pipeline]:
    class Orders(in_rows(model)):  # type: ignore[misc]
        name = "orders"
        batchers = {"default": Batcher(schema=model)}

        def handle_batch(self, batcher: str, messages: list[Message], batch_info: Any, context: Any) -> list[Message]:
            return messages

    return Orders


def in_blocks(model: type[BaseModel]) -> type[Pipeline]:
    class Orders(Pipeline):
        name = "orders"
        producer = Obedient.producer
        batchers = {"default": TableBatcher(schema=model)}

        def handle_messages(self, messages: pa.Table, context: Any) -> pa.Table:
            return columns(messages, model)

    return Orders


def types(flow: Flow) -> dict[str, str]:
    return {field.name: str(field.type) for field in DeltaTable(flow.tables["default"].uri).schema().fields}


@pytest.mark.parametrize("lane", [in_rows, in_batches, in_blocks])
def test_a_table_keeps_its_digits_and_stays_writable_and_readable(filled, lane):
    run(filled(in_rows(Order), [b'{"total": 1.123456789, "lines": [{"price": 1}]}']))
    before = filled(lane(ShortOrder), [b'{"total": 2.25, "lines": [{"price": 2.5}]}', b'{"total": 3.125}'])

    run(before)

    assert types(before)["total"] == 'PrimitiveType("decimal(38,9)")'
    assert types(before)["tip"] == 'PrimitiveType("decimal(4,1)")', "a new column has the digits of its field"
    written = rows(before, "default").sort("total")
    assert written["total"].to_list() == [Decimal("1.123456789"), Decimal("2.25")]
    assert written["lines"].to_list() == [[{"price": Decimal(1)}], [{"price": Decimal("2.5")}]]
    assert rows(before, "failed")["kind"].to_list() == ["ValidationError"]


def test_a_new_table_has_the_digits_of_its_fields_and_keeps_them(filled):
    flow = filled(in_rows(ShortOrder), [b'{"total": 2.25}'])
    run(flow)
    assert types(flow)["total"] == 'PrimitiveType("decimal(12,2)")'

    wide = filled(in_rows(Order), [b'{"total": 3.125}', b'{"total": 3.5}'])
    run(wide)

    assert types(wide)["total"] == 'PrimitiveType("decimal(12,2)")'
    assert rows(wide, "default")["total"].sort().to_list() == [Decimal("2.25"), Decimal("3.50")]
    (reason,) = rows(wide, "failed")["reason"].to_list()
    assert reason == "total does not fit its column, which stores 10 digits before the decimal point and 2 after it"
