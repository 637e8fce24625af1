"""Handling: faults of callbacks are isolated by message."""

import enum
import gc
from typing import Any

import pytest

from pipeline_platform import Failure, Message, Pipeline, Processors
from tests.fixtures.faults import PanicError
from tests.fixtures.obedient import ODD, GhostlyText, Obedient
from tests.fixtures.small_lake import Keeping, Memory, Row, handled, numbered, outcomes, received, rows_of

FAULTS = {
    "raise": ("ValueError", "as told"),
    "exit": ("SystemExit", "3"),
    "panic": ("PanicError", "index out of bounds"),
    "cancel": ("CancelledError", "CancelledError"),
    "interrupt": ("KeyboardInterrupt", "KeyboardInterrupt"),
    "recurse": ("RecursionError", "maximum recursion depth"),
    "none": ("TypeError", "handle_message must return a Message or a list of Messages, got NoneType"),
    "nonsense": ("TypeError", "handle_message must return a Message or a list of Messages, got dict"),
    "another": ("TypeError", "it returned another message"),
    "neighbour": ("TypeError", "it returned another message"),
    "unknown": ("unknown batcher", "'nowhere' is not a batcher. Batchers: ['kept']"),
    "unhashable": ("TypeError", "batcher must be a str, got list. Use put_batcher(...)."),
    "fail": ("failed", "as told"),
    "unknown option": ("TypeError", "unexpected keyword argument 'on_error'"),
    "unknown word": ("ValueError", "is not a valid ack action of memory. Valid actions: 'ack', 'noop', 'nack' or"),
    "misfit": ("ColumnError", "data has ['txt'], which are not fields of Row"),
    "surrogate": ("ColumnError", "text does not fit its column, which stores valid UTF-8"),
    "surrogate key": ("UnicodeEncodeError", "surrogates not allowed"),
    "number for a key": ("TypeError", "batch_key must be a str, got int. Use put_batch_key(...)."),
}


def test_a_faulty_message_fails_alone_and_keeps_its_payload(lake):
    payloads = [
        b"0",
        *(payload for number, fault in enumerate(FAULTS, 1) for payload in (fault.encode(), b"%d" % number)),
    ]
    manifest = handled(lake, Obedient, *payloads)
    assert [row["text"] for row in rows_of(lake, "obedient", manifest, "kept")] == [*map(str, range(len(FAULTS) + 1))]
    failures = rows_of(lake, "obedient", manifest, "failed")
    assert [row["data"].decode() for row in failures] == [*FAULTS], "a retry needs the original payload"
    for place, (failure, (kind, reason)) in enumerate(zip(failures, FAULTS.values(), strict=True)):
        assert (failure["kind"], reason in failure["reason"]) == (kind, True), failure
        assert (failure["message_id"], failure["attempt"], failure["state"]) == (f"m{2 * place + 1}", 1, "open")


def test_a_payload_that_cannot_be_read_fails_alone(lake):
    class Strict(Obedient):
        name = "strict"

        def handle_message(self, message, context):
            return message.put_batcher("kept").put_data(Row.model_validate_json(message.data))

    odd = [b"", b"\xff\xfe not UTF-8", b"{not JSON", b"x" * 2**20, None]
    manifest = handled(lake, Strict, b'{"text": "a"}', *odd, b'{"text": "b"}')

    assert [row["text"] for row in rows_of(lake, "strict", manifest, "kept")] == ["a", "b"]
    assert [row["data"] for row in rows_of(lake, "strict", manifest, "failed")] == odd


# prepare_messages


class Preparing(Obedient):
    """Prepares messages in chunks of three."""

    name = "preparing"
    processors = Processors(chunk_size=3)

    def prepare_messages(self, messages: list[Message], context: Any) -> Any:
        match messages[0].data:
            case b"raise":
                raise ConnectionError("no answer")
            case b"panic":
                raise PanicError
            case b"short":
                return messages[1:]
            case b"long":
                return [*messages, messages[0]]
            case b"reorder":
                return messages[::-1]
            case b"none":
                return None
            case b"nonsense":
                return [None] * len(messages)
            case b"generate":
                return (message.put_data(message.data + b"!") for message in messages)
            case b"fail one":
                return [messages[0].failed("as told"), *messages[1:]]
        return [message.put_data(message.data + b"!") for message in messages]


def test_a_fault_of_prepare_messages_fails_its_chunk_and_no_other(lake):
    faults = [b"raise", b"panic", b"short", b"long", b"reorder", b"none", b"nonsense"]
    chunks = [payload for fault in faults for payload in (fault, b"2", b"3", b"4", b"5", b"6")]
    manifest = handled(lake, Preparing, *chunks)
    assert [row["text"] for row in rows_of(lake, "preparing", manifest, "kept")] == ["4!", "5!", "6!"] * len(faults)
    failures = rows_of(lake, "preparing", manifest, "failed")
    assert [row["data"] for row in failures] == [payload for fault in faults for payload in (fault, b"2", b"3")]
    assert {row["stage"] for row in failures} == {"prepare_messages"}


def test_prepare_messages_may_give_any_iterable(lake):
    manifest = handled(lake, Preparing, b"generate", b"2")
    assert [row["text"] for row in rows_of(lake, "preparing", manifest, "kept")] == ["generate!", "2!"]


def test_messages_that_fail_in_prepare_messages_are_not_handled(lake):
    manifest = handled(lake, Preparing, b"fail one", b"2", b"3")
    assert outcomes(lake, "preparing", manifest) == {"m0": "failed", "m1": "handled", "m2": "handled"}


def test_prepare_messages_gets_chunks_and_records_do_not_depend_on_them(lake):
    sizes = []

    class Counting(Obedient):
        name = "counting"
        processors = Processors(chunk_size=4)

        def prepare_messages(self, messages, context):
            sizes.append(len(messages))
            return messages

    manifest = handled(lake, Counting, *(b"%d" % index for index in range(10)))

    assert sizes == [4, 4, 2]
    assert len(manifest.of_table("outcomes")) == 1


# transform


class Transforming(Obedient):
    name = "transforming"

    def transform(self, event: Message) -> Any:
        if event.data == b"raise":
            raise ValueError("no message")
        if event.data == b"none":
            return None
        return event.update_data(bytes.upper)


def test_a_fault_of_transform_fails_its_message_alone(lake):
    manifest = handled(lake, Transforming, b"a", b"raise", b"none", b"c")
    failures = rows_of(lake, "transforming", manifest, "failed")
    assert [(row["stage"], row["data"]) for row in failures] == [("transform", b"raise"), ("transform", b"none")]
    assert [row["text"] for row in rows_of(lake, "transforming", manifest, "kept")] == ["A", "C"]


def test_the_first_message_is_timed_by_the_type_of_its_data(lake):
    totals = handled(lake, Obedient, b"0", b"1").totals
    assert totals.timed == {"dict": 1}
    assert 0 < totals.timed_s["dict"] < 60
    assert handled(lake, Obedient, b"raise", b"1").totals.timed == {}


def test_handling_leaves_the_garbage_collector_as_it_was(lake):
    before = gc.get_threshold()
    handled(lake, Obedient, b"1")
    assert gc.get_threshold() == before


def test_a_source_that_delivers_a_message_without_an_id_is_named(lake):
    class Nameless(Memory):
        def read(self, share, receive_id):
            yield self.deliveries(message_id=["a", None], data=[b"", b""], ack_id=["1", "2"], ack_ref="q")

    with pytest.raises(Exception, match="memory delivered a message without message_id"):
        received(lake, "p", Nameless(deliveries_=numbered(b"")))


class Odd(Keeping):
    """Sets the attribute `what` of the message `odd` directly in the callback `where`, and may raise then."""

    name = "odd"
    where, raises = "", False
    what: tuple[str, Any] = ("", None)

    def _set(self, where: str, message: Message) -> Message:
        if where == self.where and message.message_id == "m1":
            setattr(message, *self.what)
            if self.raises:
                raise ValueError("as told")
        return message

    def transform(self, event: Message) -> Message:
        return self._set("transform", event)

    def prepare_messages(self, messages: list[Message], context: Any) -> list[Message]:
        return [self._set("prepare_messages", message) for message in messages]

    def handle_message(self, message: Message, context: Any) -> Message:
        if message.data == b"fail":
            return message.failed("as told")
        return self._set("handle_message", message.put_batcher("kept").put_data({"text": message.data.decode()}))

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        return [self._set("handle_failed", message) for message in messages]


def odd(where: str, attribute: str, value: Any, *, raises: bool = False) -> type[Pipeline]:
    class OddAt(Odd):
        pass

    OddAt.where, OddAt.what, OddAt.raises = where, (attribute, value), raises
    return OddAt


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("where", ["prepare_messages", "handle_message"])
@pytest.mark.parametrize(("attribute", "value", "reason"), ODD)
def test_an_odd_value_that_a_callback_sets_fails_its_message_alone(lake, where, attribute, value, reason, raises):
    manifest = handled(lake, odd(where, attribute, value, raises=raises), b"1", b"odd", b"3")

    told = {row["message_id"]: row for row in rows_of(lake, "odd", manifest, "outcomes")}
    neighbours = "failed" if raises and where == "prepare_messages" else "handled"
    assert [told[name]["outcome"] for name in ("m0", "m1", "m2")] == [neighbours, "failed", neighbours]
    assert told["m1"]["action"] == "ack"
    failures = [row for row in rows_of(lake, "odd", manifest, "failed") if row["message_id"] == "m1"]
    assert [(row["stage"], row["data"]) for row in failures] == [(where, b"odd")]
    assert ("as told" if raises else reason) in failures[0]["reason"]


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize(("attribute", "value"), [case[:2] for case in ODD])
def test_an_odd_value_set_by_handle_failed_counts_as_its_error(lake, raises, attribute, value):
    manifest = handled(lake, odd("handle_failed", attribute, value, raises=raises), b"1", b"fail", b"fail")
    assert outcomes(lake, "odd", manifest) == {"m0": "handled", "m1": "failed", "m2": "failed"}
    failures = rows_of(lake, "odd", manifest, "failed")
    assert [(row["reason"], row["batcher"], row["batch_key"]) for row in failures] == [
        ("as told", "default", "default")
    ] * 2
    assert manifest.totals.handle_failed_errors >= 1


class Route(enum.StrEnum):
    KEPT = "kept"


def test_a_subclass_of_str_counts_as_text(lake):
    assert outcomes(lake, "odd", handled(lake, odd("handle_message", "batcher", Route.KEPT), b"1", b"2")) == {
        "m0": "handled",
        "m1": "handled",
    }
    manifest = handled(lake, odd("handle_message", "batch_key", GhostlyText("k")), b"1", b"2")
    assert [row["batch_key"] for row in rows_of(lake, "odd", manifest, "kept")] == ["default", "k"]


class Oddly(Keeping):
    """Fails messages with reasons that are not text."""

    name = "oddly"

    def handle_message(self, message: Message, context: Any) -> Message:
        return message.failed(Failure(kind=ValueError, reason=None, stage=5))  # type: ignore[arg-type]


def test_a_failure_whose_parts_are_not_text_is_converted_to_text(lake):
    manifest = handled(lake, Oddly, b"1")
    (recorded,) = rows_of(lake, "oddly", manifest, "failed")
    assert (recorded["kind"], recorded["reason"], recorded["stage"]) == ("<class 'ValueError'>", "None", "5")
