"""The suite for sinks: a correct sink passes, and a sink that breaks a promise fails that promise alone."""

from collections.abc import Callable
from itertools import count

import pytest

from pipeline_platform.testing import BrokenPromiseError, Store, check_sink, sink_promises
from tests.fixtures.broken_sinks import BROKEN_SINKS
from tests.fixtures.sqlite_sink import STORE, SqliteSink, read

KILLS = {"killed_publishers_store_once", "killed_commits_store_once"}
"""Promises that take seconds."""


@pytest.fixture
def new(tmp_path) -> Callable[..., Callable[[], SqliteSink]]:
    numbers = count()
    return lambda kind: lambda: kind(name="checked", path=f"{tmp_path}/{next(numbers)}.sqlite")


def test_a_correct_sink_keeps_all_promises(new):
    report = check_sink(new(SqliteSink), STORE)
    assert (report.source, report.kept, report.not_asked) == ("SqliteSink", sink_promises(), {})


@pytest.mark.parametrize(("promise", "kind"), BROKEN_SINKS, ids=lambda value: getattr(value, "__name__", value))
def test_the_broken_promise_of_a_sink_is_named(promise, kind, new):
    asked = [name for name in sink_promises() if name == promise or name not in KILLS]
    with pytest.raises(ExceptionGroup) as caught:
        check_sink(new(kind), STORE, only=asked)
    assert [error.promise for error in caught.value.exceptions] == [promise]  # type: ignore[union-attr]


def test_each_promise_has_a_sink_that_breaks_it():
    assert {promise for promise, _ in BROKEN_SINKS} == set(sink_promises())


def test_promises_that_a_store_cannot_show_are_skipped(new):
    asked = ["what_is_away_is_an_error", "lost_answers_store_once", "forgotten_receives_are_stored_once"]
    report = check_sink(new(SqliteSink), Store(read=read), only=asked)
    assert report.not_asked == {
        "what_is_away_is_an_error": "its store cannot be unavailable (away)",
        "lost_answers_store_once": "its store cannot lose an answer (losing)",
        "forgotten_receives_are_stored_once": "its store keeps ids forever (forget)",
    }


def test_an_error_names_the_missing_rows(new):
    kind = {kind.__name__: kind for _, kind in BROKEN_SINKS}["LosesTheLastRow"]
    with pytest.raises(BrokenPromiseError, match=r"seen: +1199 rows; missing: 1199 of a; not expected: none"):
        check_sink(new(kind), STORE, only="rows_are_stored")
