"""Batching: whole batches out of a sorted stream, and `handle_batch` held to its contract."""

import math
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.storage import Lake
from pipeline_platform.message import BatchInfo, Message
from pipeline_platform.options import Batcher, Producer
from pipeline_platform.pipeline import Pipeline
from pipeline_platform.stages import batch as batching
from pipeline_platform.stages.batch import BATCHED, HandleBatches, handle_batch, in_batches, whole_batches
from pipeline_platform.stages.record import STAGED, encode
from resources.spark import SparkResource
from tests.small_lake import WINDOW, Memory, batch_of, handled, outcomes, returned, rows_of
from tests.test_handle import ODD


@pytest.fixture
def lake(tmp_path):
    return Lake(root=str(tmp_path))


class Stop(BaseModel):
    name: str


INFOS: list[BatchInfo] = []


class Obedient(Pipeline):
    """Does with a batch what its first message says."""

    name = "obedient"
    producer = Producer(source="memory")
    batchers = {"plain": Batcher(batch_size=3), "typed": Batcher(schema=Stop)}

    def handle_message(self, message, context):
        return message

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> Any:
        INFOS.append(batch_info)
        match messages[0].data:
            case "raise":
                raise ConnectionError("no answer")
            case "exit":
                raise SystemExit(1)
            case "none":
                return None
            case "nonsense":
                return [*messages[1:], "done"]
            case "few":
                return messages[1:]
            case "twice":
                return [*messages, messages[0]]
            case "others":
                return list(Message.each(batch_of(b"1", b"2", b"3")))
            case "nothing":
                return []
            case "reorder":
                return messages[::-1]
            case "fail one":
                return [messages[0].failed("as told"), *messages[1:]]
            case "misfit":
                return [messages[0].put_data(object()), *messages[1:]]
            case "bytes":
                return [messages[0].put_data(b"\xff"), *messages[1:]]
        return messages


def staged(*data: Any, key: str = "k", batch: int = 0, full: bool = False) -> pa.RecordBatch:
    """Messages as Spark hands them to `HandleBatches`."""
    rows = batch_of(*(b"original" for _ in data))
    encoded = [encode(one) for one in data]
    columns = {name: rows.column(name) for name in rows.schema.names if name in BATCHED.names}
    columns |= {
        "value": pa.array([value for value, _ in encoded], pa.binary()),
        "encoding": pa.array([encoding for _, encoding in encoded], pa.string()),
        "batch_key": pa.repeat(key, len(data)),
        "batch_mode": pa.repeat("bulk", len(data)),
        "on_success": pa.nulls(len(data), pa.string()),
        "on_failure": pa.nulls(len(data), pa.string()),
        "window": pa.repeat(WINDOW, len(data)),
        "batch": pa.repeat(pa.scalar(batch, pa.int64()), len(data)),
        "full": pa.repeat(full, len(data)),
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in BATCHED.names], schema=BATCHED)


def batched(lake: Lake, *batches: pa.RecordBatch, batcher: str = "plain", receive_id: str = "r1") -> Manifest:
    INFOS.clear()
    stage = HandleBatches(Obedient, batcher, None, Memory(), "source", lake, receive_id)
    return returned(stage(iter(batches)))


# Whole batches


@settings(deadline=None)
@given(st.lists(st.integers(1, 7), max_size=8), st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_batches_come_out_whole_and_in_order_however_the_stream_is_cut(sizes, cuts):
    places = [number for number, size in enumerate(sizes) for _ in range(size)]
    rows = pa.RecordBatch.from_pydict(
        {"window": ["w"] * len(places), "batch_key": ["k"] * len(places), "batch": places, "row": range(len(places))},
        schema=pa.schema([("window", "string"), ("batch_key", "string"), ("batch", "int64"), ("row", "int64")]),
    )
    stream, start = [], 0
    while start < rows.num_rows:
        size = cuts[len(stream) % len(cuts)]
        stream.append(rows.slice(start, size))
        start += size

    whole = list(whole_batches(iter(stream)))

    assert [batch.num_rows for batch in whole] == sizes
    assert [row for batch in whole for row in batch.column("row").to_pylist()] == list(range(len(places)))


def test_an_empty_arrow_batch_ends_no_batch():
    half = staged("a", "b")

    (whole,) = whole_batches(iter([half, half.slice(0, 0), half]))

    assert whole.num_rows == 4


# Placing in batches, in Spark


class Flushing(Pipeline):
    """Has the batch of a message that says `flush` delivered."""

    name = "flushing"
    producer = Producer(source="memory")
    batchers = {"plain": Batcher(batch_size=3)}

    def handle_message(self, message, context):
        key, text = message.data.decode().split(maxsplit=1)
        routed = message.put_batcher("plain").put_batch_key(key)
        return routed.put_batch_mode("flush") if text.startswith("flush") else routed

    def handle_batch(self, batcher, messages, batch_info, context):
        return messages


@pytest.fixture
def placed(lake, spark: SparkResource) -> Callable[..., list[tuple[bool, list[str]]]]:
    """The batches, in order within their key, that messages come in; each as what it holds, and whether it is full."""

    def place(*payloads: str, batch_size: int = 3) -> list[tuple[bool, list[str]]]:
        manifest = handled(lake, Flushing, *(one.encode() for one in payloads))
        rows = rows_of(lake, "flushing", manifest, "_receives/r1/plain")
        schema = pa.schema([*STAGED, ("window", pa.string())])
        staged = pa.Table.from_pylist([{**row, "window": WINDOW} for row in rows], schema=schema)
        frame = in_batches(spark.spark_session.createDataFrame(staged), batch_size, 2)
        rows = frame.select("batch_key", "batch", "position", "full", "data").orderBy("batch_key", "batch", "position")
        found: dict[tuple[str, int, bool], list[str]] = {}
        for row in rows.collect():
            found.setdefault((row["batch_key"], row["batch"], row["full"]), []).append(row["data"].decode())
        return [(full, messages) for (_, _, full), messages in found.items()]

    return place


def test_messages_of_a_key_are_cut_at_the_batch_size_in_their_order(placed):
    assert placed("a 1", "b 2", "a 3", "a 4", "a 5", "b 6") == [
        (True, ["a 1", "a 3", "a 4"]),
        (False, ["a 5"]),
        (False, ["b 2", "b 6"]),
    ]


def test_a_message_in_mode_flush_ends_its_batch_and_no_other_keys(placed):
    assert placed("a 1", "b 1", "a flush", "a 2", "b 2", "a 3", "b 3", "a flush again", "a flush once more", "a 4") == [
        (False, ["a 1", "a flush"]),
        (True, ["a 2", "a 3", "a flush again"]),
        (False, ["a flush once more"]),
        (False, ["a 4"]),
        (True, ["b 1", "b 2", "b 3"]),
    ]


def test_messages_that_are_large_together_are_cut_before_the_batch_size(placed, monkeypatch):
    """A worker holds a batch whole; and Arrow holds no more than 2 GiB of one column."""
    monkeypatch.setattr(batching, "BATCH_BYTES", 100)
    small, large = "a 1", "a " + "x" * 60  # twice: as it was delivered, and as handling left it

    assert placed(small, small, large, small, large, batch_size=4) == [
        (True, [small, small, large]),
        (True, [small]),
        (False, [large]),
    ]


# The contract of handle_batch


@pytest.mark.parametrize("fault", ["raise", "exit", "none", "nonsense", "twice", "others"])
def test_a_fault_of_handle_batch_fails_its_batch_and_no_other(lake, fault):
    manifest = batched(lake, staged(fault, "2"), staged("3", "4", key="other"))

    told = [row["outcome"] for row in rows_of(lake, "obedient", manifest, "outcomes")]
    assert told == ["failed", "failed", "handled", "handled"]
    failures = rows_of(lake, "obedient", manifest, "failed")
    assert {(row["stage"], row["batcher"], row["batch_key"]) for row in failures} == {("handle_batch", "plain", "k")}
    assert {row["data"] for row in failures} == {b"original"}, "not what handling made of it"


@pytest.mark.parametrize(("fault", "missing"), [("few", {"m0"}), ("nothing", {"m0", "m1"})])
def test_a_message_that_handle_batch_does_not_return_fails(lake, fault, missing):
    manifest = batched(lake, staged(fault, "2"))

    failures = rows_of(lake, "obedient", manifest, "failed")
    assert {row["message_id"] for row in failures} == missing
    assert {row["reason"] for row in failures} == {"handle_batch did not return it"}


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize(("attribute", "value", "reason"), ODD)
def test_an_odd_value_that_handle_batch_sets_fails_its_message_alone(
    lake, monkeypatch, raises, attribute, value, reason
):
    def handle_batch(self, batcher, messages, batch_info, context):
        setattr(messages[0], attribute, value)
        if raises:
            raise ValueError("as told")
        return messages

    monkeypatch.setattr(Obedient, "handle_batch", handle_batch)

    manifest = batched(lake, staged("1", "2"))

    assert outcomes(lake, "obedient", manifest) == {"m0": "failed", "m1": "failed" if raises else "handled"}
    told = rows_of(lake, "obedient", manifest, "failed")[0]
    assert told["stage"] == "handle_batch"
    assert ("as told" if raises else reason) in told["reason"]


def test_handle_batch_may_change_the_order(lake):
    manifest = batched(lake, staged("reorder", "2"))

    assert set(outcomes(lake, "obedient", manifest).values()) == {"handled"}


def test_what_handle_batch_fails_fails_alone(lake):
    manifest = batched(lake, staged("fail one", "2"))

    assert outcomes(lake, "obedient", manifest) == {"m0": "failed", "m1": "handled"}
    (failure,) = rows_of(lake, "obedient", manifest, "failed")
    assert (failure["reason"], failure["stage"]) == ("as told", "handle_batch")


def test_data_that_fits_no_column_fails_alone(lake):
    manifest = batched(lake, staged("misfit", "2"))

    assert outcomes(lake, "obedient", manifest) == {"m0": "failed", "m1": "handled"}


def test_what_handle_batch_returned_is_the_batchers_table(lake):
    manifest = batched(lake, staged("bytes", {"a": 1}, b"text", [1.5]))

    rows = rows_of(lake, "obedient", manifest, "plain")
    assert [row["data"] for row in rows] == ['{"base64": "/w=="}', '{"a":1}', '"text"', "[1.5]"]
    assert {row["batch_key"] for row in rows} == {"k"}
    assert {row["batch_id"] for row in rows} == {INFOS[0].batch_id}


def test_a_table_without_a_model_holds_nothing_but_json(lake):
    manifest = batched(lake, staged({"number": 1.5}, {"number": math.nan}, {"number": math.inf}))

    rows = rows_of(lake, "obedient", manifest, "plain")
    assert [row["data"] for row in rows] == ['{"number":1.5}', '{"number":null}', '{"number":null}']


# What a batch is told


def test_a_batch_knows_its_size_and_why_it_is_delivered(lake):
    batched(lake, staged("1", "2", "3", full=True), staged("4", batch=1))

    assert [(info.batcher, info.batch_key, info.size, info.trigger) for info in INFOS] == [
        ("plain", "k", 3, "size"),
        ("plain", "k", 1, "flush"),
    ]


def test_a_batchs_id_is_the_same_at_every_try_and_no_others(lake):
    batched(lake, staged("1"), staged("2", batch=1), staged("3", key="other"))
    first = [info.batch_id for info in INFOS]
    batched(lake, staged("1"), staged("2", batch=1), staged("3", key="other"))
    again = [info.batch_id for info in INFOS]
    batched(lake, staged("1"), receive_id="r2")
    (elsewhere,) = [info.batch_id for info in INFOS]

    assert first == again
    assert len({*first, elsewhere}) == 4


# What crosses from handling to batching


@pytest.mark.parametrize("wrong", [{"title": "x"}, {"name": 5}, {"name": None}, "text"])
def test_data_that_does_not_fit_the_batchers_model_fails_alone(lake, wrong):
    manifest = batched(lake, staged(Stop(name="a"), wrong, Stop(name="c")), batcher="typed")

    assert outcomes(lake, "obedient", manifest) == {"m0": "handled", "m1": "failed", "m2": "handled"}
    assert [row["name"] for row in rows_of(lake, "obedient", manifest, "typed")] == ["a", "c"]
    assert INFOS[0].size == 3


def test_a_batch_of_which_nothing_can_be_decoded_is_not_handled(lake):
    manifest = batched(lake, staged("wrong"), batcher="typed")

    assert outcomes(lake, "obedient", manifest) == {"m0": "failed"}
    assert INFOS == []


def test_messages_keep_what_they_told_of_their_acknowledgement(lake):
    rows = staged("1", "2")
    rows = rows.set_column(rows.schema.get_field_index("on_success"), "on_success", pa.array(["noop", None]))

    manifest = batched(lake, rows)

    assert [row["action"] for row in rows_of(lake, "obedient", manifest, "outcomes")] == ["noop", "ack"]


def test_the_contract_holds_without_a_lake():
    messages = list(Message.each(batch_of(b"1", b"2")))
    info = BatchInfo("plain", "k", None, 2, "flush", "id")

    class Dropping(Obedient):
        def handle_batch(self, batcher, messages, batch_info, context):
            return messages[:1]

    kept, dropped = handle_batch(Dropping(), "plain", messages, info, None)

    assert (kept.status, dropped.status) == ("ok", "failed")
