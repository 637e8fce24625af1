"""Fan-out: `handle_message` returns a list of messages, and the original message shares their outcome."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_platform import Batcher, Message, PipelineError, Processors, Producer, TableBatcher, testing
from pipeline_platform.tasks.record.step import receive_table
from tests.fixtures.families import FAULTS, SHOWN, Families
from tests.fixtures.flow_pipelines import Word
from tests.fixtures.small_lake import handled, outcomes, rows_of


def words(messages: list[Message]) -> list[tuple[int | None, str]]:
    return [
        (message.child, message.data["word"] if isinstance(message.data, dict) else message.data.word)
        for message in messages
    ]


def test_a_list_of_rows_is_one_message_that_is_handled(lake):
    manifest = handled(lake, Families, b"lake=a lake=b lake=c", b"plain")
    rows = rows_of(lake, "families", manifest, "lake")
    assert sorted((row["message_id"], row["child"] or 0, row["word"]) for row in rows) == [
        ("m0", 0, "a"),
        ("m0", 1, "b"),
        ("m0", 2, "c"),
        ("m1", 0, "plain"),
    ]
    assert [row["child"] for row in rows if row["message_id"] == "m1"] == [None], "no list, no child"
    assert outcomes(lake, "families", manifest) == {"m0": "handled", "m1": "handled"}
    assert manifest.totals.handled.total() == manifest.rows("outcomes") == 2


def test_a_message_waits_for_children_that_wait_for_a_batch(lake):
    manifest = handled(lake, Families, b"lake=a left=b left=c", b"plain")
    assert outcomes(lake, "families", manifest) == {"m1": "handled"}
    waiting = rows_of(lake, "families", manifest, receive_table("r1", "left"))
    assert [(row["child"], row["data"]) for row in waiting] == [(1, None), (2, None)], "no copy of the payload for each"


@pytest.mark.parametrize("careful", [False, True])
def test_where_a_child_fails_no_row_of_its_siblings_is_written(lake, careful):
    faults = {
        f"lake=a {word} left=b".encode(): FAULTS[word]
        for word in ("nowhere=a", "lake=misfit", "left=misfit", "right=failed")
    }
    manifest = handled(lake, Families, *faults, b"plain", careful=careful)
    assert outcomes(lake, "families", manifest) == {**{f"m{place}": "failed" for place in range(4)}, "m4": "handled"}
    assert [row["word"] for row in rows_of(lake, "families", manifest, "lake")] == ["plain"]
    assert rows_of(lake, "families", manifest, receive_table("r1", "left")) == []
    assert {row["data"]: row["kind"] for row in rows_of(lake, "families", manifest, "failed")} == faults


class Strange(Families):
    """Returns invalid lists."""

    name = "strange"
    before: list[Message] = []

    def handle_message(self, message: Message, context: Any) -> Any:
        put = message.put({"word": "a"}, batcher="lake")
        odd = {
            b"many": [put] * 10_001,
            b"most": [put] * 10_000,
            b"none": [put, None],
            b"other": [put, *self.before],
            b"nested": [[put]],
            b"tuple": (put,),
            b"set": {},
            b"twice": [put, put],
        }
        self.before[:] = [put]
        return odd.get(message.data, put)

    def transform(self, event: Message) -> Any:
        return [event] if event.data == b"early" else event


def test_an_invalid_list_fails_its_message_alone(lake):
    reasons = {
        b"many": "handle_message must return at most 10,000 messages for a message, got 10,001",
        b"none": "item 1 is NoneType",
        b"other": "item 1 is another Message",
        b"nested": "item 0 is list",
        b"tuple": "handle_message must return a Message or a list of Messages, got tuple",
        b"set": "got dict",
        b"early": "transform must return a Message, got list",
    }
    manifest = handled(lake, Strange, b"1", *reasons, b"3")
    ends = {f"m{place}": "failed" for place in range(1, 8)}
    assert outcomes(lake, "strange", manifest) == {"m0": "handled", **ends, "m8": "handled"}
    for row in rows_of(lake, "strange", manifest, "failed"):
        assert reasons[row["data"]] in row["reason"]


def test_the_maximum_of_children_and_the_same_child_twice_are_allowed(lake):
    manifest = handled(lake, Strange, b"most", b"twice", careful=True)
    children = [(row["message_id"], row["child"]) for row in rows_of(lake, "strange", manifest, "lake")]
    assert sorted(children) == [*(("m0", n) for n in range(10_000)), ("m1", 0), ("m1", 1)]


@pytest.mark.parametrize(("threads", "careful"), [(3, False), (1, True), (3, True)])
def test_in_threads_and_forks_a_message_that_ends_its_worker_fails_alone(lake, threads, careful):
    class Threaded(Families):
        name = "threaded"
        processors = Processors(threads=threads)

    payloads = [b"lake=a left=b", b"quit" if careful else b"nowhere=a", b"lake=c lake=d"]
    manifest = handled(lake, Threaded, *payloads, careful=careful)

    assert outcomes(lake, "threaded", manifest) == {"m1": "failed", "m2": "handled"}, "m0 waits"
    assert sorted(row["word"] for row in rows_of(lake, "threaded", manifest, "lake")) == ["a", "c", "d"]


def test_each_child_has_a_partition_of_its_own(lake):
    class Parted(Families):
        name = "parted"
        producer = Producer(source="memory")
        batchers = {"left": Batcher(partition_by=lambda message: ord(message.data["word"]) - ord("a"))}

    manifest = handled(lake, Parted, b"left=c left=a", b"left=a left=A")

    waiting = rows_of(lake, "parted", manifest, receive_table("r1", "left"))
    assert [(row["message_id"], row["child"], row["own"]) for row in waiting] == [("m0", 0, "2"), ("m0", 1, "0")]
    (failure,) = rows_of(lake, "parted", manifest, "failed")
    assert (failure["stage"], failure["message_id"]) == ("partition_by", "m1")


# Through the testing kit: batches included


def test_a_test_gets_the_children_in_the_place_of_their_message():
    told = testing.test_batch(Families, [b"left=b lake=a right=c", b"plain", b"", b"right=fail lake=d"])
    assert words(told.successful) == [(0, "b"), (1, "a"), (2, "c"), (None, "plain")]
    assert [(message.data, message.reason, message.child) for message in told.failed] == [
        (b"right=fail lake=d", "as told", None)
    ]
    assert told.actions == ["ack", "ack", "ack", "ack"], "one for each message"
    assert [info.size for info in told.batches] == [1, 2]


@pytest.mark.parametrize("fault", FAULTS)
def test_handle_failed_sees_a_message_once_whichever_of_its_children_fail(fault):
    SHOWN.clear()
    told = testing.test_message(Families, f"lake=a {fault} {fault} right=b")
    assert (told.successful, len(told.failed), len(SHOWN)) == ([], 1, 1)
    failure = told.failed[0].failure
    assert failure is not None
    assert failure.kind == FAULTS[fault]
    assert failure.stage


def test_the_last_child_with_ack_actions_sets_those_of_its_message():
    assert testing.test_message(Families, "left=ack lake=a").actions == ["noop"]
    assert testing.test_message(Families, "left=a lake=a").actions == ["ack"]


class Acknowledged(Families):
    """Sets ack actions on children, which then fail."""

    name = "acknowledged"

    def _child(self, message: Message, batcher: str, word: str) -> Message:
        child = super()._child(message, batcher, word)
        return child.configure_ack(on_failure="nack:7") if word == "nack" else child


@pytest.mark.parametrize("fault", ["lake=failed", "lake=misfit", "left=misfit", "nowhere=a", "left=fail"])
@pytest.mark.parametrize("place", [0, 1])
def test_ack_actions_of_the_last_child_apply_wherever_a_child_fails(fault, place):
    words = ["lake=nack"]
    words.insert(place, fault)
    assert testing.test_message(Acknowledged, " ".join(words)).actions == ["nack:7"]


@pytest.mark.parametrize("rescue", [False, True])
def test_the_rows_of_a_message_rescued_after_its_batch_stay_incomplete(rescue):
    class Rescuing(Families):
        name = "rescuing"
        batchers = {"lake": TableBatcher(schema=Word), "left": Batcher(schema=Word, rescue=rescue)}

        def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
            return [message.rescued() for message in messages]

    told = testing.test_message(Rescuing, "lake=a left=fail left=b")

    ended = told.successful if rescue else told.failed
    assert [(message.data, message.child) for message in ended] == [(b"lake=a left=fail left=b", None)]
    assert len(told.successful) + len(told.failed) == 1


def test_a_message_that_is_rescued_from_handling_goes_on_without_its_children(lake):
    class Rescuing(Families):
        name = "rescuing"
        processors = Processors(rescue=True)

        def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
            return [message.put({"word": "mended"}, batcher="lake").rescued() for message in messages]

    manifest = handled(lake, Rescuing, b"lake=a nowhere=b")

    assert [(row["word"], row["child"]) for row in rows_of(lake, "rescuing", manifest, "lake")] == [("mended", None)]
    assert outcomes(lake, "rescuing", manifest) == {"m0": "handled"}


def test_children_stay_in_their_order_in_a_batch():
    order = list("abcdefgh")
    random.Random(1).shuffle(order)
    told = testing.test_batch(Families, [" ".join(f"right={number}" for number in order)])
    assert [word for _, word in words(told.successful)] == order
    assert [info.size for info in told.batches] == [8]


_WORDS = st.sampled_from([*FAULTS, "lake=a", "left=b", "right=c", "left=ack"])


@settings(max_examples=20)
@given(st.lists(st.lists(_WORDS, max_size=4).map(" ".join) | st.just("plain"), min_size=1, max_size=8))
def test_each_message_ends_once_and_fails_exactly_if_a_child_does(payloads):
    told = testing.test_batch(Families, payloads)

    failing = {
        str(number)
        for number, payload in enumerate(payloads)
        # What its batch loses or fails with is each message's own, but for `raise`, which has a batch of its own.
        if any(word in FAULTS for word in payload.split())
    }
    assert {message.message_id for message in told.failed} == failing
    assert len(told.failed) == len(failing)
    assert len(told.actions) == len(payloads)
    expected = [
        (str(number), len(payload.split()))
        for number, payload in enumerate(payloads)
        if str(number) not in failing and payload
    ]
    ids = [message.message_id for message in told.successful]
    assert [(message_id, ids.count(message_id)) for message_id in dict.fromkeys(ids)] == expected


def test_a_model_may_have_no_field_of_the_name_child():
    class Parental(Word):
        child: str

    with pytest.raises(PipelineError, match="child"):
        type("Named", (Families,), {"name": "named", "batchers": {"lake": TableBatcher(schema=Parental)}})
