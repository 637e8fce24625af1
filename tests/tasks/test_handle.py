"""Handling: whatever a callback does with a message, the others do not notice."""

import asyncio
import enum
import gc
import json
import os
import signal
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel, computed_field, field_validator

from pipeline_platform.control.pace import Pace
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.failure import Failure
from pipeline_platform.model.message import Message
from pipeline_platform.model.options import Batcher, Processors, Producer, RateLimiting, TableBatcher
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.tasks.handle import Handler
from tests.fixtures.small_lake import WINDOW, Memory, Row, batch_of, handled, numbered, outcomes, received, rows_of


@pytest.fixture
def lake(tmp_path):
    return Lake(root=str(tmp_path))


class PanicError(BaseException):
    """What a Rust library raises when it panics is no Exception either."""


KEPT: list[Message] = []


class Obedient(Pipeline):
    """Does what a payload says."""

    name = "obedient"
    producer = Producer(source="memory")
    processors = Processors(chunk_size=10)
    batchers = {"kept": TableBatcher(schema=Row)}

    def handle_message(self, message: Message, context: Any) -> Any:  # noqa: C901 - a list of cases
        text = message.data.decode()
        done = message.put_batcher("kept").put_data({"text": text})
        match text:
            case "raise":
                raise ValueError("as told")
            case "exit":
                raise SystemExit(3)
            case "panic":
                raise PanicError("index out of bounds")
            case "cancel":
                raise asyncio.CancelledError
            case "interrupt":
                raise KeyboardInterrupt
            case "recurse":
                return self.handle_message(message, context)
            case "none":
                return None
            case "nonsense":
                return {"text": text}
            case "another":
                return next(iter(Message.each(batch_of(b"x", b"y"))))
            case "neighbour":
                return KEPT[-1]
            case "unknown":
                return done.put_batcher("nowhere")
            case "unhashable":
                return done.put_batcher(["kept"])  # type: ignore[arg-type]
            case "fail":
                return done.failed("as told")
            case "misfit":
                return done.put_data({"txt": 1})
            case "surrogate":
                return done.put_data({"text": "\ud83d"})
            case "surrogate key":
                return done.put_batch_key("\ud83d")
            case "number for a key":
                done.batch_key = 5  # type: ignore[assignment]
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "die quietly":
                os._exit(0)
        KEPT.append(done)
        return done


FAULTS = {
    "raise": ("ValueError", "as told"),
    "exit": ("SystemExit", "3"),
    "panic": ("PanicError", "index out of bounds"),
    "cancel": ("CancelledError", "CancelledError"),
    "interrupt": ("KeyboardInterrupt", "KeyboardInterrupt"),
    "recurse": ("RecursionError", "maximum recursion depth"),
    "none": ("TypeError", "handle_message must return a Message, got NoneType"),
    "nonsense": ("TypeError", "handle_message must return a Message, got dict"),
    "another": ("TypeError", "it returned another one"),
    "neighbour": ("TypeError", "it returned another one"),
    "unknown": ("unknown batcher", "no batcher 'nowhere'; there are ['kept']"),
    "unhashable": ("TypeError", "batcher was set to a value of type list; put_batcher takes text"),
    "fail": ("failed", "as told"),
    "misfit": ("ColumnError", "data has ['txt'], which Row has no field for"),
    "surrogate": ("ColumnError", "surrogates not allowed"),
    "surrogate key": ("UnicodeEncodeError", "surrogates not allowed"),
    "number for a key": ("TypeError", "batch_key was set to a value of type int; put_batch_key takes text"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_message_fails_alone_and_keeps_its_payload(lake, fault):
    manifest = handled(lake, Obedient, b"1", fault.encode(), b"3")

    assert outcomes(lake, "obedient", manifest) == {"m0": "handled", "m1": "failed", "m2": "handled"}
    assert [row["text"] for row in rows_of(lake, "obedient", manifest, "kept")] == ["1", "3"]
    (failure,) = rows_of(lake, "obedient", manifest, "failed")
    kind, reason = FAULTS[fault]
    assert failure["kind"] == kind
    assert reason in failure["reason"]
    assert failure["data"] == fault.encode(), "driving it again needs the original"
    assert (failure["message_id"], failure["attempt"], failure["state"]) == ("m1", 1, "open")


@pytest.mark.parametrize("payload", [b"", b"\xff\xfe not UTF-8", b"{not JSON", b"x" * 2**20, None])
def test_a_payload_that_cannot_be_read_fails_alone(lake, payload):
    class Strict(Obedient):
        name = "strict"

        def handle_message(self, message, context):
            return message.put_batcher("kept").put_data(Row.model_validate_json(message.data))

    manifest = handled(lake, Strict, b'{"text": "a"}', payload, b'{"text": "b"}')

    assert outcomes(lake, "strict", manifest) == {"m0": "handled", "m1": "failed", "m2": "handled"}
    (failure,) = rows_of(lake, "strict", manifest, "failed")
    assert failure["data"] == payload


def test_a_message_of_a_megabyte_is_handled_like_any_other(lake):
    manifest = handled(lake, Obedient, b"1", b"x" * 2**20)

    assert outcomes(lake, "obedient", manifest) == {"m0": "handled", "m1": "handled"}


@pytest.mark.parametrize("death", ["die", "die quietly"])
@pytest.mark.parametrize("deadly", [{0}, {4}, {1, 2}, {0, 4}])
def test_in_careful_mode_a_message_that_kills_its_process_fails_alone(lake, death, deadly):
    payloads = [death.encode() if index in deadly else b"%d" % index for index in range(5)]

    manifest = handled(lake, Obedient, *payloads, careful=True)

    expected = {f"m{index}": "failed" if index in deadly else "handled" for index in range(5)}
    assert outcomes(lake, "obedient", manifest) == expected
    failures = rows_of(lake, "obedient", manifest, "failed")
    assert {row["data"] for row in failures} == {death.encode()}
    assert {row["kind"] for row in failures} == {"worker killed"}
    assert {row["message_id"] for row in rows_of(lake, "obedient", manifest, "kept")} == {
        name for name, outcome in expected.items() if outcome == "handled"
    }


class Permits:
    """A rate limit that counts what it was asked for."""

    unlimited_until = float("-inf")

    def __init__(self):
        self.asked = 0
        self.process = os.getpid()

    def permitted(self, wanted):
        assert os.getpid() == self.process, "a forked process must not touch the store's connection"
        count = min(wanted, 2)
        self.asked += count
        return count, float("inf")

    def each(self, messages):
        assert os.getpid() == self.process
        self.asked += len(messages)
        yield from messages


class Diary(Obedient):
    """Writes down when each message was begun, in whatever process."""

    name = "diary"

    def handle_message(self, message, context):
        with open(context, "a") as diary:
            diary.write(f"{message.data.decode()} {time.time()} {time.monotonic()}\n")
        return super().handle_message(message, context)


def begun(diary) -> list[tuple[str, float, float]]:
    lines = [line.split() for line in diary.read_text().splitlines()]
    return [(text, float(clock), float(monotonic)) for text, clock, monotonic in lines]


def test_every_try_of_a_message_takes_its_permit(lake, tmp_path):
    permits, diary = Permits(), tmp_path / "begun"

    manifest = handled(lake, Diary, b"1", b"2", b"die", b"4", b"5", careful=True, pace=permits, context=str(diary))

    assert outcomes(lake, "diary", manifest)["m2"] == "failed"
    tries = [text for text, *_ in begun(diary)]
    assert tries.count("die") == 2, "with its neighbour, and alone"
    assert len(tries) <= permits.asked


def test_tries_are_no_faster_than_the_limit(lake, tmp_path):
    """A killer in the midst of many is tried with those before it, and alone."""
    limit = RateLimiting(allowed_messages=10, interval=timedelta(seconds=0.25))
    store, diary = ControlStore(f"sqlite:///{tmp_path}/control.db"), tmp_path / "begun"
    payloads = [b"die" if index % 16 == 15 else b"%d" % index for index in range(48)]

    manifest = handled(lake, Diary, *payloads, careful=True, pace=Pace(store, "diary", limit), context=str(diary))

    store.close()
    assert manifest.total("failed") == 3
    intervals = Counter(int(clock / 0.25) for _, clock, _ in begun(diary))
    assert sum(intervals.values()) <= 2 * 48, "a killer costs one more try of its block"
    assert max(intervals.values()) <= 10 + 1, "one begun at an interval's end may be written down after it"


class Brief(Permits):
    """Permits for two messages that hold for 0.5 s: to fork takes some of that on a busy machine."""

    def __init__(self):
        super().__init__()
        self.held = []

    def permitted(self, wanted):
        count, _ = super().permitted(wanted)
        time.sleep(0.1)
        self.held.append((time.monotonic(), time.monotonic() + 0.5))
        return count, self.held[-1][1]


class Slow(Diary):
    name = "slow"
    preparing = 0.0

    def prepare_messages(self, messages, context):
        time.sleep(self.preparing)
        return messages

    def handle_message(self, message, context):
        handled = super().handle_message(message, context)
        time.sleep(0.6)
        return handled


def test_a_try_begins_no_message_after_its_permits(lake, tmp_path):
    permits, diary = Brief(), tmp_path / "begun"

    manifest = handled(lake, Slow, b"1", b"2", b"3", b"4", careful=True, pace=permits, context=str(diary))

    assert set(outcomes(lake, "slow", manifest).values()) == {"handled"}
    tries = begun(diary)[:4]
    assert [text for text, *_ in tries] == ["1", "2", "3", "4"], "each once"
    assert all(any(since <= at <= until for since, until in permits.held) for _, _, at in tries)


def test_preparing_that_outlasts_the_permits_does_not_keep_a_task_from_trying(lake, tmp_path):
    class Slower(Slow):
        name = "slow"
        preparing = 0.6

    permits, diary = Brief(), tmp_path / "begun"

    manifest = handled(lake, Slower, b"1", b"2", careful=True, pace=permits, context=str(diary))

    assert set(outcomes(lake, "slow", manifest).values()) == {"handled"}
    assert permits.asked >= len(begun(diary)), "the mean holds"


def test_the_rate_limit_is_asked_for_every_message_once(lake):
    permits = Permits()

    handled(lake, Obedient, b"1", b"2", b"3", pace=permits)

    assert permits.asked == 3


# What callbacks set past the methods of a message


class Ghost:
    """Nothing can be learnt of it."""

    def __hash__(self):
        raise PanicError

    __repr__ = __str__ = __eq__ = __bool__ = __hash__  # type: ignore[assignment]


class GhostlyText(str):
    __hash__ = __repr__ = __str__ = __eq__ = Ghost.__hash__  # type: ignore[assignment]


ODD = [
    ("batch_key", None, "batch_key was set to a value of type NoneType; put_batch_key takes text"),
    ("batch_key", Ghost(), "batch_key was set to a value of type Ghost"),
    ("batcher", None, "batcher was set to a value of type NoneType; put_batcher takes text"),
    ("batcher", Ghost(), "batcher was set to a value of type Ghost"),
]


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


# prepare_messages


class Preparing(Obedient):
    """Has chunks of three messages prepared."""

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


@pytest.mark.parametrize("fault", [b"raise", b"panic", b"short", b"long", b"reorder", b"none", b"nonsense"])
def test_a_fault_of_prepare_messages_fails_its_chunk_and_no_other(lake, fault):
    manifest = handled(lake, Preparing, fault, b"2", b"3", b"4", b"5", b"6")

    assert list(outcomes(lake, "preparing", manifest).values()).count("failed") == 3
    assert [row["text"] for row in rows_of(lake, "preparing", manifest, "kept")] == ["4!", "5!", "6!"]
    failures = rows_of(lake, "preparing", manifest, "failed")
    assert [row["data"] for row in failures] == [fault, b"2", b"3"]
    assert {row["stage"] for row in failures} == {"prepare_messages"}


def test_prepare_messages_may_give_any_iterable(lake):
    manifest = handled(lake, Preparing, b"generate", b"2")

    assert [row["text"] for row in rows_of(lake, "preparing", manifest, "kept")] == ["generate!", "2!"]


def test_what_prepare_messages_fails_is_not_handled(lake):
    manifest = handled(lake, Preparing, b"fail one", b"2", b"3")

    assert outcomes(lake, "preparing", manifest) == {"m0": "failed", "m1": "handled", "m2": "handled"}


def test_prepare_messages_gets_chunks_and_what_is_recorded_does_not_depend_on_them(lake):
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


@pytest.mark.parametrize("fault", [b"raise", b"none"])
def test_a_fault_of_transform_fails_its_message_alone(lake, fault):
    manifest = handled(lake, Transforming, b"a", fault, b"c")

    assert outcomes(lake, "transforming", manifest) == {"m0": "handled", "m1": "failed", "m2": "handled"}
    (failure,) = rows_of(lake, "transforming", manifest, "failed")
    assert (failure["stage"], failure["data"]) == ("transform", fault)
    assert [row["text"] for row in rows_of(lake, "transforming", manifest, "kept")] == ["A", "C"]


# handle_failed


SEEN: list[list[bytes]] = []
BEFORE: list[Message] = []


class Failing(Obedient):
    """Fails everything but `ok`, and does with the failures what the first of them says."""

    name = "failing"
    processors = Processors(chunk_size=3)

    def handle_message(self, message, context):
        if message.data == b"ok":
            return message.put_batcher("kept").put_data({"text": "ok"})
        BEFORE.append(message)
        raise ValueError("as told")

    def handle_failed(self, messages: list[Message], context: Any) -> Any:
        SEEN.append([message.data for message in messages])
        match messages[0].data:
            case b"raise":
                raise ConnectionError("nobody to tell")
            case b"panic":
                raise PanicError
            case b"none":
                return None
            case b"short":
                return messages[1:]
            case b"nonsense":
                return [None] * len(messages)
            case b"rescue":
                return BEFORE[-len(messages) :]  # they had not failed yet
            case b"generate":
                return (message.configure_ack(on_failure="nack:30") for message in messages)
            case b"noop":
                return [message.configure_ack(on_failure="noop") for message in messages]
            case b"nack":
                return [message.configure_ack(on_failure="nack:30") for message in messages]
        return messages


class Unsure(Obedient):
    """Fails its first message in the callback `where`."""

    name = "unsure"
    where = ""

    def _or_failed(self, callback: str, message: Message) -> Message:
        return message.failed("as told") if callback == self.where and message.message_id == "m0" else message

    def transform(self, event):
        return self._or_failed("transform", event)

    def prepare_messages(self, messages, context):
        return [self._or_failed("prepare_messages", message) for message in messages]

    def handle_message(self, message, context):
        return self._or_failed("handle_message", message.put_batcher("kept").put_data({"text": ""}))


@pytest.mark.parametrize("callback", ["transform", "prepare_messages", "handle_message"])
def test_a_failure_names_the_callback_that_failed_its_message(lake, callback, monkeypatch):
    monkeypatch.setattr(Unsure, "where", callback)

    manifest = handled(lake, Unsure, b"fail", b"ok")

    (failure,) = rows_of(lake, "unsure", manifest, "failed")
    assert (failure["stage"], failure["reason"]) == (callback, "as told")
    assert manifest.notes[0]["sample"][0]["stage"] == callback


def test_a_new_reason_in_handle_failed_keeps_where_and_how_it_failed(lake):
    class Renaming(Obedient):
        name = "renaming"

        def handle_failed(self, messages, context):
            return [message.failed("found out") for message in messages]

    manifest = handled(lake, Renaming, b"raise")

    (failure,) = rows_of(lake, "renaming", manifest, "failed")
    assert (failure["stage"], failure["reason"]) == ("handle_message", "found out")
    assert "ValueError: as told" in failure["traceback"]


@pytest.mark.parametrize("fault", ["left out", "twice", "a stranger last", "raise half-way"])
def test_what_handle_failed_does_to_one_message_costs_no_other(lake, fault):
    class Renaming(Obedient):
        name = "renaming"

        def handle_failed(self, messages, context):
            return looked_at(messages)

    def looked_at(messages):
        for message in messages:
            if message.message_id != "m2" or fault not in ("left out", "raise half-way"):
                yield message.failed(f"found out {message.message_id}")
            elif fault == "raise half-way":
                raise ValueError("as told")
        if fault == "twice":
            yield messages[0]
        if fault == "a stranger last":
            yield next(Message.each(batch_of(b"x")))

    manifest = handled(lake, Renaming, b"raise", b"raise", b"raise")

    reasons = {row["message_id"]: row["reason"] for row in rows_of(lake, "renaming", manifest, "failed")}
    expected = {name: f"found out {name}" for name in ("m0", "m1", "m2")}
    if fault in ("left out", "raise half-way"):
        expected["m2"] = "as told"
    assert reasons == expected
    assert manifest.total("handle_failed_errors") == (0 if fault == "twice" else 1)


def test_a_very_long_text_of_an_exception_pushes_no_frame_out(lake):
    class Verbose(Obedient):
        name = "verbose"

        def handle_message(self, message, context):
            try:
                raise KeyError("x" * 100_000)
            except KeyError as error:
                raise ValueError("y" * 100_000) from error

    manifest = handled(lake, Verbose, b"1")

    (failure,) = rows_of(lake, "verbose", manifest, "failed")
    assert failure["traceback"].count("handle_message\n") >= 2, "both frames are there"
    assert "KeyError" in failure["traceback"]
    assert len(failure["traceback"]) <= 8_000


@pytest.mark.parametrize("fault", [b"raise", b"panic", b"none", b"short", b"nonsense", b"rescue"])
def test_whatever_handle_failed_does_what_failed_stays_failed(lake, fault):
    manifest = handled(lake, Failing, b"ok", fault, b"x")

    assert outcomes(lake, "failing", manifest) == {"m0": "handled", "m1": "failed", "m2": "failed"}
    failures = rows_of(lake, "failing", manifest, "failed")
    assert [(row["data"], row["reason"]) for row in failures] == [(fault, "as told"), (b"x", "as told")]
    errors = manifest.total("handle_failed_errors")
    assert errors == (0 if fault == b"rescue" else 1), "its own errors are counted, and told among the reasons"


def test_handle_failed_gets_failures_a_chunk_at_a_time_and_only_failures(lake):
    SEEN.clear()

    handled(lake, Failing, b"1", b"ok", b"2", b"3", b"4")

    assert SEEN == [[b"1", b"2", b"3"], [b"4"]]


@pytest.mark.parametrize(("payload", "action"), [(b"noop", "noop"), (b"nack", "nack:30"), (b"generate", "nack:30")])
def test_a_failure_that_goes_back_to_the_source_is_no_decision_and_no_open_failure(lake, payload, action):
    manifest = handled(lake, Failing, payload)

    (outcome,) = rows_of(lake, "failing", manifest, "outcomes")
    assert (outcome["outcome"], outcome["action"]) == ("returned", action)
    assert rows_of(lake, "failing", manifest, "failed") == [], "it comes back by intent"


def test_the_sources_own_setting_holds_where_a_message_has_none(lake):
    source = Memory(deliveries_=numbered(b"ok", b"x"), on_success="noop", on_failure="nack:5")

    manifest = handled(lake, Failing, source=source)

    told = [(row["outcome"], row["action"]) for row in rows_of(lake, "failing", manifest, "outcomes")]
    assert told == [("handled", "noop"), ("returned", "nack:5")]


def test_a_message_driven_again_is_recorded_as_failed_whatever_the_source_would_be_told(lake):
    manifest = handled(lake, Failing, b"nack", origin="failed")

    assert outcomes(lake, "failing", manifest) == {"m0": "failed"}


def test_a_message_driven_again_that_succeeds_closes_its_failure(lake):
    manifest = handled(lake, Failing, b"ok", origin="failed")

    (event,) = rows_of(lake, "failing", manifest, "failed")
    assert (event["message_id"], event["state"], event["data"]) == ("m0", "closed", None)


# What else is recorded


def test_messages_go_to_their_batchers_with_their_keys(lake):
    class Sorting(Pipeline):
        name = "sorting"
        producer = Producer(source="memory")
        batchers = {"odd": TableBatcher(schema=Row), "even": TableBatcher(schema=Row)}

        def handle_message(self, message, context):
            number = int(message.data)
            routed = message.put_batcher("odd" if number % 2 else "even").put_batch_key(f"../{number % 3}")
            return routed.put_data(Row(text=str(number)))

    manifest = handled(lake, Sorting, *(b"%d" % number for number in range(6)))

    odd = rows_of(lake, "sorting", manifest, "odd")
    assert [(row["text"], row["batch_key"], row["message_id"]) for row in odd] == [
        ("1", "../1", "m1"),
        ("3", "../0", "m3"),
        ("5", "../2", "m5"),
    ]
    (notes,) = manifest.notes
    assert notes["keys"]["odd"] == {"../1": 1, "../0": 1, "../2": 1}
    assert (notes["handled"], notes["rows:even"]) == (6, 3)
    assert notes[f"handled@{WINDOW}"] == 6, "each window is told its own"


def test_without_batchers_a_message_leaves_nothing_but_its_outcome(lake):
    class Bare(Pipeline):
        name = "bare"
        producer = Producer(source="memory")

        def handle_message(self, message, context):
            return message.put_batcher("anything") if message.data == b"1" else message.failed("no")

    manifest = handled(lake, Bare, b"1", b"2")

    assert outcomes(lake, "bare", manifest) == {"m0": "handled", "m1": "failed"}
    assert {file.table for file in manifest} == {"outcomes", "failed"}


class Camel(BaseModel):
    """A model that JSON does not give back by itself: aliases, a computed field."""

    model_config = {"alias_generator": lambda name: name.title(), "extra": "forbid"}
    carrier: str

    @computed_field
    @property
    def shout(self) -> str:
        return self.carrier.upper()

    @field_validator("carrier")
    @classmethod
    def _known(cls, value: str) -> str:
        if value == "KeyError":
            raise KeyError(value)
        return value


class Batching(Pipeline):
    name = "batching"
    producer = Producer(source="memory")
    batchers = {"typed": Batcher(schema=Camel), "plain": Batcher()}

    def handle_message(self, message, context):
        if message.data == b"object":
            return message.put_batcher("plain").put_data(object())
        if message.data == b"loop":
            loop: list[Any] = []
            loop.append(loop)
            return message.put_batcher("plain").put_data(loop)
        if message.data == b"bytes":
            return message.put_batcher("plain").put_data(b"\xff")
        return message.put_batcher("typed").put_data(Camel(Carrier=message.data.decode()))

    def handle_batch(self, batcher, messages, batch_info, context):
        return messages


def test_messages_for_a_callback_wait_in_the_receives_own_folder_and_have_no_outcome_yet(lake):
    manifest = handled(lake, Batching, b"UA", b"bytes", b"object", b"loop")

    assert outcomes(lake, "batching", manifest) == {"m2": "failed", "m3": "failed"}
    assert {file.table for file in manifest} == {"outcomes", "failed", "_receives/r1/typed", "_receives/r1/plain"}
    (staged,) = rows_of(lake, "batching", manifest, "_receives/r1/plain")
    assert (staged["value"], staged["encoding"]) == (b"\xff", "bytes")


def test_many_reasons_and_keys_do_not_fill_the_tasks_memory(lake, monkeypatch):
    monkeypatch.setattr("pipeline_platform.tasks.tally._DISTINCT", 10)

    class Chatty(Obedient):
        name = "chatty"

        def handle_message(self, message, context):
            raise ValueError(message.message_id)

    manifest = handled(lake, Chatty, *[b"x"] * 50)

    assert len(manifest.notes[0]["reasons"]) <= 10
    assert manifest.total("failed") == 50


def test_a_long_batch_key_is_cut_in_what_the_driver_is_told_and_whole_in_its_table(lake):
    class Verbose(Pipeline):
        name = "verbose"
        producer = Producer(source="memory")
        batchers = {"kept": TableBatcher(schema=Row)}

        def handle_message(self, message, context):
            return message.put_batcher("kept").put_data(Row(text="")).put_batch_key(message.data.decode() * 10_000)

    manifest = handled(lake, Verbose, b"k")

    assert manifest.notes[0]["keys"]["kept"] == {"k" * 200: 1}
    assert rows_of(lake, "verbose", manifest, "kept")[0]["batch_key"] == "k" * 10_000


def test_what_the_driver_is_told_is_a_sample_without_payloads(lake):
    class Typed(Pipeline):
        name = "typed"
        producer = Producer(source="memory")
        batchers = {"kept": TableBatcher(schema=Flight)}

        def handle_message(self, message, context):
            return message.put_data(Flight.model_validate_json(message.data))

        def handle_failed(self, messages, context):
            return [Flight.model_validate_json(message.data) for message in messages]

    manifest = handled(lake, Typed, *[b'{"late": "SECRET %d"}' % number for number in range(30)])

    (notes,) = manifest.notes
    assert len(notes["sample"]) == 10
    assert set(notes["sample"][0]) == {"message_id", "stage", "kind", "reason", "attempt"}
    reason = "Flight: late: Input should be a valid integer, unable to parse string as an integer"
    assert notes["reasons"] == {
        f"ValidationError: {reason}": 30,
        f"handle_failed itself: ValidationError: {reason}": 1,
    }, "one cause is one reason"
    assert "SECRET" not in json.dumps(notes)
    failures = rows_of(lake, "typed", manifest, "failed")
    assert {row["reason"] for row in failures} == {reason}
    assert not any("SECRET" in row["traceback"] for row in failures)
    assert all(b"SECRET" in row["data"] for row in failures), "where it belongs"


class Flight(BaseModel):
    late: int


def test_handling_leaves_the_garbage_collector_as_it_was(lake):
    before = gc.get_threshold()

    handled(lake, Obedient, b"1")

    assert gc.get_threshold() == before


def test_a_handler_needs_no_lake():
    first, second = Handler(Obedient(), None).handle(batch_of(b"1", b"raise"))

    assert (first.status, second.status) == ("ok", "failed")
    assert isinstance(second.failure, Failure)


def test_a_source_that_delivers_a_message_without_an_id_is_named(lake):
    class Nameless(Memory):
        def read(self, share, receive_id):
            yield self.deliveries(message_id=["a", None], data=[b"", b""], ack_id=["1", "2"], ack_ref="q")

    with pytest.raises(Exception, match="memory delivered a message without message_id"):
        received(lake, "p", Nameless(deliveries_=numbered(b"")))
