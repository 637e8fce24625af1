"""Failures as people look at them: in groups, and one with its history."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow.parquet as pq

from pipeline_platform.lake import writer
from pipeline_platform.lake.inspection import IDS, Group, grouped, history
from tests.fixtures.failures import LATER, NOON, event, failures, record
from tests.fixtures.small_lake import WINDOW

MINUTE = timedelta(minutes=1)


def test_failures_are_grouped_by_window_state_kind_and_reason(lake):
    record(lake, "r1", event("a"), event("b", due_at=NOON), event("c", due_at=NOON + MINUTE), event("d"))
    record(lake, "r2", event("e", kind="KeyError"), event("f", state="dead"), event("a", 2), event("d", 2, "closed"))
    record(lake, "r3", event("g", reason=None, kind=None), window=LATER)

    assert [group._replace(ids=sorted(group.ids)) for group in grouped(failures(lake), NOON)] == [
        Group(WINDOW, "waiting", "ValueError", "no price: 7", 2, NOON + MINUTE, ["a", "c"]),
        Group(WINDOW, "dead", "ValueError", "no price: 7", 1, None, ["f"]),
        Group(WINDOW, "due", "ValueError", "no price: 7", 1, NOON, ["b"]),
        Group(WINDOW, "waiting", "KeyError", "no price: 7", 1, None, ["e"]),
        Group(LATER, "waiting", "", "", 1, None, ["g"]),
    ]
    assert [group.ids for group in grouped(failures(lake, kind="KeyError"), NOON)] == [["e"]]
    assert [group.ids for group in grouped(failures(lake, windows=(LATER,)), NOON)] == [["g"]]
    assert [(group.state, group.ids) for group in grouped(failures(lake), NOON, closed=True)] == [("closed", ["d"])]


def test_of_a_large_group_some_are_named(lake):
    record(lake, "r1", *(event(f"m{number}") for number in range(IDS + 5)))

    (group,) = grouped(failures(lake), NOON)

    assert (group.messages, len(group.ids)) == (IDS + 5, IDS)


def test_without_a_table_there_is_nothing_to_look_at(lake):
    assert grouped(failures(lake), datetime.now(UTC)) == []
    assert history(failures(lake), "m") == []


def test_the_history_of_a_message_is_in_the_order_in_which_events_count(lake):
    record(lake, "r3", event("m", 3, "closed", data=None))
    record(lake, "r1", event("m", 1), event("other", 1))
    record(lake, "r2", event("m", 2, "dead", reason="no date"))

    events = history(failures(lake), "m")

    assert [(one["attempt"], one["state"], one["receive_id"]) for one in events] == [
        (1, "open", "r1"),
        (2, "dead", "r2"),
        (3, "closed", "r3"),
    ]
    assert (events[0]["data"], events[0]["window"], events[1]["reason"]) == (b"m:1", WINDOW, "no date")


def test_the_history_of_a_message_reads_payloads_only_where_the_message_is(lake, monkeypatch):
    monkeypatch.setattr(writer, "ROW_GROUP_ROWS", 10)
    record(lake, "r1", *(event(f"m{number:03}") for number in range(100)), event("m999"))
    record(lake, "r2", *(event(f"{letter}{number}") for number in range(50) for letter in "az"), event("m042", 2))
    read: list[list[str]] = []
    real = pq.ParquetFile.read_row_group

    def reading(self: Any, group: int, columns: list[str], **options: Any) -> Any:
        read.append(columns)
        return real(self, group, columns=columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", reading)

    assert [one["data"] for one in history(failures(lake), "m042")] == [b"m042:1", b"m042:2"]
    assert sum("data" in columns for columns in read) == 2
    assert len([columns for columns in read if "data" not in columns]) < 22, "statistics exclude most of the first file"
