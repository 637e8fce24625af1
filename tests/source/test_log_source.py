"""Receives of a log: leased offsets, commits, and reports of resets and losses."""

import logging
import pickle

import pytest

from pipeline_platform.control.store import ControlStore
from pipeline_platform.source.contract import SourceError
from pipeline_platform.source.log import LogSource
from tests.fixtures.log import Journal, paper_log, planned


@pytest.fixture
def journal():
    journal = Journal()
    journal.add("p", 10)
    journal.add("q", 10)
    return journal


@pytest.fixture
def log(control_url, journal):
    """Build sources of the journal, each as if in its own process."""
    return lambda **options: paper_log(ControlStore(control_url), journal, **options)


def again(source: LogSource, receive_id: str) -> set[bool]:
    return {
        marked
        for share in source.plan(1_000, 2, receive_id)
        for batch in source.read(share, receive_id)
        for marked in batch.column("redelivered").to_pylist()
    }


def waiting(source: LogSource) -> int | None:
    return source.backlog().messages


def test_receives_lease_different_offsets_until_all_are_acknowledged(log, journal):
    first, second = log(), log()
    assert planned(first, "a", demand=12) == {"p": [*range(6)], "q": [*range(6)]}
    assert planned(second, "b", demand=100) == {"p": [*range(6, 10)], "q": [*range(6, 10)]}
    assert planned(first, "c") == {}
    assert waiting(first) == waiting(second) == 0
    second.finish("b")
    assert journal.at("p") == journal.at("q") == 0, "what lies before is not acknowledged"
    first.finish("a")
    assert journal.at("p") == journal.at("q") == 10
    assert planned(second, "d") == {}


def test_messages_of_a_crashed_receive_are_redelivered_and_marked(log):
    source = log()
    assert again(source, "dead") == {False}
    assert source.holders() == {"dead"}
    source.abandon("dead", list)
    source.abandon("dead", list)
    assert source.holders() == set()
    assert waiting(source) == 20
    assert again(source, "next") == {True}


def test_a_receive_is_committed_once_and_only_if_needed(log, journal):
    source = log()
    planned(source, "a")
    journal.told.clear()
    source.finish("a")
    source.finish("a")
    source.finish("nobody")
    assert journal.told == [{"p": 10, "q": 10}]


def test_a_crash_before_a_commit_is_recorded_loses_nothing(log, journal, monkeypatch, caplog):
    source = log()
    planned(source, "a", demand=10)
    with monkeypatch.context() as patch:
        patch.setattr(ControlStore, "committed", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            source.finish("a")
    assert journal.at("p") == 5

    assert planned(source, "b") == {"p": [*range(5, 10)], "q": [*range(5, 10)]}
    source.finish("a")
    source.finish("b")
    assert journal.at("p") == 10
    assert caplog.messages == []


def test_a_late_commit_of_a_stalled_run_does_not_count_as_an_operators(log, journal, caplog):
    source = log()
    planned(source, "a")
    source.finish("a")
    journal.committed["p"] = (3, True)
    assert planned(source, "b") == {}
    assert waiting(source) == 0
    assert caplog.messages == []


def test_a_log_that_is_set_back_is_read_again_from_there(log, journal, caplog):
    source = log()
    planned(source, "a")
    source.finish("a")
    journal.set_to("p", 4)
    assert waiting(source) == 6
    assert again(source, "b") == {True}
    assert caplog.messages == ["log: p was set back from offset 10 to 4"]
    assert planned(source, "c") == {}, "it is read again once"
    source.finish("b")
    assert journal.at("p") == 10


def test_a_log_that_is_set_forward_continues_there(log, journal, caplog):
    source = log()
    planned(source, "held", demand=4)
    journal.set_to("p", 7)
    assert waiting(source) == 3 + 8
    assert planned(source, "a") == {"p": [7, 8, 9], "q": [*range(2, 10)]}
    assert caplog.messages == ["log: p was set forward from offset 0 to 7"]
    source.finish("a")
    source.finish("held")
    assert journal.at("p") == journal.at("q") == 10


def test_unread_messages_removed_by_retention_are_logged_once_as_an_error(log, journal, caplog):
    source = log()
    planned(source, "a", demand=4)
    source.finish("a")
    journal.low["p"] = 6
    assert planned(source, "b") == {"p": [6, 7, 8, 9], "q": [*range(2, 10)]}
    (said,) = caplog.records
    assert said.levelno == logging.ERROR
    assert said.getMessage().startswith("log: p lost its messages from offset 2 to before 6")
    caplog.clear()
    planned(source, "c")
    assert caplog.messages == []


def test_losses_are_in_each_backlog_until_a_run_continues(log, journal):
    source = log()
    planned(source, "a")
    journal.low["p"] = 4
    assert source.backlog().lost == "", "a receive holds them, and may have read them"
    source.abandon("a", list)
    journal.low["p"] = journal.low["q"] = 10

    for _ in range(2):
        backlog = log().backlog()
        assert backlog.messages == 0
        assert "p lost its messages from offset 0 to before 10" in backlog.lost
        assert "q lost its messages from offset 0 to before 10" in backlog.lost

    journal.add("p", 1)
    journal.add("q", 1)
    planned(source, "b")
    assert source.backlog().lost == ""


def test_a_truncated_log_is_logged_as_an_error(log, journal, caplog):
    """New messages reuse offsets that were read before, so only an operator can know where they start."""
    source = log()
    planned(source, "a")
    source.finish("a")
    journal.past["p"] = 6
    assert planned(source, "b") == {}
    assert caplog.messages[0].startswith("log: p ends at offset 6, before the position 10: it was truncated")
    backlog = source.backlog()
    assert backlog.messages == 0, "so no run is asked for, which would say it"
    assert backlog.lost.startswith("p ends at offset 6, before the position 10")
    journal.set_to("p", 6)
    journal.add("p", 3)
    assert source.backlog().lost == ""
    assert planned(source, "c") == {"p": [6, 7, 8]}


def test_an_expired_commit_changes_nothing(log, journal):
    source = log(latest=True)
    planned(source, "a")
    journal.add("p", 5)
    planned(source, "b")
    source.finish("b")
    journal.committed.clear()
    journal.add("p", 5)
    assert planned(source, "c") == {"p": [*range(15, 20)]}


@pytest.mark.parametrize("latest", [False, True])
def test_a_lost_control_store_is_restored_from_the_log(tmp_path, journal, *, latest):
    before = paper_log(ControlStore(f"sqlite:///{tmp_path}/before.sqlite"), journal, latest=latest)
    waiting(before)
    journal.add("p", 4)
    assert planned(before, "a", demand=6)
    before.finish("a")
    journal.add("q", 1)
    after = paper_log(ControlStore(f"sqlite:///{tmp_path}/after.sqlite"), journal, latest=latest)
    assert waiting(after) == (1 if latest else 19)
    assert again(after, "b") == {True}, "nobody knows how far it was read"
    journal.add("p", 3)
    assert again(after, "c") == {False}


def test_latest_starts_at_the_end_of_the_log_at_the_first_look(log, journal):
    source = log(latest=True)
    assert waiting(source) == 0
    journal.add("p", 2)
    assert waiting(log(latest=True)) == 2
    assert planned(source, "a") == {"p": [10, 11]}


def test_concurrent_first_looks_start_at_the_same_position(log, journal):
    """The second look finds a longer log, and must not skip the messages between."""
    first, other = log(latest=True), log(latest=True)

    def another_looks() -> None:
        journal.add("p", 5)
        assert waiting(other) == 5

    journal.meanwhile = another_looks
    assert waiting(first) == 0
    assert journal.at("p") == 10
    assert planned(first, "a") == {"p": [*range(10, 15)]}


def test_a_partition_created_later_is_read_from_its_beginning(log, journal):
    source = log(latest=True, young=("r",))
    waiting(source)
    journal.add("r", 3)
    journal.add("s", 3)
    assert planned(source, "a") == {"r": [0, 1, 2]}


def test_at_the_first_look_no_partition_is_younger(log):
    assert waiting(log(latest=True, young=("p", "q"))) == 0


def test_a_partition_is_leased_to_one_receive_at_a_time(log, journal):
    source = log(one_receive_per_partition=True)
    assert planned(source, "a", demand=4) == {"p": [0, 1], "q": [0, 1]}
    assert planned(source, "b") == {}
    journal.add("r", 2)
    assert planned(source, "c") == {"r": [0, 1]}
    source.finish("a")
    assert planned(source, "d", demand=4) == {"p": [2, 3], "q": [2, 3]}


def test_a_task_does_not_get_the_url_of_the_control_store(log):
    source = log()
    assert planned(source, "a")
    copy = pickle.loads(pickle.dumps(source))
    assert copy._positions is None
    with pytest.raises(SourceError, match="source 'log': the source is not open"):
        copy.backlog()
    assert waiting(source) == 0
