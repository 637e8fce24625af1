"""Erasing of messages: nothing of them is left in any file, and no other message is affected."""

import json
import threading
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake.transaction import AddAction, CommitProperties
from pydantic import BaseModel

from pipeline_platform import Message, Pipeline, Producer, TableBatcher
from pipeline_platform.lake import erasing
from pipeline_platform.lake.compaction import UnreadableFileError, compact
from pipeline_platform.lake.erasing import Erased, Erasing, searched_columns
from pipeline_platform.lake.erasure_choice import ErasureChoice
from pipeline_platform.lake.failed import FailedMessages
from pipeline_platform.lake.removed_batchers import removed_batchers
from pipeline_platform.lake.replay import ReplayedMessages
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Table, Tables
from pipeline_platform.lake.writer import write_rows
from pipeline_platform.model.strict_options import PipelineError
from tests.fixtures.failures import event, record
from tests.fixtures.small_lake import WINDOW, Keeping, Memory, Row, Run, visible

ANNA, BEN = "anna@example.com", "ben@example.com"
LATER = "2026-01-01T0100"


class Person(BaseModel):
    email: str
    age: int


class Visits(Pipeline):
    """Stores persons, and their visits without the address; `no age` fails."""

    name = "visits"
    producer = Producer(source="memory")
    batchers = {"persons": TableBatcher(schema=Person), "visits": TableBatcher(schema=Row)}

    def handle_message(self, message: Message, context: Any) -> Any:
        given = json.loads(message.data)
        if "age" not in given:
            raise ValueError(f"no age: {given}")
        visit = message.put_batcher("visits").put_data(Row(text=f"visit {given['age']}"))
        return [message.put_batcher("persons").put_data(Person(**given)), visit]


class WithoutPersons(Visits):
    """The same pipeline without its first batcher."""

    batchers = {"visits": TableBatcher(schema=Row)}


def payload(email: str, **more: Any) -> bytes:
    return json.dumps({"email": email, **more}).encode()


def receive(tables: Tables, receive_id: str, *deliveries: tuple[str, bytes], window: str = WINDOW) -> Run:
    return Run(tables, Memory(deliveries_=deliveries), receive_id, windows=(window,))


@pytest.fixture(params=["local", "s3"])
def tables(request, tmp_path) -> Tables:
    """Messages of two persons in two windows; the second of each failed."""
    lake = Lake(root=str(tmp_path))
    if request.param == "s3":
        lake = Lake(root=f"s3://lake/erasing/{time.time_ns()}", storage_options=request.getfixturevalue("s3"))
    return filled(Tables(lake, Visits))


@pytest.fixture
def local(tmp_path) -> Tables:
    return filled(Tables(Lake(root=str(tmp_path)), Visits))


def filled(tables: Tables) -> Tables:
    receive(tables, "r1", ("anna-1", payload(ANNA, age=41)), ("ben-1", payload(BEN, age=52))).finish()
    receive(tables, "r2", ("anna-2", payload(ANNA)), ("ben-2", payload(BEN)), window=LATER).finish()
    return tables


def choice(tables: Tables, **options: Any) -> ErasureChoice:
    return ErasureChoice.of(searched_columns(tables), ["memory"], **options)


def erase(tables: Tables, timeout_s: float = 0, **options: Any) -> Erased:
    return Erasing(tables, choice(tables, **options)).erase(timeout_s)


def contents(tables: Tables) -> Iterator[tuple[str, bytes]]:
    """Yield all bytes under the folder of a pipeline, and all values of Parquet files."""
    folder = tables.pipeline.name
    for path in tables.lake.files(folder):
        content = tables.lake.read(f"{folder}/{path}") or b""
        yield path, content
        if path.endswith(".parquet"):
            file = pq.ParquetFile(pa.BufferReader(content))
            yield path, b"\n".join(repr(column.to_pylist()).encode() for column in file.read().columns)


def places(tables: Tables, text: str) -> set[str]:
    """Return the files that contain a text."""
    return {path for path, content in contents(tables) if text.encode() in content}


def ids(tables: Tables, table: str) -> list[str]:
    return sorted(row["message_id"] for row in visible(tables, table))


def outcomes(tables: Tables) -> dict[str, str]:
    return {row["message_id"]: row["outcome"] for row in visible(tables, "outcomes")}


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


def test_messages_are_erased_by_their_ids(tables):
    erased = erase(tables, message_ids=["anna-1", "anna-2", "unknown"])

    assert (erased.ids, erased.is_complete) == (["anna-1", "anna-2"], True)
    assert places(tables, ANNA) == set()


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


def test_a_text_is_found_in_its_json_form(local):
    receive(local, "r3", ("z", payload("zoë@example.com"))).finish()
    assert erase(local, containing="zoë@example.com").ids == ["z"]


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


def test_a_replay_in_progress_ends_before_the_erasure(local, monkeypatch):
    run = replay(local).work()
    monkeypatch.setattr(erasing, "_POLL_S", 0.01)
    thread = threading.Timer(0.3, lambda: (run.decide().publish(), run.ledger.remove("replay")))
    thread.start()
    erased = erase(local, 60, containing=ANNA)
    thread.join()
    assert erased.is_complete
    assert places(local, ANNA) == set()
    assert ids(local, "persons") == ["ben-1"]


def test_a_retry_in_progress_ends_before_the_erasure(local, monkeypatch):
    failed = FailedMessages(name="memory", lake=local.lake, pipeline="visits", windows=(LATER,))
    run = Run(local, failed, "retry", origin="failed", windows=(LATER,)).work()
    monkeypatch.setattr(erasing, "_POLL_S", 0.01)
    thread = threading.Timer(0.3, lambda: (run.decide().publish(), run.ledger.remove("retry")))
    thread.start()
    erased = erase(local, 60, containing=ANNA)
    thread.join()
    assert erased.is_complete
    assert places(local, ANNA) == set()
    assert sorted((row["message_id"], row["attempt"]) for row in visible(local, "failed")) == [
        ("ben-2", 1),
        ("ben-2", 2),
    ]
    assert outcomes(local)["anna-2"] == "erased"


def test_a_retry_that_begins_during_the_erasure_brings_no_row_back(local, monkeypatch):
    rewrite, threads = erasing.rewrite, list[threading.Timer]()

    def meanwhile(*given: Any) -> Any:
        if not threads:  # before the failures are rewritten
            failed = FailedMessages(name="memory", lake=local.lake, pipeline="visits", windows=(LATER,))
            run = Run(local, failed, "retry", origin="failed", windows=(LATER,)).work()
            threads.append(threading.Timer(0.5, lambda: (run.decide().publish(), run.ledger.remove("retry"))))
            threads[0].start()
        return rewrite(*given)

    monkeypatch.setattr(erasing, "rewrite", meanwhile)
    monkeypatch.setattr(erasing, "_POLL_S", 0.01)
    erased = erase(local, 60, containing=ANNA)
    threads[0].join()
    assert erased.is_complete
    assert places(local, ANNA) == set()


def test_a_retry_afterwards_finds_no_failure(local):
    erase(local, containing=ANNA)
    assert FailedMessages(name="memory", lake=local.lake, pipeline="visits").open_by_window() == {LATER: 1}


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


def test_commits_of_others_during_the_erasure_are_kept(local, monkeypatch):
    rewrite, numbers = erasing.rewrite, count()

    def meanwhile(*given: Any) -> Any:
        number = next(numbers)
        receive(local, f"c{number}", (f"n{number}", payload(BEN, age=number))).finish()
        return rewrite(*given)

    monkeypatch.setattr(erasing, "rewrite", meanwhile)
    assert erase(local, containing=ANNA).is_complete
    assert places(local, ANNA) == set()
    assert ids(local, "persons") == ["ben-1", *(f"n{number}" for number in range(next(numbers)))]


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


# Files that no commit names


def write_old(tables: Tables, prefix: str, email: str = ANNA) -> str:
    rows = pa.Table.from_pylist([row for row in visible(tables, "persons") if row["email"] == email])
    rows = rows.drop_columns(["window"])
    (file,) = write_rows(tables.lake, "visits", prefix, [("persons", WINDOW, rows)])
    return f"persons/{file.path}"


@pytest.mark.parametrize("prefix", ["compacted", "by-hand-4711", "r1-handle-0", "crashed-handle-0"])
def test_old_files_that_no_commit_can_add_are_removed(local, prefix):
    path = write_old(local, prefix)
    assert path in places(local, ANNA)
    erased = erase(local, containing=ANNA)
    assert (erased.is_complete, places(local, ANNA)) == (True, set())


@pytest.mark.parametrize("is_unfinished", [True, False])
def test_an_incomplete_file_is_removed_if_its_receive_has_ended(local, before_removal, is_unfinished):
    run = receive(local, "0" * 32, ("c", payload(ANNA)))
    run.ledger.remove("0" * 32)
    if is_unfinished:
        before_removal(lambda: run.ledger.begin(run.receive))
    path = f"visits/persons/window={WINDOW}/{'0' * 32}-handle-0-0123abcd-0.parquet"
    local.lake.write(path, ANNA.encode())
    assert Erasing(local, choice(local, containing=ANNA)).preview().old_files == 0
    assert erase(local, containing=ANNA).is_complete
    assert (local.lake.read(path) is not None) == is_unfinished


def test_old_files_of_other_persons_stay(local):
    path = write_old(local, "compacted", BEN)
    erase(local, containing=ANNA)
    assert path in places(local, BEN)


@pytest.mark.parametrize("name", ["repair-0123abcd-0.parquet", "part-00000-1b2c-c000.snappy.parquet"])
def test_an_old_file_that_a_commit_may_still_add_is_left_and_named(local, name):
    path = write_old(local, "compacted")
    other = f"persons/window={WINDOW}/{name}"
    local.lake.write(f"visits/{other}", local.lake.read(f"visits/{path}") or b"")

    erased = erase(local, containing=ANNA)

    assert erased.left == [f"visits/{other}"]
    assert places(local, ANNA) == {other}
    local.lake.remove_file(f"visits/{other}")
    assert erase(local, containing=ANNA).is_complete


def test_a_file_of_another_writer_is_removed_once_a_commit_has_removed_it(local):
    receive(local, "r3", ("anna-3", payload(ANNA, age=43))).finish()
    local["persons"].open().optimize.compact()
    assert [path for path in places(local, ANNA) if "/part-" in path]
    assert len(ids(local, "persons")) == 3
    assert erase(local, containing=ANNA).is_complete
    assert places(local, ANNA) == set()


def test_a_compaction_that_has_written_its_file_cannot_commit_it_afterwards(local, monkeypatch):
    receive(local, "r3", ("anna-3", payload(ANNA, age=43))).finish()
    persons, swap = local["persons"], Table.swap

    def erased_first(self: Table, *given: Any, **more: Any) -> None:
        monkeypatch.setattr(Table, "swap", swap)
        assert erase(local, containing=ANNA).is_complete
        swap(self, *given, **more)

    monkeypatch.setattr(Table, "swap", erased_first)
    compact(persons, errors := [])
    assert errors == []
    assert ids(local, "persons") == ["ben-1"]
    assert places(local, ANNA) == set()


@pytest.fixture
def before_removal(monkeypatch):
    """Return a function that sets what others do after the search and before the removal of old files."""

    def act(meanwhile: Any) -> None:
        remove_old = Erasing._remove_old

        def later(self: Erasing, erased: Erased) -> None:
            monkeypatch.setattr(Erasing, "_remove_old", remove_old)
            meanwhile()
            remove_old(self, erased)

        monkeypatch.setattr(Erasing, "_remove_old", later)

    return act


def test_files_of_a_receive_that_began_meanwhile_are_left(local, before_removal):
    run = receive(local, "r9", ("anna-1", payload(ANNA, age=41)))
    run.ledger.remove("r9")  # it begins later

    def begin() -> None:
        run.ledger.begin(run.receive)
        run.work()

    before_removal(begin)
    erased = erase(local, message_ids=["anna-1"])
    assert {path.split("/window")[0] for path in erased.left} == {"visits/messages", "visits/persons", "visits/visits"}
    run.decide().publish()
    assert ids(local, "persons") == ["anna-1", "ben-1"], "every file of the receive exists"


def test_a_compaction_of_rows_that_a_receive_wrote_meanwhile_keeps_its_file(local, before_removal):
    paths = list[str]()

    def meanwhile() -> None:
        receive(local, "r9", ("anna-1", payload(ANNA, age=41))).finish()
        paths.append(write_old(local, "compacted"))

    before_removal(meanwhile)
    erased = erase(local, message_ids=["anna-1"])
    assert f"visits/{paths[0]}" in erased.left
    assert "visits/persons: rows that a receive wrote meanwhile (1)" in erased.left
    assert erase(local, message_ids=["anna-1"]).is_complete
    assert places(local, ANNA) == {path for path in places(local, ANNA) if path.startswith(("messages/", "failed/"))}


# Bounds in the log


def test_bounds_of_other_writers_are_removed_from_the_log(tables):
    persons = tables["persons"]
    for _ in range(2):  # a checkpoint with the bounds, and commits before and after it
        with persons.look() as handle:
            (file,) = persons.files(handle, [WINDOW])
            bounds = {"numRecords": 2, "minValues": {"email": ANNA}, "maxValues": {"email": BEN}, "nullCount": {}}
            add = AddAction(file.path, file.bytes, {"window": WINDOW}, 1, data_change=False, stats=json.dumps(bounds))
            handle.create_write_transaction(
                [add], "append", handle.schema(), ["window"], commit_properties=CommitProperties(max_commit_retries=0)
            )
            handle.update_incremental()
            handle.create_checkpoint()
    assert {path.rpartition(".")[2] for path in places(tables, ANNA) if "_delta_log" in path} == {"json", "parquet"}

    assert erase(tables, where=[f"email={ANNA}"]).is_complete

    assert [path for path in places(tables, ANNA) if "_delta_log" in path] == []
    assert [row["email"] for row in Tables(tables.lake, Visits)["persons"].open().to_pyarrow_table().to_pylist()] == [
        BEN
    ]


# Crashes


def test_after_a_crash_at_any_point_the_same_command_completes_it(tmp_path, monkeypatch):
    swap, remove, crashes = Table.swap, Lake.remove_file, 0
    for fatal in count(1):
        tables = filled(Tables(Lake(root=str(tmp_path / str(fatal))), Visits))
        write_old(tables, "compacted")
        calls = count(1)

        def dies(call: Any, calls: Iterator[int] = calls, fatal: int = fatal) -> Any:
            def once(*given: Any, **more: Any) -> Any:
                if next(calls) == fatal:
                    raise KeyboardInterrupt
                return call(*given, **more)

            return once

        monkeypatch.setattr(Table, "swap", dies(swap))
        monkeypatch.setattr(Lake, "remove_file", dies(remove))
        try:
            erase(tables, where=[f"email={ANNA}"])
            is_over = True
        except KeyboardInterrupt:
            is_over, crashes = False, crashes + 1
        monkeypatch.undo()
        assert erase(tables, where=[f"email={ANNA}"]).is_complete
        assert {path.partition("/")[0] for path in places(tables, "anna-1")} == {"outcomes"}
        assert (ids(tables, "persons"), outcomes(tables)["anna-1"]) == (["ben-1"], "erased")
        if is_over:
            break
    assert crashes > 6


def test_a_damaged_file_ends_the_erasure_with_the_command_that_repairs_it(local):
    (path,) = [path for path in local.lake.files("visits/persons") if path.startswith("window")]
    local.lake.write(f"visits/persons/{path}", b"damaged")
    with pytest.raises(UnreadableFileError, match=r"visits/persons: window.* cannot be read: .*repair visits"):
        erase(local, message_ids=["anna-1"])


# Options


@pytest.mark.parametrize("options", [{}, {"where": ["email=a"], "message_ids": ["anna-1"]}, {"where": ["nothing"]}])
def test_a_wrong_choice_is_refused(local, options):
    with pytest.raises(PipelineError):
        choice(local, **options)


def test_a_pipeline_without_tables_has_nothing_to_erase(lake):
    assert erase(Tables(lake, Keeping), where=["text=a"]).ids == []
