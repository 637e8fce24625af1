"""Reports of tasks: their sum, their JSON, and what remains of the notes of release 0.2."""

import io
import json
from collections import Counter
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline_platform.lake.ledger import Ledger
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.task_report import CallbackOutput, FailureSample, TaskReport, from_json
from tests.lake.test_ledger import RECEIVE

FULL = TaskReport(
    task=1,
    began=1.5,
    seconds=2.5,
    received=3,
    handled=Counter(w1=2),
    failed=Counter(w1=1),
    staged=Counter(left=2),
    batch_keys={"left": Counter({"a,b": 2})},
    reasons=Counter({"ValueError: x": 1}),
    sample=[FailureSample("m1", "handle_message", "ValueError", "x", 1)],
    checksum=2**70,
    notified={"ref": [(0, 2)]},
    output=[CallbackOutput("callbacks of task 1", "line\n", 3)],
    published_until=datetime(2026, 1, 1, tzinfo=UTC),
)


def test_a_report_is_the_same_after_json():
    assert from_json(FULL.to_json()) == FULL
    assert json.loads(TaskReport().to_json()) == {}, "defaults are not stored"


def test_totals_add_counts_by_key_and_join_samples():
    other = TaskReport(
        received=1, handled=Counter(w1=1, w2=1), batch_keys={"left": Counter(c=1)}, notified={"ref": [(5, 6)]}
    )
    totals = Manifest(reports=[FULL, other]).totals
    assert (totals.received, totals.handled, totals.failed) == (4, {"w1": 3, "w2": 1}, {"w1": 1})
    assert totals.batch_keys == {"left": {"a,b": 2, "c": 1}}
    assert totals.notified == {"ref": [(0, 2), (5, 6)]}
    assert (totals.sample, totals.output) == (FULL.sample, FULL.output)
    assert {name: totals.counts()[name] for name in ("received", "handled", "staged")} == {
        "received": 4, "handled": 4, "staged": 2
    }  # fmt: skip


def test_a_receive_of_release_0_2_keeps_what_finishing_it_needs(lake):
    notes = [
        {"received": 5, "redelivered": 0, "began": 1.0, "seconds": 2.0, "task": 0},
        {
            "returned": 2,
            "returned@w1": 2,
            "duplicates": 1,
            "duplicates@w1": 1,
            "dead": 1,
            "dead@w1": 1,
            "given_back": 2,
        },
        {"heard": {"ref": [[0, 3]]}, "unheard": 1, "letters": 4, "dropped": 6, "rows:kept": 3, "sample": []},
        {"step": "handle", "took": 1.0},
    ]
    columns = ("table", "window", "path", "rows", "bytes", "stats")
    table = pa.Table.from_pylist([dict.fromkeys(columns) | {"notes": json.dumps(note)} for note in notes])
    sink = io.BytesIO()
    pq.write_table(table, sink)
    lake.write("flights/_receives/r1/handle.parquet", sink.getvalue())

    manifest = Ledger(lake, "flights").manifest(RECEIVE)

    assert len(manifest.reports) == 4, "the step is done"
    assert (
        manifest.totals
        == Manifest(
            reports=[
                TaskReport(
                    received=5,
                    returned=Counter({"": 2}),
                    duplicates=Counter({"": 1}),
                    dead=1,
                    released=2,
                    notified={"ref": [(0, 3)]},
                    not_taken=1,
                    letters=4,
                    dropped=6,
                )
            ]
        ).totals
    )
