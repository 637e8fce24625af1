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


def test_reasons_of_one_cause_are_one_before_the_most_frequent_are_chosen():
    report = TaskReport()
    for number in range(20):
        report.count_reason(f"ValueError: order {number} has a negative total: -{number}")
        report.count_skipped(f"order {number} is a test")
    for letter in "abcdefghijkl":
        report.count_reason(letter * 2)
        report.count_reason(letter * 2)

    assert report.bounded().reasons.most_common(1) == [("ValueError: order * has a negative total: *", 20)]
    assert report.bounded().skip_reasons == {"order * is a test": 20}


def test_reasons_of_one_cause_from_several_tasks_are_one_for_people():
    reports = [TaskReport(reasons=Counter({f"order {number} is late": 1, "no price at 7": 1})) for number in range(3)]
    totals = Manifest(reports=reports).totals.for_people()
    assert totals.reasons == {"order * is late": 3, "no price at 7": 3}


def test_beyond_a_bound_reasons_are_counted_by_cause(monkeypatch):
    monkeypatch.setattr("pipeline_platform.lake.task_report._DISTINCT", 10)
    report = TaskReport()
    for number in range(50):
        report.count_reason(f"order {number} is late")
    assert report.bounded().reasons == {"order * is late": 50}
