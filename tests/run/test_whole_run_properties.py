"""Runs that end at any point, with any messages: each message ends once, in one table or among the failures.

The tasks run in this process, as those of few messages do.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import count, product
from typing import Any, NamedTuple

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_platform import Batcher, Pipeline, Processors, Splitter, TableBatcher
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.decisions.ledger import Ledger
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Table
from pipeline_platform.lake.writer import Writer
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.run.flow import Flow
from tests.fixtures.flow import no_spark, rows, run
from tests.fixtures.moody import BAD, BAD_IN_BATCH, GOOD, GOOD_IN_BATCH, WHOLE_BATCH, Mood, Moody, account, moods

MESSAGES = moods([*BAD, "kill"], [*GOOD_IN_BATCH, *BAD_IN_BATCH, *WHOLE_BATCH, "kill"], most=60)


class Ended(BaseException):
    """A run's process ends here."""


def by_padding(message: Any, length: int) -> tuple[str, int]:
    data = message.data if isinstance(message.data, Mood) else Mood(**message.data)
    length += len(data.padding)
    return ("emit" if length > 300 else "cont"), length


class Split(Moody):
    """With another cutting of batches, and partitions."""

    name = "split"
    partition_by = account
    batchers = {
        "kept": TableBatcher(schema=Mood),
        "plain": Batcher(batch_size=Splitter(initial=0, step=by_padding), concurrency=2),
        "typed": Batcher(schema=Mood, batch_bytes=700),
    }


class Timed(Moody):
    """Calls with a time limit."""

    name = "timed"
    processors = Processors(chunk_size=4, message_timeout=timedelta(seconds=3))


class Point(NamedTuple):
    """Point where a run ends: before or after its n-th change outside of its process."""

    number: int
    is_after: bool


CHANGES: list[tuple[type, str]] = [
    (Ledger, "begin"),
    (Ledger, "write"),
    (Ledger, "remove"),
    (Writer, "close"),
    (Table, "swap"),
    (TableQueue, "plan"),
    (TableQueue, "ack"),
    (TableQueue, "finish"),
    (ControlStore, "adjust"),
    (ControlStore, "end"),
    (ControlStore, "finish"),
]


@contextmanager
def ending(point: Point) -> Iterator[list[Point]]:
    """End the run of the block at a point, if it gets so far: then the point is in the list."""
    left, ended = iter(range(point.number, -1, -1)), list[Point]()

    def change(real: Callable[..., Any], *args: Any, **options: Any) -> Any:
        is_last = next(left, None) == 0
        ended.extend([point] * is_last)
        if is_last and not point.is_after:
            raise Ended
        answer = real(*args, **options)
        if is_last:
            raise Ended
        return answer

    with pytest.MonkeyPatch.context() as patch, suppress(Ended):
        for kind, name in CHANGES:
            wrapped = partial(change, getattr(kind, name))
            patch.setattr(kind, name, lambda *args, _wrapped=wrapped, **options: _wrapped(*args, **options))
        yield ended


@pytest.fixture
def flows(tasks_here, tmp_path_factory):
    """Return a function that builds flows of a pipeline over one new queue: a flow for each run."""

    def fill(pipeline: type[Pipeline], messages: list[Mood]) -> Callable[[], Flow]:
        folder = tmp_path_factory.mktemp("whole")
        queue = TableQueue(name="queue", url=f"sqlite:///{folder}/queue.sqlite")
        queue.create()
        queue.enqueue(message.model_dump_json().encode() for message in messages)
        control = ControlStore(f"sqlite:///{folder}/control.sqlite")
        lake = Lake(root=str(folder / "lake"))
        return lambda: Flow(BoundProducer(pipeline), queue.model_copy(), lake, control, no_spark)

    return fill


def run_to_end(flow: Callable[[], Flow], ends: list[Point]) -> Flow:
    """Run until no message is left; the first runs end at these points."""
    for end in ends:
        with ending(end):
            run(flow())
        flow().control.let_go("test")  # as run monitoring does, or the end of the claim
    for _ in range(2):
        run(last := flow())
    return last


def check(messages: list[Mood], flow: Flow) -> None:
    """Check that each message is where it should be, and nowhere else."""
    decided = rows(flow, "outcomes").filter(pl.col("outcome").is_in(["handled", "failed"]))
    outcomes = dict(decided.select("message_id", "outcome").iter_rows())
    held = Counter({name: Counter(rows(flow, name)["message_id"]) for name in (*flow.pipeline.batchers, "failed")})

    assert decided.height == len(outcomes) == len(messages)
    assert flow.source.backlog().messages == 0
    assert (flow.ledger.unfinished(), flow.control.in_flight(flow.pipeline.name, of_all=True)) == ([], [])
    for message in messages:
        message_id = str(message.number + 1)
        is_at = [name for name, ids in held.items() for _ in range(ids[message_id])]
        is_well = message.handle in GOOD and (message.account >= 0 or flow.pipeline is not Split)
        if is_well and (message.batcher == "kept" or message.batch in GOOD_IN_BATCH):
            # A batch is lost with any message of it that costs it.
            assert is_at == [message.batcher] or (message.batcher != "kept" and is_at == ["failed"])
        else:
            assert is_at == ["failed"]
        assert outcomes[message_id] == ("failed" if is_at == ["failed"] else "handled")


POINTS = st.builds(Point, st.sampled_from(range(30)), st.booleans())
ENDS = st.lists(POINTS, min_size=2, max_size=4)


@pytest.mark.parametrize("examples", [4, pytest.param(300, marks=pytest.mark.soak)])
@pytest.mark.parametrize("pipeline", [Moody, pytest.param(Split, marks=pytest.mark.faults)])
def test_wherever_runs_end_each_message_ends_once(flows, pipeline, examples):
    @settings(max_examples=examples)
    @given(MESSAGES, ENDS)
    def tried(messages: list[Mood], ends: list[Point]) -> None:
        check(messages, run_to_end(flows(pipeline, messages), ends))

    tried()


@pytest.mark.faults
@pytest.mark.parametrize("examples", [2, pytest.param(50, marks=pytest.mark.soak)])
def test_a_message_that_hangs_costs_no_other(flows, examples):
    @settings(max_examples=examples)
    @given(MESSAGES, st.integers(0, 59), st.lists(POINTS, max_size=1))
    def tried(messages: list[Mood], hanging: int, ends: list[Point]) -> None:
        number = hanging % len(messages)
        messages[number] = messages[number].model_copy(update={"handle": "hang"})
        check(messages, run_to_end(flows(Timed, messages), ends))

    tried()


@pytest.mark.faults
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_at_each_point_in_turn_a_run_may_end(flows, *, is_after):
    asked = enumerate(product(["kept", "plain", "fail"], ["ok", "fail"]))
    messages = [Mood(number=number, handle=handle, batch=batch) for number, (handle, batch) in asked]
    for number in count():
        flow, point = flows(Moody, messages), Point(number, is_after)
        with ending(point) as ended:
            run(flow())
        flow().control.let_go("test")
        check(messages, run_to_end(flow, []))
        if not ended:
            break
    assert number > 20
