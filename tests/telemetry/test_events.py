"""Functions get events in the process where they happen."""

import logging
from collections import Counter
from typing import Any

import pytest

from pipeline_platform import telemetry
from pipeline_platform.model.options import Batcher, Processors
from pipeline_platform.telemetry import Event
from pipeline_platform.testing import test_batch as try_batch
from tests.fixtures.faults import PanicError
from tests.fixtures.obedient import Obedient
from tests.fixtures.small_lake import handled, outcomes
from tests.fixtures.telemetry import named

EVENTS: list[Event] = []


@pytest.fixture(autouse=True)
def no_events():
    EVENTS.clear()


def test_a_message_has_one_end_event_and_counts_once_in_its_chunk(lake, heard):
    handled(lake, Obedient, b"1", b"fail", b"raise", b"none", b"unknown")

    messages, (start, stop) = named(heard, "message"), named(heard, "chunk")
    ended = [
        (phase, fields["message_id"], fields.get("failed"), fields.get("kind")) for phase, fields in messages[1::2]
    ]
    assert [phase for phase, _ in messages[::2]] == ["start"] * 5
    assert ended == [
        ("stop", "m0", 0, None),
        ("stop", "m1", 1, None),
        ("exception", "m2", None, "ValueError"),
        ("exception", "m3", None, "TypeError"),
        ("stop", "m4", 0, None),
    ]
    assert start == ("start", {"pipeline": "obedient", "receive_id": "r1", "run_id": "", "task": 0, "messages": 5})
    counts = {"handled": 1, "skipped": 0, "failed": 4, "returned": 0, "staged": 0}
    assert stop == ("stop", start[1] | counts), "with the message of an unknown batcher"


def test_events_of_handle_failed_begin_and_stop_or_raise(lake, heard):
    class Quiet(Obedient):
        name = "quiet"

        def handle_failed(self, messages, context):
            return messages

    class Loud(Obedient):
        name = "loud"

        def handle_failed(self, messages, context):
            raise ConnectionError("nobody to tell of raise")

    for pipeline in (Quiet, Loud):
        handled(lake, pipeline, b"1", b"raise", b"raise")

    events = [(phase, fields["messages"], fields.get("kind")) for phase, fields in named(heard, "handle_failed")]
    assert events == [("start", 2, None), ("stop", 2, None), ("start", 2, None), ("exception", 2, "ConnectionError")]


def test_a_batch_event_has_counts_or_an_exception(heard):
    class Batching(Obedient):
        name = "batching"
        batchers = {"all": Batcher(batch_size=3)}

        def handle_message(self, message, context):
            return message.put_batcher("all")

        def handle_batch(self, batcher, messages, batch_info, context):
            if messages[0].data == b"raise":
                raise ValueError("as told")
            return messages[1:]

    try_batch(Batching, [b"1", b"2", b"3", b"raise"])

    events = [
        (phase, fields["messages"], fields.get("ok"), fields.get("kind")) for phase, fields in named(heard, "batch")
    ]
    assert events == [
        ("start", 3, None, None), ("stop", 3, 2, None), ("start", 1, None, None), ("exception", 1, None, "ValueError")
    ]  # fmt: skip
    assert {fields["batcher"] for _, fields in named(heard, "batch")} == {"all"}


def test_events_contain_no_payload_and_no_text_of_an_exception(lake, heard):
    class Quoting(Obedient):
        name = "quoting"

        def handle_message(self, message, context):
            raise ValueError(message.data.decode())

    handled(lake, Quoting, b"a secret")

    assert "secret" not in str(heard)


def test_an_event_has_both_clocks_a_span_and_at_the_end_a_duration(lake, heard):
    handled(lake, Obedient, b"1")
    start, stop = (event for event in heard if event.name == "chunk")
    assert (start.duration, start.span) == (None, stop.span)
    assert stop.duration == stop.monotonic_time - start.monotonic_time >= 0
    assert stop.system_time > 1.7e9 > start.monotonic_time


def test_functions_of_the_class_get_events_in_forks_and_threads(lake, tmp_path):
    def note(event: Event) -> None:
        with (tmp_path / "told").open("a") as file:
            file.write(f"{event.name} {event.phase} {event.fields['task']}\n")

    class Threaded(Obedient):
        name = "threaded"
        processors = Processors(threads=3)
        telemetry = {"message": note, "chunk": note}

    handled(lake, Threaded, b"1", b"raise", b"3", careful=True)

    lines = Counter((tmp_path / "told").read_text().splitlines())
    assert lines == {
        "chunk start 0": 1, "chunk stop 0": 1, "message start 0": 3, "message stop 0": 2, "message exception 0": 1
    }  # fmt: skip


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), PanicError()])
def test_a_function_that_raises_gets_no_more_events_and_fails_no_message(lake, caplog, error):
    def broken(event: Event) -> None:
        EVENTS.append(event)
        raise error

    class Broken(Obedient):
        name = f"broken_{type(error).__name__.lower()}"
        telemetry = {"message": broken, "chunk": EVENTS.append}

    manifests = [handled(lake, Broken, b"1", b"2") for _ in range(2)]

    assert [set(outcomes(lake, Broken.name, manifest).values()) for manifest in manifests] == [{"handled"}] * 2
    assert Counter(event.name for event in EVENTS) == {"message": 1, "chunk": 4}
    (line,) = caplog.messages
    assert "broken" in line
    assert f"raised {type(error).__name__} at message.start" in line


def test_an_attached_function_that_raises_is_detached_and_may_be_attached_again(lake, caplog):
    def broken(event: Event) -> None:
        EVENTS.append(event)
        raise ValueError("no")

    for _ in range(2):
        telemetry.attach("broken", ["chunk"], broken)
        handled(lake, Obedient, b"1")

    assert len(EVENTS) == 2
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    telemetry.detach("broken")


def test_an_attached_function_gets_its_events_until_it_is_detached(lake):
    telemetry.attach("mine", ["chunk"], EVENTS.append)
    handled(lake, Obedient, b"1", b"raise")
    telemetry.detach("mine")
    handled(lake, Obedient, b"1")
    assert [(event.name, event.phase) for event in EVENTS] == [("chunk", "start"), ("chunk", "stop")]


def test_an_unknown_event_is_refused():
    with pytest.raises(ValueError, match=r"attach\('mine'\): 'chunks' is not an event. Valid events: ask, begin"):
        telemetry.attach("mine", ["chunks"], EVENTS.append)


def test_without_functions_the_callback_itself_is_called(lake, monkeypatch):
    """The hot loop calls no wrapper."""

    def refused(*_: Any) -> None:
        raise AssertionError("told of a message")

    monkeypatch.setattr("pipeline_platform.tasks.handle.row_lane._emitting", refused)

    manifest = handled(lake, Obedient, b"1", b"2")

    assert set(outcomes(lake, "obedient", manifest).values()) == {"handled"}
