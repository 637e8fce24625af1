"""Erasing of messages: nothing of them is left in any file, and no other message is affected."""

import threading
from typing import Any

import pytest
from pydantic import BaseModel

from pipeline_platform import Message, TableBatcher
from pipeline_platform.lake.erasing import erasing
from pipeline_platform.lake.erasing.erasing import Erasing, searched_columns
from pipeline_platform.lake.erasing.erasure_choice import ErasureChoice
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.maintenance.compaction import compact
from pipeline_platform.lake.removed_batchers import removed_batchers
from pipeline_platform.lake.replay import ReplayedMessages
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from tests.fixtures.erasing import (
    ANNA,
    BEN,
    LATER,
    Visits,
    WithoutPersons,
    choice,
    contents,
    erase,
    ids,
    local,
    outcomes,
    payload,
    places,
    receive,
    tables,
)
from tests.fixtures.failures import event, record
from tests.fixtures.small_lake import WINDOW, Run, visible

__all__ = ["local", "tables"]


def test_rows_payloads_and_old_files_of_a_person_are_erased_by_a_column(tables):
    compact(tables["persons"], [])
    erased = erase(tables, where=[f"email={ANNA}"])

    assert erased.is_complete
    assert (erased.ids, erased.windows) == (["anna-1"], {WINDOW})
    assert erased.rows == {"messages": 1, "outcomes": 1, "persons": 1, "visits": 1}
    assert [ids(tables, name) for name in ("messages", "persons", "visits", "failed")] == [
        ["anna-2", "ben-1", "ben-2"],
        ["ben-1"],
        ["ben-1"],
        ["anna-2", "ben-2"],
    ]
    assert outcomes(tables) == {"anna-1": "erased", "ben-1": "handled", "anna-2": "failed", "ben-2": "failed"}
    assert {path.partition("/")[0] for path in places(tables, "anna-1")} == {"outcomes"}


def test_failed_messages_are_erased_by_a_text_in_their_payload(tables):
    erased = erase(tables, containing=ANNA)

    assert erased.is_complete
    assert erased.ids == ["anna-1", "anna-2"]
    assert places(tables, ANNA) == set()
    assert places(tables, BEN) != set()
    assert (ids(tables, "failed"), ids(tables, "messages")) == (["ben-2"], ["ben-1", "ben-2"])


def test_ids_of_another_source_stay(local):
    columns = searched_columns(local)
    others = ErasureChoice.of(columns, ["memory", "east"], message_ids=["anna-1"], source="east")
    assert Erasing(local, others).erase(0).ids == []
    assert ids(local, "persons") == ["anna-1", "ben-1"]


def test_a_preview_counts_and_changes_nothing(local):
    before = dict(contents(local))
    erased = Erasing(local, choice(local, containing=ANNA)).preview()
    assert erased.ids == ["anna-1", "anna-2"]
    assert erased.rows == {"messages": 2, "outcomes": 2, "failed": 1, "persons": 1, "visits": 1}
    assert dict(contents(local)) == before


def test_a_second_erasure_finds_nothing_and_changes_nothing(local):
    erase(local, containing=ANNA)
    before = dict(contents(local))
    again = erase(local, containing=ANNA)
    assert (again.ids, again.rows, again.is_complete) == ([], {}, True)
    assert dict(contents(local)).keys() == before.keys()


@pytest.mark.parametrize(
    "data",
    [
        r'"zoë+\"z\"/1"',
        r'"zo\u00eb+\"z\"/1"',
        r'"zo\u00EB\u002B\u0022z\u0022\/1"',
        r'"\u007a\u006F\u00eb+\"z\"\u002f1"',
    ],
)
def test_a_text_is_found_with_any_escapes_of_json(local, data):
    receive(local, "r3", ("z", data.encode()), ("y", data.replace("1", "2").encode())).finish()
    assert erase(local, containing='zoë+"z"/1').ids == ["z"]


class Named(BaseModel):
    name: str


class Note(BaseModel):
    reason: str
    persons: list[Named]


class Notes(Visits):
    """Stores notes of persons, in columns that the platform's own tables have, too, and in nested columns."""

    batchers = {"persons": TableBatcher(schema=Note)}

    def handle_message(self, message: Message, context: Any) -> Any:
        reason, person = message.data.decode().split()
        return message.put({"reason": reason, "persons": [{"name": "x"}, {"name": person}]}, batcher="persons")


def test_names_of_nested_fields_are_not_searched(tmp_path):
    tables = Tables(Lake(root=str(tmp_path)), Notes)
    receive(tables, "r1", ("a", b"reason-1 person-1")).finish()
    assert erase(tables, containing="name").ids == []


@pytest.mark.parametrize("text", ["reason-1", "person-1"])
def test_a_text_is_found_in_every_column_of_a_batcher_after_its_payload_expired(tmp_path, text):
    tables = Tables(Lake(root=str(tmp_path)), Notes)
    receive(tables, "r1", ("a", b"reason-1 person-1"), ("b", b"reason-2 person-2")).finish()
    with tables["messages"].look() as handle:
        tables["messages"].swap(handle, "retention", [], removed=tables["messages"].files(handle))

    assert erase(tables, containing=text).ids == ["a"]
    assert ids(tables, "persons") == ["b"]


def test_failures_of_other_messages_that_quote_the_text_keep_their_payload(local):
    reason = {"reason": f"batch refused: {ANNA}", "traceback": f"ValueError: {ANNA}"}
    record(local.lake, "r3", event("c", data=b"charles", **reason), pipeline="visits")
    assert erase(local, containing=ANNA).is_complete
    (left,) = [row for row in visible(local, "failed") if row["message_id"] == "c"]
    assert (left["data"], left["reason"], left["traceback"]) == (b"charles", "", "")
    assert places(local, ANNA) == set()


def test_a_value_is_compared_in_the_type_of_its_column(local):
    assert erase(local, where=["age=41", f"email={BEN}"]).ids == []
    assert erase(local, where=["age=41"]).ids == ["anna-1"]


def test_the_table_of_a_removed_batcher_is_searched_and_erased(local):
    after = Tables(local.lake, WithoutPersons)
    assert removed_batchers(after) == ["persons"]
    assert erase(after, where=[f"email={ANNA}"]).rows["persons"] == 1
    assert {path.partition("/")[0] for path in places(local, "anna-1")} == {"outcomes"}


# Exactly once


def test_a_redelivery_of_an_erased_message_is_not_stored_again(local):
    again = receive(local, "r3", ("anna-1", payload(ANNA, age=41)), ("new", payload(BEN, age=1)))
    again.receive = again.receive.model_copy(update={"base": 0})
    erase(local, where=[f"email={ANNA}"])
    again.finish()
    assert ids(local, "persons") == ["ben-1", "new"]
    assert sorted((row["receive_id"], row["outcome"]) for row in visible(local, "outcomes")) == [
        ("erased", "erased"),
        ("r1", "handled"),
        ("r2", "failed"),
        ("r2", "failed"),
        ("r3", "duplicate"),
        ("r3", "handled"),
    ]


def test_a_redelivery_of_a_message_whose_receive_crashed_is_not_handled(local):
    dead = receive(local, "r3", ("anna-3", payload(ANNA, age=43))).work()
    dead.ledger.remove("r3")  # it is fenced and released
    begun = receive(local, "r4", ("anna-3", payload(ANNA, age=43)), ("new", payload(BEN, age=1)))
    begun.ledger.remove("r4")  # it begins later
    erased = erase(local, containing=ANNA)
    assert (erased.is_complete, erased.undecided, outcomes(local)["anna-3"]) == (True, 1, "erased")
    begun.ledger.begin(begun.receive)
    begun.finish()
    assert ids(local, "persons") == ["ben-1", "new"]


def test_an_unknown_id_is_recorded_as_erased_once(local):
    assert [erase(local, message_ids=["unknown"]).undecided for _ in range(2)] == [1, 0]
    assert outcomes(local)["unknown"] == "erased"
    assert replay(local).finish()


def replay(tables: Tables) -> Run:
    version = tables["outcomes"].version()
    source = ReplayedMessages(name="memory", lake=tables.lake, pipeline="visits", windows=(WINDOW,), version=version)
    return Run(tables, source, "replay", origin="messages", replaces=source.finished(), base=version)


def test_a_replay_handles_the_other_messages_and_keeps_the_erased_outcome(local):
    erase(local, message_ids=["anna-1"])
    replay(local).finish()
    assert ids(local, "persons") == ["ben-1"]
    assert outcomes(local)["anna-1"] == "erased"
    assert erase(local, message_ids=["anna-1"]).rows == {}


def retry(tables: Tables) -> Run:
    failed = FailedMessages(name="memory", lake=tables.lake, pipeline="visits", windows=(LATER,))
    return Run(tables, failed, "retry", origin="failed", windows=(LATER,))


def ended(run: Run) -> None:
    run.decide().publish()
    run.ledger.remove(run.receive.receive_id)


@pytest.mark.parametrize(("kind", "failures"), [(replay, [("ben-2", 1)]), (retry, [("ben-2", 1), ("ben-2", 2)])])
def test_a_run_in_progress_ends_before_the_erasure(local, monkeypatch, kind, failures):
    run = kind(local).work()
    monkeypatch.setattr(erasing, "_POLL_S", 0.01)
    thread = threading.Timer(0.3, ended, [run])
    thread.start()
    erased = erase(local, 60, containing=ANNA)
    thread.join()
    assert erased.is_complete
    assert places(local, ANNA) == set()
    assert ids(local, "persons") == ["ben-1"]
    assert sorted((row["message_id"], row["attempt"]) for row in visible(local, "failed")) == failures
    assert outcomes(local)["anna-2"] == "erased"


def test_a_retry_that_begins_during_the_erasure_brings_no_row_back(local, monkeypatch):
    rewrite, threads = erasing.rewrite, list[threading.Timer]()

    def meanwhile(*given: Any) -> Any:
        if not threads:  # before the failures are rewritten
            threads.append(threading.Timer(0.5, ended, [retry(local).work()]))
            threads[0].start()
        return rewrite(*given)

    monkeypatch.setattr(erasing, "rewrite", meanwhile)
    monkeypatch.setattr(erasing, "_POLL_S", 0.01)
    erased = erase(local, 60, containing=ANNA)
    threads[0].join()
    assert erased.is_complete
    assert places(local, ANNA) == set()


# Receives in progress


def test_rows_of_an_unfinished_receive_and_old_files_are_left_until_it_ends(local):
    run = receive(local, "r3", ("anna-3", payload(ANNA, age=43))).work()

    erased = erase(local, containing=ANNA)

    assert (erased.unfinished, erased.old_files) == (["r3"], 0)
    assert ids(local, "persons") == ["ben-1"]
    run.decide().publish()
    assert ids(local, "persons") == ["anna-3", "ben-1"]
    assert erase(local, containing=ANNA).unfinished == ["r3"], "it is not acknowledged yet"
    assert ids(local, "persons") == ["anna-3", "ben-1"]
    run.ledger.remove("r3")
    assert erase(local, containing=ANNA).is_complete
    assert places(local, ANNA) == set()


def test_a_receive_that_begins_during_the_erasure_keeps_its_files(local, monkeypatch):
    rewrite, begun = erasing.rewrite, list[Run]()

    def meanwhile(*given: Any) -> Any:
        if not begun:
            begun.append(receive(local, "r9", ("a9", payload(ANNA, age=9))).work())
        return rewrite(*given)

    monkeypatch.setattr(erasing, "rewrite", meanwhile)
    monkeypatch.setattr(erasing, "_POLL_S", 0.01)
    erased = erase(local, 0.05, containing=ANNA)
    assert not erased.is_complete
    begun[0].decide().publish()
    assert ids(local, "persons") == ["a9", "ben-1"]


def test_receives_that_follow_each_other_at_the_same_time_lose_and_double_no_message(local, monkeypatch):
    monkeypatch.setattr(erasing, "_POLL_S", 0.01)
    is_over, numbers = threading.Event(), list[int]()

    def continuous() -> None:
        tables = Tables(local.lake, Visits)
        while not is_over.is_set() or len(numbers) < 5:
            numbers.append(len(numbers))
            receive(tables, f"c{len(numbers)}", (f"n{numbers[-1]:03}", payload(BEN, age=numbers[-1]))).finish()

    thread = threading.Thread(target=continuous)
    thread.start()
    try:
        assert erase(local, 60, containing=ANNA).is_complete
    finally:
        is_over.set()
        thread.join()
    assert places(local, ANNA) == set()
    for table in ("persons", "visits", "messages"):
        assert [id_ for id_ in ids(local, table) if id_.startswith("n")] == [f"n{number:03}" for number in numbers]
