"""Held partitions with random messages and operations, and runs that end at any point."""

from collections import defaultdict
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_platform import Message
from pipeline_platform.lake.failures.closing import close
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.failures.failure_events import ALL, Selection, chosen
from pipeline_platform.run.flow import Flow
from tests.fixtures.faults import fault
from tests.fixtures.flow import rows, run
from tests.run.test_held import Held
from tests.run.test_whole_run_properties import POINTS, ending, flows

__all__ = ["flows"]


class HeldOrKilled(Held):
    """With messages that crash their process."""

    name = "held_or_killed"

    def handle_message(self, message: Message, context: Any) -> Message:
        if message.data.endswith(b"kill"):
            fault("kill")
        return super().handle_message(message, context)


PAYLOADS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["", "", "", "", "fail", "always", "column", "kill"])), max_size=12
)
OPERATIONS = st.lists(st.sampled_from(["pull", "retry", "close", "replay", "due"]), min_size=1, max_size=4)


def failures(flow: Flow, selection: Selection = ALL) -> FailedMessages:
    return FailedMessages(name="held", lake=flow.lake, pipeline=flow.pipeline.name, selection=selection)


def open_ids(flow: Flow) -> set[int]:
    found = set[int]()
    for paths in failures(flow).open_files().values():
        for some in chosen(flow.lake, paths).rows("message_id"):
            found |= {int(message_id) for message_id in some["message_id"].to_pylist()}
    return found


def check(flow: Flow, partitions: dict[int, int]) -> None:
    """Check that each received message is in one place, and that no message is handled before an open failure."""
    if not flow.tables["outcomes"].exists():
        return
    handled = [int(message_id) for message_id in rows(flow, "words")["message_id"]]
    still_open, decided = open_ids(flow), rows(flow, "outcomes").filter(pl.col("outcome").is_in(["handled", "failed"]))
    assert len(handled) == len({*handled})
    assert not {*handled} & still_open
    assert {*handled} | still_open <= {int(message_id) for message_id in decided["message_id"]}
    by_partition: dict[int, list[int]] = defaultdict(list)
    for message_id in handled:
        by_partition[partitions[message_id]].append(message_id)
    for partition, ids in by_partition.items():
        assert max(ids) < min((each for each in still_open if partitions[each] == partition), default=10**9)


@pytest.mark.parametrize("examples", [4, pytest.param(300, marks=pytest.mark.soak)])
def test_no_message_is_handled_before_an_open_failure_of_its_partition(flows, examples):
    @settings(max_examples=examples)
    @given(PAYLOADS, PAYLOADS, OPERATIONS, st.lists(POINTS, max_size=2))
    def tried(first: Any, second: Any, operations: list[str], ends: Any) -> None:
        flow = flows(HeldOrKilled, [])
        partitions = {}
        for number, (partition, word) in enumerate([*first, *second], 1):
            partitions[number] = partition
            flow().source.send([f"{partition} {number} {word}".strip().encode()])
            if number == len(first):
                run(flow())
                check(flow(), partitions)
        for operation, end in zip(operations, [*ends, None, None, None, None], strict=False):
            if operation == "close" and flow().tables["failed"].exists():
                close(flow().tables, failures(flow(), Selection(kind="ValueError")), "me", "cancelled")
            elif operation != "close":
                origin = {"pull": "source", "replay": "messages"}.get(operation, "failed")
                selection = Selection(state="due") if operation == "due" else ALL
                if end is not None:
                    with ending(end):
                        run(flow(), origin, selection=selection)
                    flow().control.let_go("test")
                run(flow(), origin, selection=selection)
            check(flow(), partitions)
        run(flow())
        check(flow(), partitions)
        assert flow().source.backlog().messages == 0

    tried()
