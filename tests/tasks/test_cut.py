"""Cutting messages into batches."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_platform import Message, Splitter
from pipeline_platform.tasks.batch import cutting
from tests.fixtures.small_lake import batch_of

WINDOWS = ("2026-01-01T0000", "2026-01-01T0100")


def waiting(*messages: dict[str, Any]) -> pa.Table:
    plain = {"window": WINDOWS[0], "batch_key": "k", "size": 1, "flush": False}
    return pa.Table.from_pylist(
        [{**plain, "position": n, **message} for n, message in enumerate(messages)], cutting.TO_CUT
    )


def batches(table: pa.Table, batch_size: int, batch_bytes: int = 10**9) -> list[tuple[list[int], str]]:
    return [(batch["rows"], batch["trigger"]) for batch in cutting.cut(table, batch_size, batch_bytes).to_pylist()]


def test_a_batch_never_exceeds_its_bytes_but_for_one_larger_message():
    sizes = (4, 4, 4, 30, 4, 10)
    assert batches(waiting(*({"size": size} for size in sizes)), 100, 10) == [
        ([0, 1], "size"),
        ([2], "size"),
        ([3], "size"),
        ([4], "size"),
        ([5], "flush"),
    ]


def test_a_batch_that_is_full_by_a_flushing_message_is_full():
    assert batches(waiting({}, {"flush": True}, {"flush": True}), 2) == [([0, 1], "size"), ([2], "flush")]


def test_batches_are_numbered_within_their_window_and_key():
    table = waiting({"batch_key": "b"}, {"batch_key": "a"}, {"batch_key": "b"}, {"window": WINDOWS[1]}, {})
    found = cutting.cut(table, 1).to_pylist()
    assert [(batch["window"][-4:], batch["batch_key"], batch["number"]) for batch in found] == [
        ("0000", "b", 0),
        ("0000", "a", 0),
        ("0000", "b", 1),
        ("0100", "k", 0),
        ("0000", "k", 0),
    ], "in the order of their first messages"


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "window": st.sampled_from(WINDOWS),
            "batch_key": st.sampled_from(["a", "b", "../c"]),
            "partition": st.sampled_from([None, "0", "3"]),
            "size": st.integers(0, 40),
            "flush": st.booleans(),
        }
    ),
    max_size=60,
)


@given(MESSAGES, st.integers(1, 5), st.integers(1, 100), st.randoms())
def test_every_message_is_in_one_batch_of_its_own_window_partition_and_key_in_its_order(
    messages, batch_size, batch_bytes, random
):
    rows = [{**message, "position": 10 * n} for n, message in enumerate(messages)]
    random.shuffle(rows)

    table = pa.Table.from_pylist(rows, cutting.TO_CUT)
    found = cutting.cut(table, batch_size, batch_bytes, rest="timeout").to_pylist()

    assert sorted(row for batch in found for row in batch["rows"]) == list(range(len(rows)))
    last: dict[tuple[Any, ...], int] = {}
    ended = set()
    for batch in found:
        held = [rows[row] for row in batch["rows"]]
        positions = [row["position"] for row in held]
        key = (batch["window"], batch["partition"], batch["batch_key"])
        assert {(row["window"], row["partition"], row["batch_key"]) for row in held} == {key}
        assert key not in ended, "the incomplete batch is the last"
        ended |= {key} if batch["trigger"] == "timeout" else set()
        assert positions == sorted(positions)
        assert positions[0] > last.get(key, -1)
        last[key] = positions[-1]
        assert len(held) <= batch_size
        assert batch["size"] == sum(row["size"] for row in held)
        assert batch["size"] <= batch_bytes or len(held) == 1
        assert not any(row["flush"] for row in held[:-1])


# Splitters


def weigh(message: Message, weight: int) -> tuple[str, int]:
    """Cut batches whose payloads add up to ten or more."""
    weight += int(message.data)
    return ("emit" if weight >= 10 else "cont"), weight


def collect(message: Message, seen: list[bytes]) -> tuple[str, list[bytes]]:
    """Cut batches of two messages; mutates its accumulator."""
    seen.append(message.data)
    return ("emit" if len(seen) == 2 else "cont"), seen


def split(splitter: Splitter, *payloads: bytes, batch_bytes: int = 10**9, **columns: list[Any]) -> list[Any]:
    """Return the payloads and trigger of each batch, or the failure of a message."""
    told = list(Message.each(batch_of(*payloads)))
    rows = [{name: values[n] for name, values in columns.items()} for n in range(len(payloads))]
    found = cutting.cut(
        waiting(*rows), splitter, batch_bytes, read=lambda rows: map(told.__getitem__, rows)
    ).to_pylist()
    return [
        ([batch["failure"]["kind"], batch["failure"]["reason"]], payloads[batch["rows"][0]])
        if batch["failure"]
        else ([payloads[row] for row in batch["rows"]], batch["trigger"])
        for batch in found
    ]


def test_a_splitter_ends_a_batch_with_the_message_that_it_emits_at():
    splitter = Splitter(initial=0, step=weigh)
    assert split(splitter, b"4", b"5", b"1", b"30", b"9", b"0") == [
        ([b"4", b"5", b"1"], "size"),
        ([b"30"], "size"),
        ([b"9", b"0"], "flush"),
    ], "the next batch starts with `initial`"


def test_each_window_and_key_has_an_accumulator_of_its_own():
    keys = ["a", "b", "a", "b"]
    assert split(Splitter(initial=0, step=weigh), b"9", b"9", b"1", b"0", batch_key=keys) == [
        ([b"9", b"1"], "size"),
        ([b"9", b"0"], "flush"),
    ]


def test_each_batch_has_its_own_copy_of_initial():
    splitter = Splitter(initial=[], step=collect)
    assert [held for held, _ in split(splitter, *b"1 2 3 4 5".split())] == [[b"1", b"2"], [b"3", b"4"], [b"5"]]
    assert splitter.initial == []


@pytest.mark.parametrize("columns", [{"flush": [False, True, False]}, {"size": [5, 5, 5]}])
def test_a_batch_that_ends_by_a_limit_resets_the_accumulator(columns):
    found = split(Splitter(initial=0, step=weigh), b"6", b"0", b"9", batch_bytes=10, **columns)
    assert [held for held, _ in found] == [[b"6", b"0"], [b"9"]]


def test_a_splitter_that_never_emits_leaves_batches_to_the_limits(monkeypatch):
    monkeypatch.setattr(cutting, "BATCH_MESSAGES", 2)
    assert split(Splitter(initial=None, step=lambda message, acc: ("cont", acc)), b"1", b"2", b"3") == [
        ([b"1", b"2"], "size"),
        ([b"3"], "flush"),
    ]


NONSENSE = "a step must return ('emit', acc) or ('cont', acc), got "


@pytest.mark.parametrize(
    ("answer", "kind", "reason"),
    [
        (ValueError("as told"), "ValueError", "as told"),
        (SystemExit(3), "SystemExit", "3"),
        (StopIteration(), "StopIteration", "StopIteration"),
        (None, "TypeError", f"{NONSENSE}NoneType"),
        ("emit", "TypeError", f"{NONSENSE}str"),
        (("stop", 1), "TypeError", f"{NONSENSE}tuple of 2, beginning with str"),
        (("emit",), "TypeError", f"{NONSENSE}tuple of 1, beginning with str"),
        ((), "TypeError", f"{NONSENSE}tuple"),
        ((True, 1), "TypeError", f"{NONSENSE}tuple of 2, beginning with bool"),
    ],
)
@pytest.mark.parametrize("place", [0, 2])
def test_a_splitter_fails_a_message_alone(answer, kind, reason, place):
    def step(message: Message, weight: int) -> Any:
        if message.data != b"0":
            return weigh(message, weight)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    payloads = [b"4", b"6", b"2"]
    payloads.insert(place, b"0")

    found = split(Splitter(initial=0, step=step), *payloads)

    assert sorted(found, key=str) == [
        ([kind, reason], b"0"),
        ([b"2"], "flush"),
        ([b"4", b"6"], "size"),
    ]
