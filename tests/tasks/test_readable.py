"""Values that some readers of a table cannot read: their rows fail, in every lane."""

from collections.abc import Iterator
from datetime import date, datetime
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pydantic import BaseModel

from pipeline_platform import Pipeline, Producer, Share, SourceError, TableBatcher
from pipeline_platform.lake.readable import refuse_unreadable
from pipeline_platform.model.columns.schema import ColumnError
from tests.fixtures.small_lake import Memory, handled, outcomes, received, rows_of

BROKEN = pa.Array.from_buffers(pa.string(), 3, pa.array([b"good", b"\xff\xfe", b"fine"]).buffers())
LATE = pa.array([0, 400_000_000, 1], pa.int32()).view(pa.date32())
YEAR_10000 = pa.array([0, 253_402_300_800_000_000, None], pa.int64()).view(pa.timestamp("us", "UTC"))
PLACES = pa.array([0, 1, 2, 3], pa.int32())


@pytest.mark.parametrize(
    "bad", [BROKEN, LATE, YEAR_10000, YEAR_10000.cast(pa.timestamp("us"))], ids=["text", "day", "time", "no zone"]
)
@pytest.mark.parametrize(
    "nest",
    [
        lambda values: values,
        lambda values: pa.StructArray.from_arrays([values], ["x"]),
        lambda values: pa.ListArray.from_arrays(PLACES, values),
        lambda values: pa.MapArray.from_arrays(PLACES, pa.array(["a", "b", "c"]), values),
        lambda values: pa.ListArray.from_arrays(PLACES, pa.StructArray.from_arrays([values], ["x"])),
    ],
    ids=["plain", "struct", "list", "map", "list of structs"],
)
def test_only_the_value_is_refused(bad, nest):
    column = nest(bad)
    with pytest.raises(ColumnError, match=r"^v has "):
        refuse_unreadable(["v"], [column])
    for start in 0, 2:
        refuse_unreadable(["v"], [column.slice(start, 1)])


def test_the_least_and_greatest_times_of_python_are_readable():
    refuse_unreadable("ab", [pa.array([date.min, date.max]), pa.array([datetime.min, datetime.max])])


class Inner(BaseModel):
    text: str


class Line(BaseModel):
    text: str
    day: date
    inner: list[Inner]


class Blocks(Pipeline):
    """Makes a row of each message, with an invalid value in the column that the payload names."""

    name = "blocks"
    producer = Producer(source="memory")
    batchers = {"kept": TableBatcher(schema=Line)}

    def handle_messages(self, messages: pa.Table, context: Any) -> pa.Table:
        says = messages["data"].to_pylist()

        def text(place: bytes) -> pa.Array:
            values = [b"\xff\xfe" if payload == place else payload for payload in says]
            return pa.Array.from_buffers(pa.string(), len(values), pa.array(values, pa.binary()).buffers())

        days = pa.array([400_000_000 if payload == b"day" else 1 for payload in says], pa.int32()).view(pa.date32())
        inner = pa.StructArray.from_arrays([text(b"inner")], ["text"])
        columns = {
            "text": text(b"text"),
            "day": days,
            "inner": pa.ListArray.from_arrays(pa.array(range(len(says) + 1), pa.int32()), inner),
            "batch_key": text(b"batch_key"),
            "batcher": pa.repeat("kept", len(says)),
        }
        for name, column in columns.items():
            if name in messages.column_names:
                messages = messages.drop_columns(name)
            messages = messages.append_column(name, column)
        return messages


@pytest.mark.parametrize("column", ["text", "day", "inner", "batch_key"])
def test_a_block_with_such_a_value_fails_that_row_alone(lake, column):
    manifest = handled(lake, Blocks, b"1", column.encode(), b"3")

    assert outcomes(lake, "blocks", manifest) == {"m0": "handled", "m1": "failed", "m2": "handled"}
    (failure,) = rows_of(lake, "blocks", manifest, "failed")
    assert (failure["kind"], failure["data"]) == ("ColumnError", column.encode())
    assert failure["reason"].startswith(column)
    (file,) = manifest.of_table("kept")
    assert pl.read_parquet(lake.uri("blocks", "kept", file.path))["text"].to_list() == ["1", "3"]


class Broken(Memory):
    """Delivers metadata that is not valid text."""

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        ids = ["m0", "m1", "m2"]
        yield self.deliveries(message_id=ids, data=[b""] * 3, ack_id=ids, ack_ref="q", metadata=BROKEN)


def test_a_connector_that_delivers_such_a_value_is_named(lake):
    with pytest.raises(SourceError, match="memory delivered a message whose metadata has text"):
        received(lake, "blocks", Broken())
