"""Tasks on Spark: a task per share, unchanged results, and errors with Python tracebacks."""

import os
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from pipeline_platform.spark import engine

pytestmark = pytest.mark.usefixtures("open_spark")

ROWS = pa.schema([("share", pa.int64()), ("worker", pa.int64()), ("told", pa.string())])


def who(index):
    yield pa.RecordBatch.from_pylist([{"share": index, "worker": os.getpid(), "told": "here"}], schema=ROWS)


def test_each_share_is_a_task_and_comes_back_in_order(spark):
    rows = engine.run(spark.spark_session, who, 5, ROWS)

    assert rows.schema == ROWS
    assert rows["share"].to_pylist() == [0, 1, 2, 3, 4]
    assert os.getpid() not in rows["worker"].to_pylist()


def test_no_share_is_no_work():
    assert engine.run(None, who, 0, ROWS).num_rows == 0


def test_types_survive_the_way_through_spark(spark):
    schema = pa.schema(
        [
            pa.field("at", pa.timestamp("us", tz="UTC"), nullable=False),
            pa.field("sizes", pa.list_(pa.int32())),
            pa.field("body", pa.binary()),
            pa.field("labels", pa.map_(pa.string(), pa.string())),
        ]
    )
    row = {"at": datetime(2024, 2, 29, 12, tzinfo=UTC), "sizes": [1, None], "body": b"\0\xff", "labels": [("a", "b")]}

    def task(index):
        yield pa.RecordBatch.from_pylist([row], schema=schema)

    rows = engine.run(spark.spark_session, task, 1, schema)

    assert rows.schema == schema
    assert rows.to_pylist() == [row]


def test_batches_of_another_order_or_width_are_cast(spark):
    def task(index):
        yield pa.record_batch({"told": pa.array(["x"], pa.large_string()), "worker": [1], "share": [index]})

    assert engine.run(spark.spark_session, task, 1, ROWS).to_pylist() == [{"share": 0, "worker": 1, "told": "x"}]


def test_no_batch_of_large_rows_is_much_larger_than_spark_lets_it_be(spark):
    def sizes(batches):
        for batch in batches:
            yield pa.record_batch({"bytes": [batch.nbytes]})

    large = spark.spark_session.range(0, 150, 1, 1).selectExpr("repeat('x', 1000000) AS data")

    told = large.mapInArrow(sizes, "bytes long").toArrow()["bytes"].to_pylist()

    assert sum(told) > 150e6
    assert max(told) < 70e6, "64 MB and the row that went beyond"


def test_an_error_in_a_task_is_told_by_its_python_traceback(spark):
    def task(index):
        raise KeyError("no such hop")
        yield

    with pytest.raises(engine.TaskError) as failure:
        engine.run(spark.spark_session, task, 1, ROWS)

    told = str(failure.value)
    assert told.endswith("KeyError: 'no such hop'")
    assert "test_engine.py" in told
    assert "org.apache.spark" not in told
    assert failure.value.__suppress_context__


def test_a_worker_that_dies_is_told_as_such(spark):
    def task(index):
        os._exit(1)

    with pytest.raises(engine.TaskError, match="killed or crashed") as failure:
        engine.run(spark.spark_session, task, 1, ROWS)

    assert "org.apache.spark" not in str(failure.value)


def test_a_task_that_fails_once_is_run_again(spark, tmp_path):
    def task(index):
        if not (tmp_path / "tried").exists():
            (tmp_path / "tried").touch()
            raise OSError("try again")
        yield from who(index)

    assert engine.run(spark.spark_session, task, 1, ROWS).num_rows == 1
