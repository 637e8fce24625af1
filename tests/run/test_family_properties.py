"""Fan-out under crashes: each message ends once, with all of its rows or with none."""

from datetime import timedelta

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_platform import Batcher, Message, Producer, Retry, Splitter, TableBatcher
from pipeline_platform.lake.failures.failure_events import Selection
from pipeline_platform.run.flow import Flow
from tests.fixtures import families
from tests.fixtures.families import FAULTS
from tests.fixtures.flow import rows, run
from tests.fixtures.flow_pipelines import Word
from tests.run.test_whole_run_properties import Point, ending, flows, run_to_end  # noqa: F401 - a fixture

TABLES = ("lake", "left", "right")


class Text(str):
    """A payload, as `flows` enqueues it."""

    def model_dump_json(self) -> str:
        return str(self)


class Families(families.Families):
    """Over a queue, with early acknowledgement of messages that say `tell`."""

    name = "families"
    producer = Producer(source="queue", max_runs=2)
    acks_immediately = True
    retry = Retry(max_attempts=2, backoff=timedelta(microseconds=1))

    def _child(self, message: Message, batcher: str, word: str) -> Message:
        child = super()._child(message, batcher, word)
        return child.ack_immediately() if word == "tell" and batcher == "lake" else child

    def _batched(self, message: Message) -> Message:
        return super()._batched(message.ack_immediately() if self._word(message) == "tell" else message)


def length(message: Message) -> int:
    """Batch key of the payload, or of a child's word."""
    data = message.data
    return len(data if isinstance(data, bytes) else data["word"] if isinstance(data, dict) else data.word)


def by_length(message: Message, total: int) -> tuple[str, int]:
    total += length(message)
    return ("emit" if total > 12 else "cont"), total


class Ordered(Families):
    """In partitions, with batches by a splitter."""

    name = "ordered"
    producer = Producer(source="queue")
    partition_by = staticmethod(length)
    batchers = {
        "lake": TableBatcher(schema=Word),
        "left": Batcher(schema=Word, batch_size=Splitter(initial=0, step=by_length)),
        "right": Batcher(schema=Word, concurrency=2),
    }


def has_fault(payload: str) -> bool:
    return payload == "quit" or any(word in (*FAULTS, "left=quit") for word in payload.split())


def words_of(payload: str) -> dict[str, list[str]]:
    """Return the words that each table contains of a handled message."""
    pairs = [word.rpartition("=") for word in payload.split()]
    return {name: sorted(word for batcher, _, word in pairs if (batcher or "lake") == name) for name in TABLES}


def check(payloads: list[str], flow: Flow) -> None:
    """Check each message after one attempt, with its rows or without."""
    decided = rows(flow, "outcomes").filter(pl.col("outcome").is_in(["handled", "failed"]))
    ends = dict(decided.select("message_id", "outcome").iter_rows())
    kinds = dict(rows(flow, "failed").select("message_id", "kind").iter_rows())
    tables = {name: rows(flow, name) for name in TABLES}
    nothing = words_of("")

    assert decided.height == len(ends) == len(payloads)
    assert (flow.ledger.unfinished(), flow.source.backlog().messages) == ([], 0)
    for message_id, payload in enumerate(payloads, start=1):
        end, kind = ends[str(message_id)], kinds.get(str(message_id))
        found = {name: sorted(table.filter(message_id=str(message_id))["word"]) for name, table in tables.items()}
        said = payload, end, kind, found
        if end == "failed":
            # The source was told of it by a run that ended before it decided.
            assert has_fault(payload) or ("tell" in payload and kind == "not decided"), said
            assert found == nothing, said
        else:
            assert not has_fault(payload), said
            assert found == words_of(payload), said


def check_again(flow: Flow) -> None:
    """Check messages after a second attempt, which is the last."""
    decided = rows(flow, "outcomes").filter(pl.col("outcome").is_in(["handled", "failed"]))
    events = rows(flow, "failed").sort("attempt", pl.col("state") == "closed")
    last = dict(events.group_by("message_id", maintain_order=True).last().select("message_id", "state").iter_rows())

    assert decided.select("message_id", "attempt").is_unique().all()
    assert flow.ledger.unfinished() == []
    assert set(last.values()) <= {"dead", "closed"}
    for name in TABLES:
        table = rows(flow, name)
        assert table.select("message_id", "child").is_unique().all()
        assert "dead" not in {last.get(message_id) for message_id in table["message_id"]}


WORDS = st.sampled_from([*FAULTS, "lake=a", "left=b", "right=c", "left=ack", "left=tell", "lake=tell", "left=quit"])
PAYLOADS = st.lists(
    st.lists(WORDS, max_size=4).map(" ".join) | st.sampled_from(["plain", "quit"]), min_size=1, max_size=12
)
ENDS = st.lists(st.builds(Point, st.sampled_from(range(40)), st.booleans()), max_size=3)


@pytest.mark.parametrize("examples", [3, pytest.param(50, marks=pytest.mark.soak)])
@pytest.mark.parametrize("pipeline", [Families, pytest.param(Ordered, marks=pytest.mark.faults)])
def test_wherever_runs_end_a_message_ends_once_with_all_of_its_rows_or_with_none(
    flows,  # noqa: F811
    pipeline,
    examples,
):
    @settings(max_examples=examples)
    @given(PAYLOADS, ENDS, ENDS)
    def tried(payloads: list[str], ends: list[Point], later: list[Point]) -> None:
        flow = flows(pipeline, [Text(payload) for payload in payloads])
        check(payloads, run_to_end(flow, ends))
        waiting = Selection(state="waiting")
        for end in later:
            with ending(end):
                run(flow(), "failed", waiting)
            flow().control.let_go("test")
        run(last := flow(), "failed", waiting)
        check_again(last)

    tried()
