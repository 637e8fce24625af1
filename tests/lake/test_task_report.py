"""Reports of tasks: their sum and their JSON."""

import json
from collections import Counter
from datetime import UTC, datetime

from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.task_report import CallbackOutput, FailureSample, TaskReport, from_json

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
