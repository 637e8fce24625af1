"""Promises about rows: each receive once, replays, columns and values."""

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa

from pipeline_platform.sinks.contract import SinkError
from pipeline_platform.testing.promises import error_of
from pipeline_platform.testing.sinks.sink_trial import COLUMNS, FIRST, PIPELINE, SECOND, TABLE, SinkTrial, promise

MANY = range(1_200)
"""Numbers for several batches."""
START = datetime(1, 1, 1, tzinfo=UTC)
VALUES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "whole": (pa.int64(), [2**63 - 1, -(2**63), None]),
    "small": (pa.int32(), [2**31 - 1, -(2**31), None]),
    "real": (pa.float64(), [float("inf"), -0.1, None]),
    "words": (pa.string(), ['quoted "text", with a comma,\nlines, \\N and \u00e9', "", None]),
    "raw": (pa.binary(), [b"\x00\xff\\", b"", None]),
    "raws": (pa.list_(pa.binary()), [[b"\x00\xff\\", b""], [], None]),
    "flag": (pa.bool_(), [True, False, None]),
    "at": (pa.timestamp("us", "UTC"), [datetime(2026, 2, 28, 1, 2, 3, 999_999, UTC), START, None]),
    "day": (pa.date32(), [date(1, 1, 1), date(9999, 12, 31), None]),
    "price": (pa.decimal128(38, 9), [Decimal("12345678901234567.890000001"), Decimal("-0.000000001"), None]),
}  # fmt: skip
"""Values that a reader gets as they were published, by column."""
ENCODED = {"raws": [["AP9c", ""], [], None]}
"""Values in a store without nested bytes, such as JSON: in base64."""


@promise()
def rows_are_stored(trial: SinkTrial) -> None:
    """`publish` stores the rows of a receive and returns True; then `is_published` returns True in every process."""
    trial.ensure()
    trial.expect_published("a", False, "before publish()")
    answer = trial.publish("a", *MANY)
    trial.expect(answer is True, "True from publish()", answer)
    trial.expect_stored({"a": MANY}, "after publish()")
    trial.expect_published("a", True, "after publish()")
    trial.expect_published("b", False, "for another receive")
    trial.publish("b", 5_000)
    trial.expect_stored({"a": MANY, "b": [5_000]}, "of two receives")


@promise("rows_are_stored")
def values_are_untouched(trial: SinkTrial) -> None:
    """Numbers, text, bytes, booleans, times, dates, decimals, lists and nulls are stored unchanged.

    Bytes in lists may be base64.
    """
    columns = pa.schema([*COLUMNS, *((name, type_) for name, (type_, _) in VALUES.items())])
    trial.ensure(columns)
    publication = trial.publication("a", 0, 1, 2, columns=columns)
    (batch,) = publication.rows()
    for name, (type_, values) in VALUES.items():
        batch = batch.set_column(columns.get_field_index(name), name, pa.array(values, type_))
    trial.sink.publish(trial.publication("a", 0, 1, 2, columns=columns, rows=lambda: iter([batch])))
    found = trial.rows()
    for name, (_, values) in VALUES.items():
        stored = [row[name] for row in found]
        trial.expect(stored in (values, ENCODED.get(name)), f"{values} in {name}", stored)


@promise("rows_are_stored")
def publishing_again_stores_nothing(trial: SinkTrial) -> None:
    """A second `publish` of a receive, by this or another process, stores nothing and returns False."""
    trial.ensure()
    trial.publish("a", 1, 2)
    for sink in trial.sink, trial.another():
        answer = sink.publish(trial.publication("a", 1, 2))
        trial.expect(answer is False, "False from a second publish()", answer)
    trial.expect_stored({"a": [1, 2]}, "after three calls of publish()")


@promise("rows_are_stored")
def tables_are_separate(trial: SinkTrial) -> None:
    """A receive is stored once per table: other tables, and other pipelines, get its rows, too."""
    trial.ensure(COLUMNS, TABLE, "others")
    trial.sink.ensure("another", TABLE, COLUMNS)
    trial.publish("a", 1)
    published = trial.sink.is_published(PIPELINE, "others", "a")
    trial.expect(not published, "False from is_published() for another table", published)
    trial.publish("a", 2, table="others")
    trial.publish("a", 3, pipeline="another")
    trial.expect_stored({"a": [1]}, "of the first table")
    trial.expect_stored({"a": [2]}, "of the second table", "others")
    found = [row["number"] for row in trial.rows(pipeline="another")]
    trial.expect(found == [3], "the row of another pipeline", found)


@promise("publishing_again_stores_nothing")
def replays_replace_rows(trial: SinkTrial) -> None:
    """A replay removes the rows of the receives that it replaces, in its windows only, and stores its own rows."""
    trial.ensure()
    both = [*trial.publication("a", 1, 2).rows(), *trial.publication("a", 3, window=SECOND).rows()]
    trial.sink.publish(trial.publication("a", windows=(FIRST, SECOND), rows=lambda: iter(both)))
    trial.publish("b", 4, 5)
    trial.publish("c", 6)
    trial.publish("again", 1, 7, replaces=("a", "b"))
    wanted = {"a": [3], "c": [6], "again": [1, 7]}
    trial.expect_stored(wanted, "after a replay")
    trial.publish("again", 1, 7, replaces=("a", "b"))
    trial.expect_stored(wanted, "after a second publish() of the replay")
    trial.publish("third", replaces=("again",))
    trial.expect_stored({"a": [3], "c": [6]}, "after a replay without rows")
    trial.expect_published("third", True, "for a replay without rows")


@promise("replays_replace_rows")
def replaced_rows_stay_away(trial: SinkTrial) -> None:
    """A late `publish` of a receive that a replay has replaced stores nothing."""
    trial.ensure()
    trial.publish("a", 1)
    trial.publish("again", 2, replaces=("a",))
    trial.another().publish(trial.publication("a", 1))
    trial.expect_stored({"again": [2]}, "after a late publish() of the replaced receive")


@promise("publishing_again_stores_nothing")
def forgotten_receives_are_stored_once(trial: SinkTrial) -> None:
    """If the id of a receive is older than the sink keeps it, `publish` finds its rows, and stores nothing."""
    forget = trial.store.forget
    trial.need(forget, "its store keeps ids forever (forget)")
    assert forget is not None
    trial.ensure()
    trial.publish("a", 1)
    trial.publish("b", 2)
    forget(trial.sink, PIPELINE, TABLE)
    trial.another().publish(trial.publication("a", 1))
    trial.expect_stored({"a": [1], "b": [2]}, "after a publish() without the id")
    trial.expect_published("a", True, "after a publish() without the id")
    trial.publish("c", 3)
    trial.expect_stored({"a": [1], "b": [2], "c": [3]}, "after a new receive")


@promise("rows_are_stored")
def new_columns_are_added(trial: SinkTrial) -> None:
    """`ensure` adds a new column, which is null in earlier rows. It changes nothing if it is called again."""
    trial.ensure()
    trial.publish("a", 1)
    wider = COLUMNS.append(pa.field("note", pa.string()))
    for _ in range(2):
        trial.ensure(wider)
    trial.another().publish(trial.publication("b", 2, columns=wider))
    found = [row["note"] for row in trial.rows()]
    trial.expect(found == [None, "2"], "[None, '2'] in the new column", found)


@promise("new_columns_are_added")
def removed_columns_stay(trial: SinkTrial) -> None:
    """If a column is not in the model any more, the table keeps it, and new rows are null there."""
    trial.ensure(COLUMNS.append(pa.field("note", pa.string())))
    trial.publish("a", 1, columns=COLUMNS.append(pa.field("note", pa.string())))
    trial.ensure(COLUMNS)
    trial.publish("b", 2)
    found = [row["note"] for row in trial.rows()]
    trial.expect(found == ["1", None], "['1', None] in the column", found)


@promise("rows_are_stored")
def changed_types_are_refused(trial: SinkTrial) -> None:
    """`ensure` raises a `SinkError` with the name of a column whose type has changed, and changes nothing."""
    trial.ensure()
    trial.publish("a", 1)
    changed = COLUMNS.set(1, pa.field("text", pa.int64())).append(pa.field("note", pa.string()))
    error = error_of(lambda: trial.ensure(changed))
    trial.expect(isinstance(error, SinkError) and "text" in str(error), "a SinkError that names text", repr(error))
    trial.expect("note" not in trial.rows()[0], "no new column after a refusal", "the column note")
    trial.publish("b", 2)
    trial.expect_stored({"a": [1], "b": [2]}, "after a refusal")
