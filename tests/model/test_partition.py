"""`partition_by`: valid values, precedence, and its effect on runs."""

import functools
import zlib
from typing import Any

import pytest

from pipeline_platform.model.options import Batcher, Processors, TableBatcher
from pipeline_platform.model.partition import as_given
from pipeline_platform.model.pipeline import Pipeline
from tests.fixtures.built import build
from tests.fixtures.small_lake import Row

LANE: dict[str, Any] = {"handle_message": ..., "handle_messages": lambda self, messages, context: messages}
BATCH = {"handle_batch": lambda self, batcher, messages, batch_info, context: messages}


def one(message: object) -> int:
    return 1


def other(message: object, more: int = 2) -> int:
    return more


class Called:
    """A callable object."""

    def __call__(self, message: object) -> int:
        return 1


@pytest.mark.parametrize("given", ["source", one, other, Called(), len, functools.partial(other, more=3), zlib.crc32])
def test_a_function_of_a_message_or_source_is_valid(given):
    assert build(partition_by=given).partitioning() == given
    assert Processors(partition_by=given).partition_by == given


def test_the_most_specific_partition_by_applies_and_table_batchers_have_none():
    batchers = {"own": Batcher(partition_by=other), "plain": Batcher(), "table": TableBatcher(schema=Row)}
    flights = build(partition_by=one, processors=Processors(partition_by="source"), batchers=batchers, **BATCH)
    names = (None, "own", "plain", "table")
    assert [flights.partitioning(name) for name in names] == ["source", other, one, None]


@pytest.mark.parametrize(
    ("attributes", "turns", "turns_at_a_source_that_leases_partitions"),
    [
        ({}, False, False),
        ({"partition_by": one}, True, True),
        ({"partition_by": "source"}, True, False),
        ({"batchers": {"b": Batcher(partition_by="source")}, **BATCH}, True, False),
        ({"partition_by": "source", "batchers": {"b": Batcher(partition_by=one)}, **BATCH}, True, True),
    ],
)
def test_runs_take_turns_unless_the_source_leases_partitions(
    attributes, turns, turns_at_a_source_that_leases_partitions
):
    flights = build(**attributes)
    assert flights.takes_turns() is turns
    assert flights.takes_turns(leases_partitions=True) is turns_at_a_source_that_leases_partitions


def test_the_spark_lane_may_have_ordered_batches():
    lane: type[Pipeline] = build(batchers={"b": Batcher(partition_by=one)}, **LANE, **BATCH)
    assert lane.takes_turns()


def test_a_batch_has_its_partition_with_the_original_type():
    assert [as_given(one, "12"), as_given("source", "12"), as_given(one, None)] == [12, "12", None]
