"""Properties for any messages and options: each message has one outcome, and batches keep their limits."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_platform import Batcher, BatchInfo, Processors, TableBatcher
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.columns.crossing import encode
from pipeline_platform.model.message import BULK
from pipeline_platform.tasks.record.step import Step
from pipeline_platform.testing.in_memory import Kept
from tests.fixtures.moody import BAD, BAD_IN_BATCH, CALLS, GOOD, GOOD_IN_BATCH, WHOLE_BATCH, Mood, Moody, account, moods
from tests.fixtures.small_lake import WINDOW, Memory, batch_of

MESSAGES = moods(BAD, [*GOOD_IN_BATCH, *BAD_IN_BATCH, *WHOLE_BATCH])
WELL = moods([], GOOD_IN_BATCH)


class Told(NamedTuple):
    """Options of a pipeline, and the numbers of its messages in the order of their source."""

    chunk_size: int
    threads: int
    batch_size: int
    batch_bytes: int
    partition_by: Any
    rescue: bool
    sequence: list[int] | None


@st.composite
def options(draw: st.DrawFn) -> Told:
    partition_by = draw(st.sampled_from([None, "source", account]))
    return Told(
        chunk_size=draw(st.integers(1, 10)),
        threads=draw(st.integers(1, 3)),
        batch_size=draw(st.integers(1, 5)),
        batch_bytes=draw(st.sampled_from([2**20, 2**20, 1_000, 450, 1])),
        partition_by=partition_by,
        rescue=draw(st.booleans()),
        sequence=draw(st.none() | st.permutations(range(40))),
    )


class Done(NamedTuple):
    """Results: outcomes and rows by number, and the arguments of callbacks."""

    outcomes: dict[int, list[str]]
    rows: dict[int, list[str]]
    failed: dict[int, list[bytes]]
    payloads: list[bytes]
    batches: list[tuple[BatchInfo, list[int]]]
    handled: list[int]
    kept: Kept


def done(messages: Sequence[Mood], told: Told) -> Done:
    """Handle messages with the functions that tasks run."""
    shared = {"batch_size": told.batch_size, "batch_bytes": told.batch_bytes, "rescue": told.rescue}
    kind = type(
        "Told",
        (Moody,),
        {
            "processors": Processors(chunk_size=told.chunk_size, threads=told.threads, rescue=told.rescue),
            "partition_by": staticmethod(told.partition_by) if callable(told.partition_by) else told.partition_by,
            "batchers": {
                "kept": TableBatcher(schema=Mood),
                "plain": Batcher(**shared),
                "typed": Batcher(schema=Mood, **shared),
            },
        },
    )
    payloads = [message.model_dump_json().encode() for message in messages]
    rows = batch_of(*payloads)
    partition = [f"account {message.account}" for message in messages]
    sequence = told.sequence and told.sequence[: len(messages)]
    for name, values in ("partition", partition), ("sequence", sequence or [None] * len(messages)):
        field = rows.schema.field(name)
        rows = rows.set_column(rows.schema.get_field_index(name), field, pa.array(values, field.type))
    kept = Kept(Step(kind, None, Memory().ack_policy, Lake(root=os.devnull), "r1"), kind())
    CALLS.clear()
    kept.handle(rows, WINDOW, BULK)

    found: dict[str, dict[int, list[Any]]] = {name: defaultdict(list) for name in ("outcomes", "rows", "failed")}
    for table, _, batch in kept._files.batches:
        if table.startswith("_receives/"):
            continue
        into, column = {"outcomes": ("outcomes", "outcome"), "failed": ("failed", "data")}.get(table, ("rows", ""))
        values = batch.column(column).to_pylist() if column else [table] * batch.num_rows
        for message_id, value in zip(batch.column("message_id").to_pylist(), values, strict=True):
            found[into][int(message_id.removeprefix("m"))].append(value)
    return Done(**found, payloads=payloads, batches=[*CALLS.batches], handled=[*CALLS.handled], kept=kept)


def size(message: Mood) -> int:
    """Return the bytes of a message as delivered plus as handled."""
    handled = message if message.batcher == "typed" else message.model_dump()
    model = Mood if message.batcher == "typed" else None
    return len(message.model_dump_json()) + len(encode(handled, model)[0])


def in_order(numbers: Sequence[int], messages: Sequence[Mood], told: Told) -> list[int]:
    """Return messages of one partition in the order of their source."""
    place = told.sequence if told.sequence and told.partition_by else range(len(messages))
    return sorted(numbers, key=lambda number: place[number])


def always(messages: st.SearchStrategy[list[Mood]]) -> Callable[[Callable[[list[Mood], Told], None]], Any]:
    """Make a property test over messages and options: sixty examples, or thousands in `make soak`."""

    def tried(holds: Callable[[list[Mood], Told], None]) -> Any:
        @pytest.mark.parametrize("examples", [60, pytest.param(3_000, marks=pytest.mark.soak)])
        def test(examples: int) -> None:
            settings(max_examples=examples)(given(messages, options())(holds))()

        return test

    return tried


@always(MESSAGES)
def test_a_message_ends_once_by_its_own_doing_or_with_its_batch_and_batches_keep_their_limits(messages, told):
    found = done(messages, told)
    _check_ends(found)
    _check_causes(found, messages, told)
    _check_batches(found, messages, told)


def _check_ends(found: Done) -> None:
    """Check that each message is in a table or among the failures."""
    for number, payload in enumerate(found.payloads):
        (outcome,) = found.outcomes[number]
        ended = (outcome, len(found.rows[number]), found.failed[number])
        assert ended in [("handled", 1, []), ("failed", 0, [payload])]
        assert found.kept.ended[number].status == {"handled": "ok"}.get(outcome, outcome)


def _check_causes(found: Done, messages: Sequence[Mood], told: Told) -> None:
    """Check that a message fails by its own doing or with its whole batch."""
    mates = {number: some for _, some in found.batches for number in some}
    for number, message in enumerate(messages):
        (outcome,) = found.outcomes[number]
        has_partition = message.account >= 0 or told.partition_by is not account
        is_batched = message.batcher in ("plain", "typed")
        costs_all = any(messages[mate].batch in WHOLE_BATCH for mate in mates.get(number, ()))
        is_well = message.handle in GOOD and has_partition and not costs_all
        is_well &= not is_batched or message.batch in GOOD_IN_BATCH
        if is_well:
            assert (outcome, found.rows[number]) == ("handled", [message.batcher])
        elif not told.rescue or message.then != "rescue":
            assert outcome == "failed"
        elif not any(other.then == "raise" for other in messages) and message.handle in ("fail", "raise", "exit"):
            assert (outcome, found.rows[number]) == ("handled", ["kept"])


def _check_batches(found: Done, messages: Sequence[Mood], told: Told) -> None:
    """Check that a batch has one key and partition, and no more than it may."""
    given_out = Counter(number for _, some in found.batches for number in some)
    assert set(given_out.values()) <= {1}
    assert len({info.batch_id for info, _ in found.batches}) == len(found.batches)
    for info, numbers in found.batches:
        held = [messages[number] for number in numbers]
        assert (info.size, {message.key for message in held}) == (len(held), {info.batch_key})
        assert {message.batcher for message in held} == {info.batcher}
        partitions = {None: {None}, "source": {f"account {message.account}" for message in held}}
        assert partitions.get(told.partition_by, {message.account for message in held}) == {info.partition}
        assert len(held) <= told.batch_size
        assert len(held) == 1 or sum(map(size, held)) <= told.batch_bytes
        assert "flush" not in [message.handle for message in held[:-1]]


@always(WELL)
def test_messages_of_a_partition_keep_their_order_in_handling_and_over_batches(messages, told):
    found = done(messages, told)
    if told.partition_by:
        for account in {message.account for message in messages}:
            mine = [number for number in found.handled if messages[number].account == account]
            assert mine == in_order(mine, messages, told)
    streams: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for info, numbers in found.batches:
        streams[info.batcher, info.batch_key, info.partition] += numbers
    for numbers in streams.values():
        assert numbers == in_order(numbers, messages, told)
