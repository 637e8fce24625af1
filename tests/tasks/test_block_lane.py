"""The lane of blocks: the same rules as for rows, and faults isolated by row."""

import random
from datetime import time, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pydantic import BaseModel

from pipeline_platform import Batcher, Message, Pipeline, PipelineError, Processors, TableBatcher, ack_immediately
from pipeline_platform.lake.writer import Writer
from pipeline_platform.model.actions import EARLY
from pipeline_platform.model.columns.schema import row_type
from pipeline_platform.tasks.handle.repeats import REPEATS
from pipeline_platform.tasks.record.step import receive_table
from pipeline_platform.testing import test_batch
from tests.fixtures.obedient import Obedient, ObedientBlocks
from tests.fixtures.small_lake import WINDOW, Memory, Row, batch_of, handled, numbered, outcomes, ranges, rows_of
from tests.tasks.test_early import actions, early
from tests.tasks.test_early import lake as lake_of_early  # noqa: F401 - a fixture
from tests.tasks.test_in_order import Keyed, handle, memory
from tests.tasks.test_permits import Permits

OK = [b"%d" % number for number in range(20)]
IN = "handle_messages"
FAULTS = {
    "raise": ("ValueError", "as told", IN),
    "exit": ("SystemExit", "3", IN),
    "panic": ("PanicError", "index out of bounds", IN),
    "cancel": ("CancelledError", "CancelledError", IN),
    "interrupt": ("KeyboardInterrupt", "KeyboardInterrupt", IN),
    "fail": ("failed", "as told", IN),
    "unknown": ("unknown batcher", "'nowhere' is not a batcher. Batchers: ['kept']", IN),
    "drop": ("not returned", "handle_messages did not return it", IN),
    "misfit": ("ColumnError", "text must not be None", "lake"),
    "kill": ("worker killed", "handle_messages ended the worker (signal 9)", IN),
    "quit": ("worker killed", "handle_messages ended the worker (exit code 0)", IN),
    "hang": (
        "timeout",
        "handle_messages took longer than processors.message_timeout (0.3 s) allows",
        "handle_messages",
    ),
}


class Timed(ObedientBlocks):
    """Has a time limit per call."""

    name = "obedient"
    processors = Processors(message_timeout=timedelta(seconds=0.3))


@pytest.mark.parametrize("faults", [[*FAULTS][:-3], ["kill", "quit"], ["hang"]], ids=["here", "forks", "timed"])
def test_a_faulty_row_fails_alone_and_keeps_its_payload(lake, faults):
    payloads = [*OK[:7], *(fault.encode() for fault in faults), *OK[7:], faults[0].encode()]

    pipeline = Timed if faults == ["hang"] else ObedientBlocks
    manifest = handled(lake, pipeline, *payloads, careful=faults[0] == "kill")

    assert [row["text"] for row in rows_of(lake, "obedient", manifest, "kept")] == [str(number) for number in range(20)]
    failures = rows_of(lake, "obedient", manifest, "failed")
    expected = [(f"m{at}", data, *FAULTS[data.decode()]) for at, data in enumerate(payloads) if data.decode() in FAULTS]
    names = ("message_id", "data", "kind", "reason", "stage")
    assert sorted(tuple(row[name] for name in names) for row in failures) == sorted(expected)


def answering(made: Any) -> type[Pipeline]:
    class Answering(ObedientBlocks):
        name = "obedient"

        def handle_messages(self, messages: pa.Table, context: Any) -> pa.Table:
            rows = super().handle_messages(messages, context)
            return made(rows)

    return Answering


STRANGE = {
    "None": (lambda _: None, "handle_messages must return a pyarrow.Table, got NoneType"),
    "another class": (pl.DataFrame, "handle_messages must return a pyarrow.Table, got DataFrame"),
    "no field": (lambda rows: rows.drop_columns("text"), "handle_messages returned no column ['text']"),
    "no status": (lambda rows: rows.drop_columns("status"), "handle_messages returned no column ['status']"),
    "twice": (lambda rows: pa.concat_tables([rows, rows.slice(0, 1)]), "each position at most once"),
    "unknown": (
        lambda rows: rows.set_column(rows.schema.get_field_index("position"), "position", pc.add(rows["position"], 1)),
        "only positions of its block",
    ),
}


@pytest.mark.parametrize("strange", STRANGE)
def test_an_invalid_result_fails_the_whole_block(lake, strange):
    made, reason = STRANGE[strange]

    failures = rows_of(lake, "obedient", handled(lake, answering(made), *OK), "failed")

    assert (len(failures), {row["kind"] for row in failures}) == (20, {"TypeError"})
    assert all(reason in row["reason"] for row in failures)


def with_keys(rows: pa.Table, keys: pa.Array) -> pa.Table:
    return rows.drop_columns("batch_key").append_column("batch_key", keys)


def test_a_batch_key_that_is_not_text_fails_its_row_alone(lake):
    def keyed(rows: pa.Table) -> pa.Table:
        keys = [b"\xff" if text == "7" else b"k" for text in rows["text"].to_pylist()]
        return with_keys(rows, pa.array(keys))

    manifest = handled(lake, answering(keyed), *OK)

    (failure,) = rows_of(lake, "obedient", manifest, "failed")
    assert (failure["message_id"], failure["kind"], failure["stage"]) == ("m7", "ArrowInvalid", IN)
    assert {row["batch_key"] for row in rows_of(lake, "obedient", manifest, "kept")} == {"k"}


UNREADABLE = {
    "a list": (lambda rows: with_keys(rows, pa.array([["k"]] * rows.num_rows)), "Unsupported cast from list"),
    "twice": (lambda rows: rows.append_column("status", rows["status"]), "exists 2 times in schema"),
}


@pytest.mark.parametrize("callback", [IN, "prepare_messages"])
@pytest.mark.parametrize("unreadable", UNREADABLE)
def test_unreadable_columns_fail_their_block_without_a_crash(lake, callback, unreadable):
    made, reason = UNREADABLE[unreadable]

    class Preparing(ObedientBlocks):
        name = "obedient"

        def prepare_messages(self, messages: pa.Table, context: Any) -> pa.Table:
            return made(messages)

    manifest = handled(lake, answering(made) if callback == IN else Preparing, *OK, careful=True)

    failures = rows_of(lake, "obedient", manifest, "failed")
    assert {(row["stage"], reason in row["reason"]) for row in failures} == {(callback, True)}
    assert len(failures) == 20


class Times(BaseModel):
    span: timedelta
    clock: time | None


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_time_spans_and_times_of_day_are_written_as_rows_write_them(lake, unit):
    values = [Times(span=timedelta(hours=-26), clock=time(1, 2)), Times(span=timedelta(seconds=1.5), clock=None)]
    clocks = pa.array([value.clock for value in values], pa.time64("us"))

    class Timing(ObedientBlocks):
        name = "obedient"
        batchers = {"kept": TableBatcher(schema=Times)}

        def handle_messages(self, messages: pa.Table, context: Any) -> pa.Table:
            rows = messages.append_column("span", pa.array([value.span for value in values], pa.duration(unit)))
            rows = rows.append_column("clock", clocks.cast(pa.time32(unit) if unit == "ms" else pa.time64(unit)))
            return rows.drop_columns("batcher").append_column("batcher", pa.array(["kept"] * len(values)))

    written = rows_of(lake, "obedient", handled(lake, Timing, b"1", b"2"), "kept")

    as_rows = pa.table(row_type(Times).columns(values), schema=row_type(Times).schema).to_pylist()
    assert [{name: row[name] for name in ("span", "clock")} for row in written] == as_rows


def with_text(encode: Any) -> Any:
    return lambda rows: rows.drop_columns("text").append_column("text", encode(rows["text"].combine_chunks()))


def test_a_field_may_be_a_view(lake):
    manifest = handled(
        lake, answering(with_text(lambda text: text.cast(pa.string_view()))), b"1", b"fail", careful=True
    )

    assert outcomes(lake, "obedient", manifest) == {"m0": "handled", "m1": "failed"}
    assert [row["text"] for row in rows_of(lake, "obedient", manifest, "kept")] == ["1"]


def test_a_field_that_arrow_cannot_take_fails_its_block_without_a_crash(lake):
    manifest = handled(lake, answering(with_text(pc.run_end_encode)), b"1", b"2", careful=True)

    assert {row["kind"] for row in rows_of(lake, "obedient", manifest, "failed")} == {"ArrowNotImplementedError"}


def test_rows_may_come_back_in_any_order_and_are_written_in_their_own(lake):
    def shuffled(rows: pa.Table) -> pa.Table:
        return rows.take(random.Random(1).sample(range(20), 20))

    manifest = handled(lake, answering(shuffled), *OK)

    written = rows_of(lake, "obedient", manifest, "kept")
    assert [(row["text"], row["message_id"]) for row in written] == [(str(n), f"m{n}") for n in range(20)]


class Preparing(Pipeline):
    """Prepares a block with Polars, in one lookup that fails for some rows."""

    name = "preparing"
    producer = Obedient.producer
    batchers = Obedient.batchers
    blocks: list[int] = []

    def prepare_messages(self, messages: pl.DataFrame, context: Any) -> pl.DataFrame:
        text = pl.col("data").cast(pl.String)
        if messages.select((text == "raise").any()).item():
            raise ValueError("as told")
        return messages.with_columns(
            text=pl.lit("looked up ") + text, status=pl.when(text == "bad").then(pl.lit("failed")).otherwise("status")
        ).filter(text != "drop")

    def handle_messages(self, messages: pl.DataFrame, context: Any) -> pl.DataFrame:
        self.blocks.append(messages.height)
        return messages.with_columns(batcher=pl.lit("kept"))


def test_a_block_is_prepared_first_and_rows_that_fail_there_are_not_handled(lake):
    Preparing.blocks.clear()

    manifest = handled(lake, Preparing, b"1", b"bad", b"drop", b"raise", b"2")

    assert [row["text"] for row in rows_of(lake, "preparing", manifest, "kept")] == ["looked up 1", "looked up 2"]
    failures = {row["data"]: row["reason"] for row in rows_of(lake, "preparing", manifest, "failed")}
    assert failures == {
        b"bad": "handle_messages gave no reason", b"drop": "prepare_messages did not return it", b"raise": "as told",
    }  # fmt: skip
    assert sum(Preparing.blocks) == 2


def test_every_try_of_a_row_takes_its_permit(lake):
    permits = Permits()

    manifest = handled(lake, ObedientBlocks, b"1", b"2", b"3", b"raise", pace=permits)

    assert list(outcomes(lake, "obedient", manifest).values()).count("handled") == 3
    assert permits.asked == 4 + 2, "the pair with the row that raises is tried again, each alone"


class Ordered(ObedientBlocks):
    """Keeps the order of the source's partitions."""

    name = "obedient"
    processors = Processors(concurrency=2, partition_by="source", chunk_size=1)
    diary: Path


@pytest.mark.parametrize("careful", [False, True])
def test_the_rows_of_a_partition_come_in_the_order_of_their_source(lake, monkeypatch, tmp_path, careful):
    monkeypatch.setattr(Ordered, "diary", tmp_path / "diary", raising=False)
    payloads = [f"{letter}{number}" for number in range(9, 0, -1) for letter in "abc"]

    done = handle(lake, Ordered, Keyed(deliveries_=memory(*payloads).deliveries_), careful=careful)  # type: ignore[arg-type]

    kept = [row["text"] for row in rows_of(lake, "obedient", done.manifest, "kept")]
    for letter in "abc":
        assert [text for text in kept if text.startswith(letter)] == [f"{letter}{number}" for number in range(1, 10)]


def test_an_oversized_row_fails_before_any_callback(lake):
    class Small(ObedientBlocks):
        name = "obedient"
        processors = Processors(max_message_bytes=4)

    manifest = handled(lake, Small, b"1", b"raise", b"2")

    (failure,) = rows_of(lake, "obedient", manifest, "failed")
    assert (failure["kind"], failure["data"], failure["state"]) == ("too large", b"raise", "dead")


class Rescuing(ObedientBlocks):
    """Rescues rows that failed as told."""

    name = "obedient"
    processors = Processors(rescue=True)

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        return [
            failed.put({"text": f"rescued {failed.batch_key}"}, batcher="kept").rescued()
            if failed.reason == "as told"
            else failed
            for failed in messages
        ]


def test_handle_failed_gets_failures_and_may_rescue_them(lake):
    manifest = handled(lake, Rescuing, b"1", b"fail", b"raise", b"drop")

    kept = {row["message_id"]: row["text"] for row in rows_of(lake, "obedient", manifest, "kept")}
    assert kept == {"m0": "1", "m1": "rescued default", "m2": "rescued default"}
    assert outcomes(lake, "obedient", manifest)["m3"] == "failed"


class Batching(ObedientBlocks):
    """Sends rows to a batcher with a callback."""

    name = "obedient"
    batchers = {"kept": Batcher(schema=Row, batch_size=2)}

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: Any, context: Any) -> list[Message]:
        return [message.failed("late") if message.data.text == "3" else message for message in messages]


def test_a_batcher_with_a_callback_gets_rows_as_messages(lake):
    manifest = handled(lake, Batching, b"1", b"fail", b"2")
    assert [row["value"] for row in rows_of(lake, "obedient", manifest, receive_table("r1", "kept"))] == [
        b'{"text":"1"}', b'{"text":"2"}',
    ]  # fmt: skip

    result = test_batch(Batching, [b"1", b"2", b"3"])
    assert [message.data for message in result.successful] == [Row(text="1"), Row(text="2")]
    assert [(message.data, message.reason) for message in result.failed] == [(Row(text="3"), "late")]
    assert [info.size for info in result.batches] == [2, 1]


class Early(ObedientBlocks):
    """Acknowledges all rows early, failed rows as failed, and then obeys."""

    name = "early"
    acks_immediately = True

    def handle_messages(self, messages: pa.Table, context: Any) -> pa.Table:
        ack_immediately(messages.filter(pc.not_equal(messages["data"], b"late")))
        return super().handle_messages(messages, context)


def test_rows_of_a_block_can_be_acknowledged_at_once_each_once(lake_of_early):  # noqa: F811
    source = Memory(deliveries_=numbered(b"1", b"late", b"raise", b"4"))

    manifest = early(lake_of_early, Early, source)

    assert source.told == [("ack", "q", ["ack-m0", "ack-m2", "ack-m3"])], "although tried by halves"
    assert sorted(actions(lake_of_early, manifest)) == ["ack", EARLY, EARLY, EARLY]
    with pytest.raises(TypeError, match="Call it in handle_messages"):
        ack_immediately(pa.table(batch_of(b"1")))


def test_repeats_are_not_handled_again(lake):
    with Writer(lake, "obedient", "r1") as writer:
        rows = [{"row": 1, "decided": True}]
        writer.write("_repeats", WINDOW, pa.RecordBatch.from_pylist(rows, schema=REPEATS))
        repeats = ranges(writer.close(), "obedient", "_repeats")

    manifest = handled(lake, ObedientBlocks, b"1", b"2", repeats=repeats)

    assert outcomes(lake, "obedient", manifest) == {"m0": "handled", "m1": "duplicate"}


def test_a_lane_is_chosen_by_annotation_and_an_unknown_one_is_refused():
    assert ObedientBlocks.block_type() is pa.Table
    assert Preparing.block_type() is pl.DataFrame
    assert Obedient.block_type() is None
    with pytest.raises(PipelineError, match=r"handle_messages: must take a polars.DataFrame, .* got builtins.list"):

        class Listing(Pipeline):
            name = "listing"
            producer = Obedient.producer

            def handle_messages(self, messages: list, context: Any) -> list:
                return messages
