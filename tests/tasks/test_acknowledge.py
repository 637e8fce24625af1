"""Acknowledging by group, in the source's units, with errors isolated by group."""

from itertools import cycle

import pyarrow as pa
from pydantic import PrivateAttr

from pipeline_platform.lake.reader import RowRange
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import OUTCOMES
from pipeline_platform.lake.task_report import TaskReport
from pipeline_platform.lake.writer import Writer
from pipeline_platform.source.contract import Refused, SourceError
from pipeline_platform.tasks.acknowledge.acknowledger import AcknowledgeOutcomes, Acknowledger, Answer
from tests.fixtures.small_lake import WINDOW, Memory, returned


class Moody(Memory):
    """Raises for the group `broken`, and refuses ids that begin with `no` or `gone`."""

    def ack(self, ack_ref, ack_ids):
        super().ack(ack_ref, ack_ids)
        if ack_ref == "broken":
            raise SourceError("no answer")
        return [
            Refused(ack_id, "not now", lost=ack_id.startswith("gone"))
            for ack_id in ack_ids
            if ack_id.startswith(("no", "gone"))
        ]


def told_by(lake: Lake, source: Memory, *outcomes: tuple[str, str, str]) -> TaskReport:
    """Return the report of a task over outcomes `(ack_ref, ack_id, action)`. Every second message failed."""
    kinds = cycle(("handled", "failed"))
    rows = [
        {
            "source": "s",
            "message_id": ack_id,
            "ack_ref": ack_ref,
            "ack_id": ack_id,
            "action": action,
            "outcome": next(kinds),
        }
        for ack_ref, ack_id, action in outcomes
    ]
    schema = pa.schema([field for field in OUTCOMES if field.name != "window"])
    with Writer(lake, "p", "r1") as writer:
        writer.write("outcomes", WINDOW, pa.RecordBatch.from_pylist(rows, schema=schema))
        (file,) = writer.close().files
    parts = [[RowRange(f"p/outcomes/{file.path}", WINDOW, 0, file.rows, 0)]]
    (report,) = returned(AcknowledgeOutcomes(source, lake, parts)(0)).reports
    return report


def test_each_group_is_told_at_once_in_the_order_of_its_messages(lake):
    """Handled and failed messages are acknowledged together."""
    source = Memory()
    report = told_by(lake, source, ("b", "2", "ack"), ("b", "1", "ack"), ("a", "9", "ack"), ("a", "3", "ack"))
    assert sorted(source.told) == [("ack", "a", ["9", "3"]), ("ack", "b", ["2", "1"])]
    assert (report.acknowledged, report.refusals, report.errors) == (4, [], [])


def test_an_error_of_one_group_holds_back_no_other_and_is_told_in_words(lake):
    source = Moody()
    report = told_by(lake, source, ("broken", "1", "ack"), ("broken", "2", "ack"), ("sound", "3", "ack"))
    assert ("ack", "sound", ["3"]) in source.told
    assert report.acknowledged == 1
    assert report.errors == ["ack of 2 messages of memory: SourceError: no answer"]


def test_noop_leaves_a_message_alone_nack_gives_it_back_after_its_delay_and_then_the_rest_is_acknowledged(lake):
    source = Memory()
    actions = ("ack", "nack", "nack:30", "noop", "nack:30")
    report = told_by(lake, source, *(("q", str(number), action) for number, action in enumerate(actions, start=1)))
    assert source.told == [("nack:0", "q", ["2"]), ("nack:30", "q", ["3", "5"]), ("ack", "q", ["1"])]
    assert report.acknowledged == 5, "noop counts as acknowledged"


def test_refusals_are_reported_and_leases_that_were_lost_apart(lake):
    report = told_by(lake, Moody(), ("q", "no1", "ack"), ("q", "gone1", "ack"), ("q", "yes", "ack"))
    assert (report.acknowledged, report.lost) == (1, 1)
    assert report.refusals == ["no1: not now"]


def test_of_many_refusals_a_sample_is_told(lake):
    report = told_by(lake, Moody(), *(("q", f"no{index}", "ack") for index in range(100)))
    assert report.acknowledged == 0
    assert len(report.refusals) == 10


class Relenting(Moody):
    """Refuses each id, and raises for the group `broken`, at the first call."""

    _asked: set[str] = PrivateAttr(default_factory=set)

    def ack(self, ack_ref, ack_ids):
        new = {ack_ref, *ack_ids} - self._asked
        self._asked |= new
        if ack_ref == "broken" and "broken" in new:
            return super().ack("broken", ack_ids)
        super().ack("q", ack_ids)
        return [Refused(ack_id, "not now", lost=ack_id.startswith("gone")) for ack_id in ack_ids if ack_id in new]


def patiently(source, ack_ref, ack_ids, attempts=3):
    return Acknowledger(attempts, 0.01).acknowledge(source, ack_ref, "ack", ack_ids)


def test_what_is_refused_is_asked_for_again_alone():
    source = Relenting()
    source.ack("q", ["early"])
    source.told.clear()
    answer = patiently(source, "q", ["early", "late", "gone"])
    assert source.told == [("ack", "q", ["early", "late", "gone"]), ("ack", "q", ["late"])]
    assert answer == Answer(2, [Refused("gone", "not now", lost=True)], [])


class Stumbling(Memory):
    """Refuses an id at the first call, raises at the second, and accepts all later ones."""

    def ack(self, ack_ref, ack_ids):
        super().ack(ack_ref, ack_ids)
        if len(self.told) == 2:
            raise SourceError("no answer")
        return [Refused("b", "not now")] if len(self.told) == 1 else []


def test_an_error_on_the_way_asks_for_no_more_than_was_left():
    source = Stumbling()
    answer = patiently(source, "q", ["a", "b", "c"])
    assert [ids for _, _, ids in source.told] == [["a", "b", "c"], ["b"], ["b"]]
    assert answer == Answer(3, [], [])


def test_a_group_without_an_answer_is_asked_again_until_attempts_are_over():
    source = Relenting()
    answer = patiently(source, "broken", ["a", "b"])
    broken = patiently(Moody(), "broken", ["a", "b"], attempts=2)
    assert answer == Answer(2, [], [])
    assert (broken.acknowledged, len(broken.errors)) == (0, 1)
