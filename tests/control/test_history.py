"""The history of operators' acts in the control store."""

from datetime import timedelta

from pipeline_platform.control import history
from pipeline_platform.control.history import KEEP_ACTS
from tests.fixtures.control import MINUTE, NOON, on_both_databases


@on_both_databases
def test_acts_are_returned_in_order_with_who_why_and_their_options(store, clock):
    store.record_act("told", "pause", "anna@host", "moves", producer="")
    clock.now += 60
    store.record_act("told", "limit", "run 4711", allowed=5, interval=None, reset=False)

    pause, limit = store.acts()

    assert pause[:5] == (NOON, "told", "pause", "anna@host", "moves")
    assert limit[:5] == (NOON + MINUTE, "told", "limit", "run 4711", "")
    assert (pause.options, limit.options) == ({}, {"allowed": 5}), "unset options are left out"


def test_acts_of_a_pipeline_include_those_of_its_producers(store, clock):
    for key in ("told", "told/east", "told_too"):
        store.record_act(key, "resume", "anna@host")
    clock.now += 60
    store.record_act("told", "pause", "anna@host")

    assert [act.key for act in store.acts("told")] == ["told", "told/east", "told"]
    assert [act.name for act in store.acts("told", since=NOON + MINUTE)] == ["pause"]


@on_both_databases
def test_old_acts_and_those_beyond_a_number_are_removed_by_the_next_act(store, clock, monkeypatch):
    monkeypatch.setattr(history, "MOST_ACTS", 3)
    store.record_act("other", "old", "anna@host")
    for number in range(5):
        store.record_act("told", f"act {number}", "anna@host")
    assert [act.name for act in store.acts("told")] == ["act 2", "act 3", "act 4"]
    clock.now += (KEEP_ACTS + timedelta(seconds=1)).total_seconds()

    store.record_act("told", "new", "anna@host")

    assert [act.name for act in store.acts()] == ["new"]


def test_long_text_is_cut_and_cannot_steer_a_terminal(store):
    store.record_act("told", "pause", "anna@host", "\x1b[2J" + "late " * 1_000)

    (act,) = store.acts()

    assert act.reason.startswith("\\x1b[2Jlate late")
    assert len(act.reason) == 1_000
