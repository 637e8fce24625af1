"""Whole flows on a real Spark: queue to tables to acknowledgement."""

import dataclasses
from collections import Counter
from typing import NoReturn

import pytest

from pipeline_platform.model.pipeline import PipelineError
from pipeline_platform.run import steps
from pipeline_platform.run.begin import begin
from pipeline_platform.spark.engine import TaskError
from tests.fixtures.flow import WINDOW, Filled, rows, run
from tests.fixtures.flow_pipelines import Columns, Obedient, Paced, Twisted


def test_few_messages_are_received_without_spark(filled_on_spark: Filled) -> None:
    def refused() -> NoReturn:
        raise RuntimeError("asked for Spark")

    flow = dataclasses.replace(filled_on_spark(Obedient, (b"%d" % number for number in range(201))), session=refused)
    few, more = (begin(flow, origin="source", run_id="test", windows=[WINDOW], demand=wanted) for wanted in (100, 101))

    assert steps.receive_messages(flow, few).rows("messages") == 100
    with pytest.raises(RuntimeError, match="asked for Spark"):
        steps.receive_messages(flow, more)


def test_batches_are_cut_by_key_and_size_and_a_failing_one_fails_alone(filled_on_spark: Filled) -> None:
    keys = ["a"] * 7 + ["b"] * 2 + ["raise"] * 2 + ["few"] * 3
    flow = filled_on_spark(Obedient, (f"batch {key}".encode() for key in keys))

    run(flow)

    batches = rows(flow, "batches")
    sizes = batches.group_by("batch_key", "batch_id").len().sort("batch_key", "len")
    assert list(zip(sizes["batch_key"], sizes["len"], strict=True)) == [
        ("a", 1), ("a", 3), ("a", 3), ("b", 2), ("few", 2),
    ]  # fmt: skip
    assert sorted(rows(flow, "failed")["kind"]) == ["ValueError", "ValueError", "not returned"]


def test_a_failure_is_driven_again_until_it_succeeds_and_a_replay_changes_nothing(filled_on_spark: Filled) -> None:
    flow = filled_on_spark(Obedient, [b"one", b"raise", b"none", b"exit"])
    run(flow)

    run(flow, "failed")
    again = rows(flow, "failed")
    run(flow, "messages")

    assert sorted(again["attempt"]) == [1, 1, 1, 2, 2, 2]
    assert sorted(rows(flow, "failed")["attempt"]) == [2, 2, 2], "a replay takes the place of what came before"
    assert rows(flow, "words")["word"].to_list() == ["one"]
    assert rows(flow, "messages")["message_id"].n_unique() == rows(flow, "messages").height == 4


def test_the_fast_lane_routes_fails_and_misses_rows_like_the_other(filled_on_spark: Filled) -> None:
    flow = filled_on_spark(Columns, [b"one", b"drop", b"fail", b"lost", b"two", b"batch 1", b"batch 2", b"batch 3"])

    run(flow)

    assert sorted(rows(flow, "words")["word"]) == ["one", "two"]
    assert sorted(rows(flow, "batches")["word"]) == ["batch 1", "batch 2", "batch 3"]
    reasons = rows(flow, "failed").sort("message_id")["reason"].to_list()
    assert reasons == [
        "handle_messages did not return it", "told to", "no batcher 'nowhere'; there are ['batches', 'words']",
    ]  # fmt: skip
    assert flow.source.backlog().messages == 0


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("one too many", "got 3 rows and returned 4"),
        ("one for another", "more than once"),
        ("one too many and two lost", "more than once"),
        ("position", "changed the column position"),
    ],
)
def test_the_fast_lane_refuses_rows_that_are_not_those_it_gave(filled_on_spark: Filled, fault: str, said: str) -> None:
    """None of it is decided: no message is twice in a table, and none is lost."""
    flow = filled_on_spark(Twisted, [fault.encode(), b"two", b"three"])

    with pytest.raises((PipelineError, TaskError), match=said):
        run(flow)

    assert rows(flow, "words").height == rows(flow, "outcomes").height == 0


@pytest.mark.parametrize("column", ["message_id", "ack_id", "data", "window"])
def test_the_fast_lane_may_use_the_names_of_a_delivery_for_its_own(filled_on_spark: Filled, column: str) -> None:
    """A row is known again by its position: what was delivered cannot be overwritten."""
    flow = filled_on_spark(Twisted, [column.encode(), b"two"])

    run(flow)

    assert sorted(rows(flow, "words")["message_id"]) == ["1", "2"]
    assert flow.source.backlog().messages == 0


def test_no_interval_sees_more_than_the_rate_limit_allows(filled_on_spark: Filled) -> None:
    flow = filled_on_spark(Paced, [b"word"] * 45)

    run(flow)

    handled = Counter(int(float(at)) for at in rows(flow, "words")["word"])
    assert handled.total() == 45
    # One in each task may have looked at the clock right before an interval's end and been held up there.
    assert max(handled.values()) <= 10 + Paced.processors.concurrency
