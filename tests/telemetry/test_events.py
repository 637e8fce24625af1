"""Functions that are told of events, in the process where these happen."""

import logging
from collections import Counter
from typing import Any

import pytest

from pipeline_platform import telemetry
from pipeline_platform.model.options import Batcher, Processors
from pipeline_platform.telemetry import Event
from pipeline_platform.testing import test_batch as try_batch
from tests.fixtures.obedient import Obedient, PanicError
from tests.fixtures.small_lake import handled, outcomes
from tests.fixtures.telemetry import named

TOLD: list[Event] = []


@pytest.fixture(autouse=True)
def told_nothing():
    TOLD.clear()


def test_a_message_ends_once_ok_failed_or_raised_and_counts_once_in_its_chunk(lake, heard):
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
    counts = {"handled": 1, "failed": 4, "returned": 0, "staged": 0}
    assert stop == ("stop", start[1] | counts), "with the one that no batcher took"


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


def test_a_batch_tells_what_failed_of_it_or_that_it_raised(heard):
    class Batching(Obedient):
        name = "batching"
        batchers = {"all": Batcher(batch_size=3)}

        def handle_message(self, message, context):
            return message.put_batcher("all")

        def handle_batch(self, batcher, messages, batch_info, context):
            if messages[0].data == b"raise":
                raise ValueError("told to")
            return messages[1:]

    try_batch(Batching, [b"1", b"2", b"3", b"raise"])

    events = [
        (phase, fields["messages"], fields.get("ok"), fields.get("kind")) for phase, fields in named(heard, "batch")
    ]
    assert events == [
        ("start", 3, None, None), ("stop", 3, 2, None), ("start", 1, None, None), ("exception", 1, None, "ValueError")
    ]  # fmt: skip
    assert {fields["batcher"] for _, fields in named(heard, "batch")} == {"all"}


def test_no_event_holds_a_payload_or_what_an_exception_says(lake, heard):
    class Quoting(Obedient):
        name = "quoting"

        def handle_message(self, message, context):
            raise ValueError(message.data.decode())

    handled(lake, Quoting, b"a secret")

    assert "secret" not in str(heard)


def test_both_clocks_and_a_span_are_told_and_the_duration_at_the_end(lake, heard):
    handled(lake, Obedient, b"1")
    start, stop = (event for event in heard if event.name == "chunk")
    assert (start.duration, start.span) == (None, stop.span)
    assert stop.duration == stop.monotonic_time - start.monotonic_time >= 0
    assert stop.system_time > 1.7e9 > start.monotonic_time


def test_a_class_s_own_functions_are_told_also_in_forks_and_threads(lake, tmp_path):
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
def test_a_function_that_raises_is_told_no_more_and_costs_no_message(lake, caplog, error):
    def broken(event: Event) -> None:
        TOLD.append(event)
        raise error

    class Broken(Obedient):
        name = f"broken_{type(error).__name__.lower()}"
        telemetry = {"message": broken, "chunk": TOLD.append}

    manifests = [handled(lake, Broken, b"1", b"2") for _ in range(2)]

    assert [set(outcomes(lake, Broken.name, one).values()) for one in manifests] == [{"handled"}] * 2
    assert Counter(event.name for event in TOLD) == {"message": 1, "chunk": 4}
    (line,) = caplog.messages
    assert "broken" in line
    assert f"raised {type(error).__name__} at message.start" in line


def test_one_that_is_attached_and_raises_is_detached_and_may_be_attached_again(lake, caplog):
    def broken(event: Event) -> None:
        TOLD.append(event)
        raise ValueError("no")

    for _ in range(2):
        telemetry.attach("broken", ["chunk"], broken)
        handled(lake, Obedient, b"1")

    assert len(TOLD) == 2
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    telemetry.detach("broken")


def test_one_hears_what_it_asked_for_until_it_is_detached(lake):
    telemetry.attach("mine", ["chunk"], TOLD.append)
    handled(lake, Obedient, b"1", b"raise")
    telemetry.detach("mine")
    handled(lake, Obedient, b"1")
    assert [(event.name, event.phase) for event in TOLD] == [("chunk", "start"), ("chunk", "stop")]


def test_an_event_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"attach\('mine'\): 'chunks' is not an event. Valid events: ask, begin"):
        telemetry.attach("mine", ["chunks"], TOLD.append)


def test_without_functions_the_callback_itself_is_called(lake, monkeypatch):
    """The hot loop calls nothing in between."""

    def refused(*_: Any) -> None:
        raise AssertionError("told of a message")

    monkeypatch.setattr("pipeline_platform.tasks.handle.row_lane._emitting", refused)

    manifest = handled(lake, Obedient, b"1", b"2")

    assert set(outcomes(lake, "obedient", manifest).values()) == {"handled"}
