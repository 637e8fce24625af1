"""Failures: calls of `handle_failed`, and recording."""

import os
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from pipeline_platform import Batcher, Message, Pipeline, Processors, Retry
from pipeline_platform.model.actions import AckAction
from pipeline_platform.model.message import DELIVERIES
from pipeline_platform.testing import test_batch as trial
from tests.fixtures.faults import PanicError
from tests.fixtures.obedient import Obedient
from tests.fixtures.small_lake import DRIVEN_AGAIN, Memory, batch_of, handled, numbered, outcomes, rows_of

SEEN: list[list[bytes]] = []
BEFORE: list[Message] = []


class Failing(Obedient):
    """Fails all messages but `ok`, and treats the failures as the first of them says."""

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
    assert manifest.totals.sample[0].stage == callback


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
def test_a_fault_of_one_message_in_handle_failed_affects_no_other(lake, fault):
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
    if fault == "left out":
        expected["m2"] = "as told"
    if fault in ("a stranger last", "raise half-way"):
        expected = dict.fromkeys(expected, "as told")
    assert reasons == expected
    assert manifest.totals.handle_failed_errors == (0 if fault == "twice" else 1)


def test_a_traceback_begins_with_the_callback(lake):
    class Calling(Obedient):
        name = "calling"

        def handle_message(self, message, context):
            return helper(message)

    def helper(message):
        raise ValueError("deep")

    manifest = handled(lake, Calling, b"1")

    (failure,) = rows_of(lake, "calling", manifest, "failed")
    frames = [line for line in failure["traceback"].splitlines() if line.startswith("  File")]
    first, second = frames
    assert first.startswith(f'  File "{__file__}", line ')
    assert (first.endswith("in handle_message"), second.endswith("in helper")) == (True, True)
    assert "pipeline_platform/" not in failure["traceback"]


def test_a_very_long_exception_text_keeps_all_frames(lake):
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
    errors = manifest.totals.handle_failed_errors
    assert errors == (0 if fault == b"rescue" else 1), "its own errors are counted among the reasons"


def test_handle_failed_gets_failures_a_chunk_at_a_time_and_only_failures(lake):
    SEEN.clear()
    handled(lake, Failing, b"1", b"ok", b"2", b"3", b"4")
    assert SEEN == [[b"1", b"2", b"3"], [b"4"]]


@pytest.mark.parametrize(("payload", "action"), [(b"noop", "noop"), (b"nack", "nack:30"), (b"generate", "nack:30")])
def test_a_failure_that_goes_back_to_the_source_is_no_decision_and_no_open_failure(lake, payload, action):
    manifest = handled(lake, Failing, payload)
    (outcome,) = rows_of(lake, "failing", manifest, "outcomes")
    assert (outcome["outcome"], outcome["action"]) == ("returned", action)
    assert rows_of(lake, "failing", manifest, "failed") == [], "it is redelivered on purpose"


class Choosing(Obedient):
    """Sets the ack action of each message."""

    name = "choosing"

    def handle_message(self, message, context):
        return super().handle_message(message.configure_ack(on_success="noop", on_failure="nack:7"), context)


@pytest.mark.parametrize(
    ("pipeline", "settings", "back"),
    [(Obedient, {"on_success": "noop"}, "nack:5"), (Choosing, {}, "nack:7")],
    ids=["the source's", "a message's own before it"],
)
def test_what_the_source_is_told_is_as_set(lake, pipeline, settings, back):
    source = Memory(deliveries_=numbered(b"ok", b"fail"), on_failure="nack:5", **settings)
    manifest = handled(lake, pipeline, source=source)
    told = [(row["outcome"], row["action"]) for row in rows_of(lake, pipeline.name, manifest, "outcomes")]
    assert told == [("handled", "noop"), ("returned", back)]


class Twice(Memory):
    """Marks all messages but the first as redelivered."""

    @property
    def ack_actions(self):
        return {"ack": AckAction(ends=True), "once": AckAction(ends=False, again="drop"), "drop": AckAction(ends=True)}

    def read(self, share, receive_id):
        for batch in super().read(share, receive_id):
            again = pa.array([row > 0 for row in range(batch.num_rows)])
            yield batch.set_column(DELIVERIES.get_field_index("redelivered"), "redelivered", again)


def test_a_word_that_means_another_the_second_time_is_that_one_for_what_comes_again(lake):
    manifest = handled(lake, Failing, source=Twice(deliveries_=numbered(b"x", b"x"), on_failure="once"))
    told = [(row["outcome"], row["action"]) for row in rows_of(lake, "failing", manifest, "outcomes")]
    assert sorted(told) == [("failed", "drop"), ("returned", "once")]


def test_a_retried_message_that_fails_is_recorded_as_failed(lake):
    manifest = handled(lake, Failing, b"nack", ack_policy=DRIVEN_AGAIN)
    assert outcomes(lake, "failing", manifest) == {"m0": "failed"}


HOUR = timedelta(hours=1)


class Retried(Obedient):
    """Fails as its messages say; a message has at most three attempts."""

    name = "retried"
    processors = Processors(max_message_bytes=20)
    retry = Retry(max_attempts=3, backoff=HOUR)

    def handle_message(self, message, context):
        if message.data == b"never":
            return message.failed("will never do", retry=False)
        if message.data == b"judged":
            raise LookupError("as told")
        return message.failed("not now")

    def handle_failed(self, messages, context):
        return [
            message.failed("no such order", retry=False) if message.failure.kind == "LookupError" else message
            for message in messages
        ]


class Unretried(Retried):
    """The same without the option `retry`."""

    retry = None


class Redelivered(Memory):
    """A source that counts deliveries."""

    attempt: int = 1

    def deliveries(self, **columns):
        return super().deliveries(**columns, attempt=[self.attempt] * len(columns["message_id"]))


def failed(lake, pipeline, *payloads, attempt=1):
    source = Redelivered(deliveries_=numbered(*payloads), attempt=attempt)
    return handled(lake, pipeline, source=source)


def recorded(lake, pipeline, *payloads, attempt=1):
    manifest = failed(lake, pipeline, *payloads, attempt=attempt)
    return rows_of(lake, pipeline.name, manifest, "failed")


def test_a_failure_is_not_recorded_before_the_start_of_its_receive_by_a_host_whose_clock_is_behind(lake):
    started_at = datetime.now(UTC) + timedelta(minutes=1)
    manifest = handled(lake, Unretried, b"later", started_at=started_at)
    assert [row["at"] for row in rows_of(lake, Unretried.name, manifest, "failed")] == [started_at]


@pytest.mark.parametrize("pipeline", [Retried, Unretried])
@pytest.mark.parametrize(
    ("payload", "reason"),
    [(b"never", "will never do"), (b"judged", "no such order"), (b"x" * 21, "its payload has 21 bytes")],
)
def test_failures_without_retry_are_dead_at_once(lake, pipeline, payload, reason):
    (row,) = recorded(lake, pipeline, payload)
    assert (row["state"], row["due_at"]) == ("dead", None)
    assert row["reason"].startswith(reason)


def test_without_retry_failures_stay_open_without_a_due_time(lake):
    (row,) = recorded(lake, Unretried, b"later", attempt=7)
    assert (row["state"], row["due_at"]) == ("open", None)


def test_dead_messages_are_counted_separately(lake):
    manifest = failed(lake, Retried, b"later", b"never", b"later")
    assert (manifest.totals.failed.total(), manifest.totals.dead) == (3, 1)


class Unavailable(Obedient):
    """Raises the exception that its message names; `handle_failed` gives each failure another reason."""

    name = "unavailable"
    retry = Retry(max_attempts=3, never=(LookupError, "timeout"))
    seen: list[bool] = []

    def handle_message(self, message, context):
        raise {b"key": KeyError, b"os": OSError}[message.data](message.data)

    def handle_failed(self, messages, context):
        self.seen.extend(message.failure.retry for message in messages)
        return [message.failed("for people") for message in messages]


def test_a_failure_that_retry_excludes_is_dead_even_if_handle_failed_changes_its_reason(lake, monkeypatch):
    monkeypatch.setattr(Unavailable, "seen", [])
    rows = recorded(lake, Unavailable, b"key", b"os")

    assert [(row["kind"], row["reason"], row["state"]) for row in rows] == [
        ("KeyError", "for people", "dead"),
        ("OSError", "for people", "open"),
    ]
    assert Unavailable.seen == [False, True], "handle_failed sees whether a failure is retried"


def test_a_function_of_retry_gets_the_exception_and_fails_a_message_alone_if_it_ends_its_process(lake):
    def is_refused(error):
        return os._exit(3) if isinstance(error, KeyError) else error.args == (b"os",)

    rules = {"name": "refused", "retry": Retry(max_attempts=3, never=(is_refused,))}
    manifest = handled(lake, type("Refused", (Unavailable,), rules), b"os", b"key", b"os", careful=True)
    rows = rows_of(lake, "refused", manifest, "failed")

    assert sorted((row["kind"], row["stage"], row["state"]) for row in rows) == [
        ("OSError", "handle_message", "dead"),
        ("OSError", "handle_message", "dead"),
        ("worker killed", "retry", "open"),
    ]


class InBatches(Unavailable):
    """Fails a child in its batch, or the message itself."""

    name = "in_batches"
    batchers = {"sent": Batcher()}

    def handle_message(self, message, context):
        return [message.put("a", batcher="sent"), message.put(message.data.decode(), batcher="sent")]

    def handle_batch(self, batcher, messages, batch_info, context):
        errors = {"key": KeyError("key"), "os": OSError("os")}
        return [message.failed(errors[message.data]) if message.data in errors else message for message in messages]


@pytest.mark.parametrize("rule", [OSError, lambda error: error.args == ("os",)])
def test_the_rules_of_retry_apply_to_children_and_to_tests(rule):
    rules = {"retry": Retry(max_attempts=3, on=(rule,)), "handle_failed": Pipeline.handle_failed}
    done = trial(type("InRules", (InBatches,), rules), [b"key", b"os", b"ok"])

    assert [message.failure.retry for message in done.failed] == [False, True]
