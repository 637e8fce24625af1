"""Values that callbacks set past the methods of a message: they fail its message alone."""

import enum
from typing import Any

import pytest

from pipeline_platform import Failure, Message, Pipeline, Producer, TableBatcher
from tests.fixtures.obedient import ODD, GhostlyText
from tests.fixtures.small_lake import Row, handled, outcomes, rows_of


class Odd(Pipeline):
    """The callback that `where` names sets `what`, past the methods, on the message `odd`, and may raise then."""

    name = "odd"
    producer = Producer(source="memory")
    batchers = {"kept": TableBatcher(schema=Row)}
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


@pytest.mark.parametrize("where", ["transform", "prepare_messages", "handle_message"])
@pytest.mark.parametrize(("attribute", "value", "reason"), ODD)
def test_an_odd_value_that_a_callback_sets_fails_its_message_alone(lake, where, attribute, value, reason):
    manifest = handled(lake, odd(where, attribute, value), b"1", b"odd", b"3")
    assert outcomes(lake, "odd", manifest) == {"m0": "handled", "m1": "failed", "m2": "handled"}
    (failure,) = rows_of(lake, "odd", manifest, "failed")
    assert (failure["stage"], failure["data"]) == (where, b"odd")
    assert reason in failure["reason"]


@pytest.mark.parametrize("where", ["transform", "prepare_messages", "handle_message"])
@pytest.mark.parametrize(("attribute", "value"), [one[:2] for one in ODD])
def test_a_callback_that_raises_after_it_set_an_odd_value_leaves_nothing_of_it(lake, where, attribute, value):
    manifest = handled(lake, odd(where, attribute, value, raises=True), b"1", b"odd", b"3")
    told = {row["message_id"]: row for row in rows_of(lake, "odd", manifest, "outcomes")}
    assert (told["m1"]["outcome"], told["m1"]["action"]) == ("failed", "ack")
    assert {row["reason"] for row in rows_of(lake, "odd", manifest, "failed")} == {"as told"}


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize(("attribute", "value"), [one[:2] for one in ODD])
def test_an_odd_value_that_handle_failed_sets_is_an_error_of_its_own(lake, raises, attribute, value):
    manifest = handled(lake, odd("handle_failed", attribute, value, raises=raises), b"1", b"fail", b"fail")
    assert outcomes(lake, "odd", manifest) == {"m0": "handled", "m1": "failed", "m2": "failed"}
    failures = rows_of(lake, "odd", manifest, "failed")
    assert [(row["reason"], row["batcher"], row["batch_key"]) for row in failures] == [
        ("as told", "default", "default")
    ] * 2
    assert manifest.total("handle_failed_errors") >= 1


class Route(enum.StrEnum):
    KEPT = "kept"


def test_a_kind_of_text_is_text_whatever_it_makes_of_itself(lake):
    assert outcomes(lake, "odd", handled(lake, odd("handle_message", "batcher", Route.KEPT), b"1", b"2")) == {
        "m0": "handled",
        "m1": "handled",
    }
    manifest = handled(lake, odd("handle_message", "batch_key", GhostlyText("k")), b"1", b"2")
    assert [row["batch_key"] for row in rows_of(lake, "odd", manifest, "kept")] == ["default", "k"]


class Oddly(Pipeline):
    """Fails what it gets, for no reason that is text."""

    name = "oddly"
    producer = Producer(source="memory")
    batchers = {"kept": TableBatcher(schema=Row)}

    def handle_message(self, message: Message, context: Any) -> Message:
        return message.failed(Failure(kind=ValueError, reason=None, stage=5))  # type: ignore[arg-type]


def test_a_failure_of_parts_that_are_no_text_is_told_in_words(lake):
    manifest = handled(lake, Oddly, b"1")
    (recorded,) = rows_of(lake, "oddly", manifest, "failed")
    assert (recorded["kind"], recorded["reason"], recorded["stage"]) == ("<class 'ValueError'>", "None", "5")
