"""Planning batches: input of splitters, and isolation of their exceptions and crashes."""

from typing import Any

import pytest
from pydantic import BaseModel

from pipeline_platform import Batcher, BatchInfo, Failure, Message, Retry, Splitter
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import RowRange
from pipeline_platform.lake.storage import Lake
from pipeline_platform.tasks.batch import batch_plan
from pipeline_platform.tasks.batch.batch_plan import CutBatches, plan_table
from pipeline_platform.tasks.batch.handle_batches import HandleBatches
from pipeline_platform.tasks.record.step import receive_table
from tests.fixtures.faults import fault
from tests.fixtures.small_lake import Keeping, Memory, done, handled, outcomes, ranges, rows_of


class Parcel(BaseModel):
    """A parcel, packed into boxes."""

    weight: int
    says: str


def load(message: Message, weight: int) -> Any:
    """Cut boxes of weight ten; a parcel may name a fault."""
    fault(message.data.says)
    match message.data.says:
        case "nonsense":
            return message
        case "spoil":
            message.data.weight = 99
    weight += message.data.weight
    return ("emit" if weight >= 10 else "cont"), weight


class Boxes(Keeping):
    """Packs parcels into boxes by destination."""

    name = "boxes"
    batchers = {"box": Batcher(schema=Parcel, batch_size=Splitter(initial=0, step=load))}

    def handle_message(self, message, context):
        key, weight, says = message.data.decode().split()
        return message.put(Parcel(weight=weight, says=says), batcher="box", batch_key=key)

    def handle_batch(self, batcher, messages, batch_info, context):
        SEEN.append((batch_info, [message.data.weight for message in messages]))
        return messages

    def handle_failed(self, messages, context):
        FAILED.extend(message.reason for message in messages)
        return messages


SEEN: list[tuple[BatchInfo, list[int]]] = []
FAILED: list[str | None] = []


def planned(lake: Lake, *payloads: str, careful: bool = False) -> tuple[list[RowRange], Manifest]:
    """Return the files of staged parcels and the manifest of their plan."""
    whole = ranges(
        handled(lake, Boxes, *(payload.encode() for payload in payloads)), "boxes", receive_table("r1", "box")
    )
    (options,) = Boxes.batchers.values()
    cut = CutBatches(Boxes, None, Memory().ack_policy, lake, "r1", "box", options, whole, "flush")
    return whole, done(cut, careful=careful)


def boxed(lake: Lake, *payloads: str, careful: bool = False) -> tuple[list[tuple[str, str, list[int]]], Manifest]:
    """Return key, trigger and weights of each box, in order, and the manifest."""
    SEEN.clear()
    FAILED.clear()
    whole, plan = planned(lake, *payloads, careful=careful)
    files = ranges(plan, "boxes", plan_table("r1", "box"))
    task = HandleBatches(Boxes, None, Memory().ack_policy, lake, "r1", "box", whole, files)
    manifest = done(task)
    return [(info.batch_key, info.trigger, weights) for info, weights in SEEN], manifest


def test_a_splitter_gets_the_same_data_as_handle_batch_and_cannot_change_it(lake):
    boxes, _ = boxed(lake, "a 6 -", "b 9 -", "a 4 spoil", "a 1 -", "b 2 -")
    assert boxes == [("a", "size", [6, 4]), ("b", "size", [9, 2]), ("a", "flush", [1])]


@pytest.mark.parametrize("portion", [1, 10**6])
def test_batches_do_not_depend_on_how_many_messages_are_read_at_once(lake, monkeypatch, portion):
    monkeypatch.setattr(batch_plan, "SPLIT_ROWS", portion)

    boxes, manifest = boxed(lake, *(f"{number % 3} {number % 7} -" for number in range(60)))

    expected: list[list[int]] = []
    for key in range(3):
        box: list[int] = []
        for weight in [number % 7 for number in range(60) if number % 3 == key]:
            box.append(weight)
            if sum(box) >= 10:
                expected.append(box)
                box = []
        expected += [box] if box else []
    assert sorted(weights for *_, weights in boxes) == sorted(expected)
    assert manifest.totals.batches == len(expected)


@pytest.mark.parametrize("careful", [False, True])
@pytest.mark.parametrize(
    ("fault", "kind", "reason"),
    [
        ("raise", "ValueError", "as told"),
        ("nonsense", "TypeError", "a step must return ('emit', acc) or ('cont', acc), got Message"),
    ],
)
def test_a_message_that_fails_in_a_splitter_fails_alone_and_reaches_handle_failed(lake, fault, kind, reason, careful):
    boxes, manifest = boxed(lake, "a 6 -", f"a 9 {fault}", "a 4 -", "a 1 -", careful=careful)
    assert boxes == [("a", "size", [6, 4]), ("a", "flush", [1])]
    assert outcomes(lake, "boxes", manifest) == {"m0": "handled", "m1": "failed", "m2": "handled", "m3": "handled"}
    (failure,) = rows_of(lake, "boxes", manifest, "failed")
    assert (failure["kind"], failure["reason"], failure["stage"]) == (kind, reason, "batch_size")
    assert (failure["data"], failure["batcher"]) == (f"a 9 {fault}".encode(), "box")
    assert [reason] == FAILED
    assert manifest.totals.batches == 2


@pytest.mark.parametrize("portion", [1, 10**6])
def test_messages_that_crash_a_splitter_fail_alone(lake, monkeypatch, portion):
    monkeypatch.setattr(batch_plan, "SPLIT_ROWS", portion)
    boxes, manifest = boxed(lake, "b 9 quit", "a 6 -", "a 9 quit", "a 4 -", "b 1 -", careful=True)
    assert boxes == [("a", "size", [6, 4]), ("b", "flush", [1])]
    failures = rows_of(lake, "boxes", manifest, "failed")
    assert {row["message_id"] for row in failures} == {"m0", "m2"}
    assert {(row["kind"], row["reason"]) for row in failures} == {
        ("worker killed", "batch_size ended the worker (exit code 0)")
    }


def test_without_staged_messages_the_splitter_is_not_called(lake):
    boxes, manifest = boxed(lake, "a 9 raise")
    assert boxes == []
    assert outcomes(lake, "boxes", manifest) == {"m0": "failed"}
    assert manifest.totals.batches == 0


@pytest.mark.parametrize("careful", [False, True])
def test_output_of_a_splitter_is_captured_even_after_a_crash(lake, monkeypatch, careful):
    def talk(message: Message, weight: int) -> Any:
        print("weighs", message.data.weight)  # noqa: T201
        return load(message, weight)

    talking = {"box": Boxes.batchers["box"].model_copy(update={"batch_size": Splitter(initial=0, step=talk)})}
    monkeypatch.setattr(Boxes, "batchers", talking)

    _, plan = planned(lake, "a 6 -", *(["a 9 quit"] if careful else []), "a 5 -", careful=careful)

    (output,) = plan.totals.output
    assert (output.author, output.more) == ("the splitter of 'box'", 0)
    assert set(output.text.splitlines()) == {"weighs 6", "weighs 5", *(["weighs 9"] if careful else [])}


def dead(error: BaseException, stage: str) -> Failure:
    return Failure(type(error).__name__, str(error), "", stage, retry=False)


def give_up(self: Boxes, messages: list[Message], context: Any) -> list[Message]:
    return [message.failed(message.failure, retry=False) for message in messages]


@pytest.mark.parametrize(
    ("patches", "state"),
    [
        ([], "open"),
        ([(Boxes, "retry", Retry(max_attempts=3, never=(lambda error: error.args == ("as told",),)))], "dead"),
        ([(Boxes, "retry", Retry(max_attempts=3, on=(lambda error: error.args == ("as told",),)))], "open"),
        ([(Failure, "of", dead)], "dead"),
        ([(Boxes, "handle_failed", give_up)], "dead"),
    ],
)
def test_splitter_failures_are_retried_unless_retry_the_plan_or_handle_failed_disables_it(
    lake, monkeypatch, patches, state
):
    monkeypatch.setattr(Boxes, "retry", Retry(max_attempts=3))
    for patch in patches:
        monkeypatch.setattr(*patch)
    _, manifest = boxed(lake, "a 6 -", "a 9 raise")
    assert [row["state"] for row in rows_of(lake, "boxes", manifest, "failed")] == [state]
