"""The Spark lane: writing rows from constructed batches. Invalid rows fail alone."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from pydantic import BaseModel

from pipeline_platform import Batcher, Message, Pipeline, PipelineError, Processors, Producer, TableBatcher
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.actions import AckPolicy
from pipeline_platform.model.columns.crossing import decode
from pipeline_platform.tasks.handle.spark_lane import WriteColumns, taken
from pipeline_platform.tasks.record.routed import ROUTES
from tests.fixtures.faults import fault
from tests.fixtures.small_lake import (
    DRIVEN_AGAIN,
    Memory,
    done,
    numbered,
    outcomes,
    ranges,
    received,
    returned,
    rows_of,
)
from tests.fixtures.telemetry import named


class Stop(BaseModel):
    line: str
    late: int | None = None


class Alert(BaseModel):
    late: int
    at: datetime
    price: Decimal
    counts: dict[str, int]


class Fast(Pipeline):
    name = "fast"
    producer = Producer(source="memory")
    batchers = {"lake": TableBatcher(schema=Stop), "alerts": Batcher(schema=Alert), "raw": Batcher()}

    def handle_messages(self, messages, context):
        return messages

    def handle_batch(self, batcher, messages, batch_info, context):
        return messages

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        return [m.configure_ack(on_failure="nack") if m.data == b"again" else m for m in messages]


def row(data: bytes = b"original", **said: Any) -> dict[str, Any]:
    """Return a row as `taken` selects it, by default ok and for the batcher `lake`."""
    return {
        "data": data,
        "batcher": "lake",
        "batch_key": "default",
        "_status": "ok",
        "_reason": None,
        "line": "T1",
        "late": 0,
        "at": datetime(2026, 1, 1, tzinfo=UTC),
        "price": Decimal("1.5"),
        "counts": [("a", 1)],
        **said,
    }


TYPES = {
    "line": pa.string(),
    "late": pa.int64(),
    "at": pa.timestamp("us", "UTC"),
    "price": pa.decimal128(38, 9),
    "counts": pa.map_(pa.string(), pa.int64()),
}


def written(
    lake: Lake,
    *rows: dict[str, Any],
    pipeline: type[Pipeline] = Fast,
    ack_policy: AckPolicy | None = None,
    careful: bool = False,
    **types: pa.DataType,
) -> Manifest:
    payloads = [row["data"] for row in rows]
    kept = ranges(received(lake, pipeline.name, Memory(deliveries_=numbered(*payloads))), pipeline.name)
    columns: dict[str, Any] = {"position": pa.array(range(len(rows)), pa.int64())}
    types = {**dict.fromkeys(ROUTES[1:], pa.string()), **TYPES, **types}
    columns |= {name: pa.array([row[name] for row in rows], type_) for name, type_ in types.items()}
    columns["data"] = pa.array(payloads, pa.binary())
    batch = pa.RecordBatch.from_pydict(columns)
    task = WriteColumns(pipeline, None, ack_policy or Memory().ack_policy, lake, "r1", kept)
    return done(task, [batch], careful=careful)


def failures(lake: Lake, manifest: Manifest) -> dict[str, tuple[str, str]]:
    return {row["message_id"]: (row["kind"], row["reason"]) for row in rows_of(lake, "fast", manifest, "failed")}


def test_rows_go_to_their_tables_as_columns(lake):
    manifest = written(lake, row(line="T1", late=None, batch_key="x"), row(line="T2", batch_key=None))
    rows = rows_of(lake, "fast", manifest, "lake")
    assert [(row["line"], row["late"], row["batch_key"], row["message_id"]) for row in rows] == [
        ("T1", None, "x", "m0"),
        ("T2", 0, "default", "m1"),
    ]
    assert outcomes(lake, "fast", manifest) == {"m0": "handled", "m1": "handled"}
    totals = manifest.totals
    assert (totals.positions, totals.handled.total(), totals.batch_keys["lake"]) == (2, 2, {"x": 1, "default": 1})


def test_a_reason_without_a_failure_fails_no_row(lake):
    latin = pa.array([b"\xff"], pa.binary()).view(pa.string())
    manifest = written(lake, row(_reason="unused"), row(_status=None, _reason=latin[0]), row(_reason=latin[0]))
    assert set(outcomes(lake, "fast", manifest).values()) == {"handled"}


def test_rows_written_together_emit_a_chunk(lake, heard):
    written(lake, row(line="T1"), row(_status="failed", _reason="as told"))
    start, stop = named(heard, "chunk")
    assert start[1]["messages"] == 2
    assert (stop[1]["handled"], stop[1]["failed"]) == (1, 1)


@pytest.mark.parametrize("misfits", [{0}, {3}, {1, 2}, {0, 3}, {0, 1, 2, 3}])
def test_a_row_that_fits_no_column_fails_alone(lake, misfits):
    rows = [row(late=2**63 if index in misfits else index) for index in range(4)]
    manifest = written(lake, *rows, late=pa.uint64())
    assert {int(name[1:]) for name in failures(lake, manifest)} == misfits
    assert [row["late"] for row in rows_of(lake, "fast", manifest, "lake")] == sorted(set(range(4)) - misfits)
    assert {why for _, why in failures(lake, manifest).values()} == {
        "late does not fit its column, which stores 64 bits"
    }
    assert {row["data"] for row in rows_of(lake, "fast", manifest, "failed")} == {b"original"}, "as it was received"


def test_a_date_out_of_pythons_range_fails_alone(lake):
    never = pa.scalar(-(2**62), pa.int64()).cast(pa.timestamp("us", "UTC"))
    rows = [row(batcher="alerts", at=never if index == 1 else row()["at"]) for index in range(4)]
    manifest = written(lake, *rows)
    assert set(failures(lake, manifest)) == {"m1"}
    assert manifest.totals.staged["alerts"] == 3


class Looking(Fast):
    processors = Processors(chunk_size=50, chunk_bytes=100_000)
    seen: ClassVar[list[int]] = []

    def handle_failed(self, messages, context):
        self.seen.append(sum(len(message.data) for message in messages))
        return messages


@pytest.mark.parametrize("said", [{"_status": "failed", "_reason": ""}, {"batcher": "nowhere"}, {"late": 2**63}])
def test_payloads_of_failures_are_looked_up_a_few_at_a_time(lake, said):
    """If all messages fail, they must not be in memory at once."""
    payloads = [b"x" * (100 if number < 300 else 40_000) for number in range(320)]
    Looking.seen.clear()
    rows = (row(data, **{"late": 0, **said}) for data in payloads)
    manifest = written(lake, *rows, pipeline=Looking, late=pa.uint64())
    assert sum(Looking.seen) == sum(map(len, payloads))
    assert max(Looking.seen) <= 100_000
    assert len(outcomes(lake, "fast", manifest)) == 320


@pytest.mark.parametrize(
    ("second", "kind", "reason"),
    [
        # What `from_json` makes of a payload that it cannot read: nulls, and no error.
        ({"line": None}, "ColumnError", "line must not be None"),
        ({"batcher": "nowhere"}, "unknown batcher", "'nowhere' is not a batcher. Batchers: ['alerts', 'lake', 'raw']"),
        ({"batcher": None}, "unknown batcher", "None is not a batcher. Batchers: ['alerts', 'lake', 'raw']"),
        ({"_status": "failed", "_reason": "no line", "batcher": "nowhere"}, "failed", "no line"),
        ({"_status": "failed", "_reason": ""}, "failed", "handle_messages gave no reason"),
    ],
)
def test_an_invalid_row_fails_alone(lake, second, kind, reason):
    manifest = written(lake, row(), row(**second), row())
    assert failures(lake, manifest) == {"m1": (kind, reason)}
    assert [row["data"] for row in rows_of(lake, "fast", manifest, "failed")] == [b"original"]
    assert len(rows_of(lake, "fast", manifest, "lake")) == 2


def test_routing_and_fields_are_selected_and_a_batch_key_may_be_a_number(spark_session):
    class Small(Fast):
        batchers = {"lake": TableBatcher(schema=Stop)}

    rows = [(0, "lake", 7, "failed", "no line", "T1", 0, "not asked for")]
    routing = "batcher string, batch_key int, status string, reason string"
    columns = f"position long, {routing}, line string, late long, more string"

    given = taken(Small, spark_session().createDataFrame(rows, columns)).toArrow().to_pylist()

    route = {"position": 0, "batcher": "lake", "batch_key": "7", "_status": "failed", "_reason": "no line"}
    assert given == [{**route, "line": "T1", "late": 0}]


def test_a_null_status_is_ok_and_an_unknown_status_fails(lake):
    said = [
        ("ok", "unused"),
        (None, None),
        ("failed", "no line"),
        ("Failed", None),
        ("skipped", "test"),
        ("skipped", None),
    ]
    manifest = written(lake, *(row(_status=status, _reason=reason) for status, reason in said))
    ends = ["handled", "handled", "failed", "failed", "skipped", "skipped"]
    assert outcomes(lake, "fast", manifest) == {f"m{place}": end for place, end in enumerate(ends)}
    no_reason = ("failed", "handle_messages gave no reason")
    assert failures(lake, manifest) == {"m2": ("failed", "no line"), "m3": no_reason}
    assert manifest.totals.skip_reasons == {"test": 1, "": 1}


def test_handle_failed_may_set_ack_actions(lake):
    manifest = written(lake, row(b"again", _status="failed", _reason=""), row(_status="failed", _reason=""))
    assert outcomes(lake, "fast", manifest) == {"m0": "returned", "m1": "failed"}


class Fragile(Fast):
    def handle_failed(self, messages, context):
        if any(message.data == b"kill" for message in messages):
            fault("kill")
        return [message.failed("seen") for message in messages]


def test_a_row_that_ends_its_worker_fails_alone(lake):
    rows = [
        row(),
        row(b"kill", _status="failed", _reason="no line"),
        row(_status="failed", _reason="no line"),
        row(late=2**63),
    ]
    manifest = written(lake, *rows, pipeline=Fragile, careful=True, late=pa.uint64())
    assert outcomes(lake, "fast", manifest) == {"m0": "handled", "m1": "failed", "m2": "failed", "m3": "failed"}
    killer = ("worker killed", "handle_failed ended the worker (signal 9)")
    assert failures(lake, manifest) == {"m1": killer, "m2": ("failed", "seen"), "m3": ("ColumnError", "seen")}


class Hanging(Fragile):
    processors = Processors(chunk_size=3, message_timeout=timedelta(seconds=0.5))

    def handle_failed(self, messages, context):
        if any(message.data == b"hang" for message in messages):
            fault("hang")
        return super().handle_failed(messages, context)


def test_a_handle_failed_that_hangs_affects_no_other_chunk(lake):
    told = [b"1", b"hang", b"2", b"3", b"4"]
    rows = [row(), *(row(data, _status="failed", _reason="no line") for data in told)]
    manifest = written(lake, *rows, pipeline=Hanging)
    late = ("timeout", "handle_failed took longer than processors.message_timeout (0.5 s) allows")
    seen = ("failed", "seen")
    assert failures(lake, manifest) == {"m1": late, "m2": late, "m3": late, "m4": seen, "m5": seen}
    assert outcomes(lake, "fast", manifest)["m0"] == "handled"


def test_rows_for_a_callback_are_staged_as_dicts_of_its_models_fields(lake):
    manifest = written(lake, row(batcher="alerts", batch_key="k"), row(b"\xff", batcher="raw"))
    (alert,) = rows_of(lake, "fast", manifest, "_receives/r1/alerts")
    assert decode(alert["value"], alert["encoding"], Alert) == Alert(
        late=0, at=datetime(2026, 1, 1, tzinfo=UTC), price=Decimal("1.5"), counts={"a": 1}
    )
    assert (alert["batch_key"], alert["data"]) == ("k", b"original")
    (raw,) = rows_of(lake, "fast", manifest, "_receives/r1/raw")
    assert (raw["value"], raw["encoding"]) == (b"\xff", "bytes")
    assert outcomes(lake, "fast", manifest) == {}, "they wait for their batch"


def test_rows_of_several_windows_go_to_their_windows(lake):
    first = ranges(received(lake, "fast", Memory(deliveries_=numbered(b"1")), "r1"), "fast")
    later = received(lake, "fast", Memory(deliveries_=numbered(b"2")), "r2", window="2026-01-02T0000")
    files = [*first, *(part._replace(position=1) for part in ranges(later, "fast"))]
    routing = {"batcher": "lake", "batch_key": "k", "line": "T1"}
    columns = {name: pa.repeat(value, 2) for name, value in routing.items()}
    columns |= dict.fromkeys(["_status", "_reason"], pa.nulls(2, pa.string()))
    columns |= {"late": pa.nulls(2, pa.int64()), "position": pa.array([1, 0])}

    write = WriteColumns(Fast, None, Memory().ack_policy, lake, "r1", files)
    manifest = returned(write.here([pa.RecordBatch.from_pydict(columns)]))

    assert {(file.window, file.rows) for file in manifest.of_table("lake")} == {
        ("2026-01-01T0000", 1),
        ("2026-01-02T0000", 1),
    }


@pytest.mark.parametrize("positions", [[0, 2], [-1, 0], [0, None]])
def test_a_changed_position_is_refused(lake, positions):
    kept = ranges(received(lake, "fast", Memory(deliveries_=numbered(b"1", b"2"))), "fast")
    columns = {name: pa.repeat("ok", 2) for name in ROUTES[1:]} | {"position": pa.array(positions, pa.int64())}
    write = WriteColumns(Fast, None, Memory().ack_policy, lake, "r1", kept)
    with pytest.raises(PipelineError, match="changed the column position"):
        list(write.here([pa.RecordBatch.from_pydict(columns)]))


def test_a_retried_failure_is_closed(lake):
    manifest = written(lake, row(), row(_status="failed", _reason=""), ack_policy=DRIVEN_AGAIN)
    events = rows_of(lake, "fast", manifest, "failed")
    assert {event["message_id"]: event["state"] for event in events} == {"m0": "closed", "m1": "open"}


def test_without_batchers_rows_leave_their_outcomes(lake):
    class Bare(Pipeline):
        name = "fast"
        producer = Producer(source="memory")

        def handle_messages(self, messages, context):
            return messages

    manifest = written(lake, row(), row(_status="failed", _reason="no"), row(batcher="whatever"), pipeline=Bare)

    assert outcomes(lake, "fast", manifest) == {"m0": "handled", "m1": "failed", "m2": "handled"}
