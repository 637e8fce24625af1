"""`test_message` and `test_batch` call callbacks as a run does."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from pydantic import BaseModel

from pipeline_platform import Batcher, Message, Pipeline, Processors, Producer, TableBatcher
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.actions import AckAction, AckActions
from pipeline_platform.testing import Acknowledged, DummySource, test_batch, test_message
from tests.fixtures.early import Early, Together
from tests.fixtures.obedient import Obedient
from tests.fixtures.small_lake import batching, handled, returned, rows_of
from tests.tasks.test_handle import FAULTS


class Stop(BaseModel):
    name: str
    minutes: int = 0


class Rules(BaseModel):
    limit: int = 3


class Stops(Pipeline):
    """A pipeline in which the name of a stop selects the fault."""

    name = "stops"
    producer = Producer(source="memory")
    processors = Processors(chunk_size=2, max_message_bytes=100)
    batchers = {"lake": TableBatcher(schema=Stop), "typed": Batcher(schema=Stop, batch_size=2), "plain": Batcher()}
    context = Rules()

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def transform(self, event: Message) -> Message:
        return event.put_data(event.data.strip())

    def prepare_messages(self, messages: list[Message], context: Any) -> list[Message]:
        self.calls.append(["prepare", *(message.data for message in messages)])
        return messages

    def handle_message(self, message: Message, context: Any) -> Message:
        batcher, _, name = message.data.decode().partition(" ")
        if name == "over" and context.limit < 5:
            return message.failed(f"over {context.limit}")
        if name == "now":
            message = message.put_batch_mode("flush")
        if name == "misfit":
            return message.put({"title": "x"}, batcher=batcher)
        if name.startswith("not"):
            message = message.configure_ack(on_success="noop", on_failure="nack:5")
        data = Stop(name=name) if batcher == "typed" else {"name": name, "at": (1, 2)}
        return message.put({"name": name} if batcher == "lake" else data, batcher=batcher)

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: Any, context: Any) -> list[Message]:
        self.calls.append([batcher, *(message.data for message in messages)])
        names = [getattr(message.data, "name", "") for message in messages]
        if "raise" in names:
            raise ConnectionError("no answer")
        return [
            message.failed("too late") if name.endswith("late") else message
            for name, message in zip(names, messages, strict=True)
            if name != "lose"
        ]

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        self.calls.append(["failed", *(message.reason for message in messages)])
        if any(message.reason == "over 4" for message in messages):
            raise OSError("no mail")
        return [message.put_data("told") for message in messages]


def data_of(messages: Sequence[Message]) -> list[Any]:
    return [message.data for message in messages]


def reasons_of(done: Acknowledged) -> list[str | None]:
    return [message.reason for message in done.failed]


# As in a run


def test_a_fault_fails_its_message_for_the_reason_of_a_run(tmp_path):
    payloads = [b"1", *(fault.encode() for fault in FAULTS), b"3"]
    lake, facts = Lake(root=str(tmp_path)), ("kind", "reason", "stage")
    recorded = rows_of(lake, "obedient", handled(lake, Obedient, *payloads), "failed")
    done = test_batch(Obedient, payloads)
    assert data_of(done.successful) == [{"text": "1"}, {"text": "3"}]
    found = {f"m{failed.message_id}": failed.failure._asdict() for failed in done.failed if failed.failure}
    assert len(found) == len(FAULTS)
    assert {id_: [failure[name] for name in facts] for id_, failure in found.items()} == {
        row["message_id"]: [row[name] for name in facts] for row in recorded
    }


def in_a_run(lake: Lake, payloads: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the outcomes that a run of `Stops` writes."""
    first = handled(lake, Stops, *payloads, context=Rules())
    yield from rows_of(lake, "stops", first, "outcomes")
    for batcher in ("typed", "plain"):
        done = returned(batching(lake, Stops, first, batcher, context=Rules())(0))
        yield from rows_of(lake, "stops", done, "outcomes")


def test_actions_are_the_same_as_in_a_run(tmp_path):
    names = ["", "over", "misfit", "now", "not now", "late", "not late", "raise", "lose"]
    payloads = [f"{batcher} {name}".encode() for name in names for batcher in ("lake", "typed", "plain", "nowhere")]
    actions = {row["message_id"]: row["action"] for row in in_a_run(Lake(root=str(tmp_path)), payloads)}
    done = test_batch(Stops, payloads)
    assert done.actions == [actions[f"m{number}"] for number in range(len(payloads))]
    assert {"ack", "noop", "nack:5"} == set(done.actions)
    assert len(done.successful) + len(done.failed) == len(payloads)


# Callbacks


def test_every_callback_is_called_as_in_a_run_and_batches_get_what_crossed():
    stops = Stops()

    done = test_batch(stops, [" lake a", b"typed b", "plain c", "lake over", "typed late"])

    assert stops.calls == [
        ["prepare", b"lake a", b"typed b"],
        ["prepare", b"plain c", b"lake over"],
        ["prepare", b"typed late"],
        ["failed", "over 3"],
        ["typed", Stop(name="b"), Stop(name="late")],
        ["failed", "too late"],
        ["plain", {"name": "c", "at": [1, 2]}],
    ]
    assert data_of(done.successful) == [{"name": "a"}, Stop(name="b"), {"name": "c", "at": [1, 2]}]
    assert reasons_of(done) == ["over 3", "too late"]
    assert data_of(done.failed) == ["told", "told"], "as handle_failed left them"
    assert [(info.batcher, info.size, info.trigger) for info in done.batches] == [
        ("typed", 2, "size"),
        ("plain", 1, "timeout"),
    ]


def test_a_message_alone_is_delivered_at_once():
    done = test_message(Stops, "typed a")
    (message,), (info,) = done.successful, done.batches
    assert (message.status, message.batch_mode) == ("ok", "flush")
    assert (info.size, info.trigger) == (1, "flush")


def test_batches_are_filled_or_each_message_is_delivered_at_once():
    payloads = ["typed a", "typed b", "typed c"]
    assert [info.size for info in test_batch(Stops, payloads).batches] == [2, 1]
    assert [info.size for info in test_batch(Stops, payloads, "flush").batches] == [1, 1, 1]
    triggers = [info.trigger for info in test_batch(Stops, ["plain a", "plain now", "plain b"]).batches]
    assert triggers == ["flush", "timeout"], "as in a run that pulls"


def test_a_failure_handler_that_raises_is_in_the_notes():
    done = test_message(Stops, "lake over", context={"limit": 4})
    assert reasons_of(done) == ["over 4"]
    assert done.notes["handle_failed_errors"] == 1
    assert "handle_failed: OSError: no mail" in done.notes["reasons"]


def test_without_messages_the_result_is_empty_and_the_acknowledger_is_not_called():
    assert test_batch(Stops, [], acknowledger=lambda *_: pytest.fail("called")) == Acknowledged()


# Arguments


class Seeing(Pipeline):
    """Puts the properties of a message as its data."""

    name = "seeing"
    producers = {"east": Producer(source="east_queue"), "west": Producer(source="west_queue")}

    def handle_message(self, message: Message, context: Any) -> Message:
        return message.put((message.data, message.metadata, message.attempt, message.message_id))


def test_metadata_are_for_all_or_for_each():
    both, each = {"to": "JFK"}, [{"to": "JFK"}, None, {"to": "LGA"}]
    assert [data[1] for data in data_of(test_batch(Seeing, ["a", "b"], metadata=both).successful)] == [both, both]
    told = test_batch(Seeing, ["a", "b", "c"], metadata=each)
    assert [data[1] for data in data_of(told.successful)] == [{"to": "JFK"}, {}, {"to": "LGA"}]
    assert data_of(test_message(Seeing, "a", both).successful)[0][1] == both
    assert data_of(test_message(Seeing, "a").successful)[0][1] == {}


def test_payloads_are_bytes_as_a_source_delivers_them():
    (done,) = test_message(Seeing, "Zoë", attempt=3).successful
    assert done.data == ("Zoë".encode(), {}, 3, "0")


def test_callbacks_get_no_context_where_the_class_has_none():
    class Contextless(Seeing):
        name = "contextless"

        def handle_message(self, message: Message, context: Any) -> Message:
            return message.put_data([context])

    assert data_of(test_message(Contextless, "a").successful) == [[None]]


def test_fields_of_the_context_are_overridden_as_by_a_run():
    assert reasons_of(test_message(Stops, "lake over")) == ["over 3"]
    assert reasons_of(test_message(Stops, "lake over", context={"limit": 5})) == []


def test_the_acknowledger_is_called_once_with_all_messages():
    calls: list[Any] = []
    test_batch(Stops, ["lake a", "lake over", "typed b"], acknowledger=lambda *call: calls.append(call))
    ((ack_ref, successful, failed),) = calls
    assert isinstance(ack_ref, str)
    assert data_of(successful) == [{"name": "a"}, Stop(name="b")]
    assert [message.reason for message in failed] == ["over 3"]


class Channel(DummySource):
    """A source with ack actions of its own, of which one changes for a redelivery."""

    @property
    def ack_actions(self) -> AckActions:
        return {"ack": AckAction(ends=True), "drop": AckAction(ends=True), "once": AckAction(ends=False, again="drop")}


class Choosy(Seeing):
    name = "choosy"

    def handle_message(self, message: Message, context: Any) -> Message:
        return message.configure_ack(on_failure=message.data.decode()).failed("as told")


def test_the_actions_of_the_source_are_valid():
    channel = Channel(name="channel", on_failure="once")
    assert test_batch(Choosy, ["drop", "once", "nack"], source=channel).actions == ["drop", "once", "once"]
    assert test_batch(Choosy, ["drop", "once"], source=channel, redelivered=True).actions == ["drop", "drop"]
    (failed,) = test_message(Choosy, "drop").failed
    assert failed.reason is not None
    assert "is not a valid ack action of east_queue. Valid actions: 'ack', 'noop', 'nack'" in failed.reason, (
        "the source's name"
    )


class Columns(Pipeline):
    name = "columns"
    producer = Producer(source="memory")

    def handle_messages(self, messages: Any, context: Any) -> Any:
        return messages


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: test_message(Stops, {"a": 1}), r"data: must be bytes .* got dict. Use json.dumps\(...\)"),
        (lambda: test_message(Stops, None), "data: must be bytes .* got NoneType"),
        (lambda: test_batch(Stops, [b"1", bytearray(b"2")]), "data: .* got bytearray"),
        (lambda: test_batch(Stops, b"1"), "data: must be a list of payloads, got bytes"),
        (lambda: test_batch(Stops, {"a": 1}), "data: must be a list of payloads, got dict"),
        (lambda: test_batch(Stops, None), "data: must be a list of payloads, got NoneType"),
        (lambda: test_message(Stops, "a", source="queue"), "source: must be a Source, got str"),
        (lambda: test_message(Stops, "a", [{}]), "metadata: must be a dict.* got list"),
        (lambda: test_batch(Stops, ["a"], metadata=["x"]), "metadata: must be a dict.* got str"),
        (lambda: test_batch(Stops, ["a", "b"], metadata=[{}]), "metadata: .* got 1 for 2 messages"),
        (lambda: test_batch(Stops, ["a"], "bluk"), "batch_mode: must be 'bulk' or 'flush', got 'bluk'"),
        (lambda: test_message(Stops, "a", attempt=0), "attempt: must be 1 .* got 0"),
        (lambda: test_message(Stops, "a", attempt=2**40), "attempt: must be 1 .* got 1099511627776"),
        (lambda: test_message(Stops, "a", context={"limt": 1}), r"Stops.context.limt: .* Did you mean 'limit'\?"),
        (lambda: test_message(Stops, "a", contxt={}), "unexpected keyword argument 'contxt'"),
        (lambda: test_message(Pipeline, "a"), "pipeline: must be a subclass of Pipeline .* got Pipeline"),
        (lambda: test_message(Rules(), "a"), "pipeline: .* got Rules"),
        (lambda: test_message(Columns, "a"), "Columns.handle_messages: needs Spark, .* of your own Spark session"),
    ],
)
def test_an_invalid_argument_is_refused_by_name_and_value(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()


# Imports and pytest

TRIED = """
import sys
import pipeline_platform
import pipeline_platform.testing as kit
print(*{"pandas"} & sys.modules.keys())
from pipelines.flights import Flights
assert kit.test_message(Flights, "no flight").failed[0].reason
heavy = {"pyspark", "dagster", "pytest", "deltalake", "sqlalchemy", "polars"}
print(*sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
print(*(name for name in pipeline_platform.__all__ if not hasattr(pipeline_platform, name)))
"""


def test_the_kit_and_the_public_api_with_every_name_load_no_heavy_package_and_write_no_file(tmp_path):
    path = {"PYTHONPATH": ":".join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRIED], capture_output=True, text=True, cwd=tmp_path, env=path, check=True
    )
    assert done.stdout.split() == []
    assert list(tmp_path.iterdir()) == []


def test_the_acknowledger_gets_messages_that_are_acknowledged_early_once_and_at_that_time():
    calls: list[tuple[list[bytes], list[bytes]]] = []

    def acknowledge(ack_ref: str, successful: list[Message], failed: list[Message]) -> None:
        calls.append((data_of(successful), data_of(failed)))

    done = test_batch(Together, [b"1", b"bad", b"raise"], acknowledger=acknowledge)

    assert calls == [([b"1", b"raise"], [b"bad"])], "the end has no messages left"
    assert data_of(done.early) == [b"1", b"bad", b"raise"]
    assert data_of(done.failed) == [b"bad", b"raise"]
    assert done.actions == ["ack", "ack", "ack"]


def test_the_acknowledger_gets_messages_that_are_not_acknowledged_early_at_the_end():
    calls: list[int] = []
    test_batch(Early, [b"early", b"plain", b"early batch"], acknowledger=lambda _, ok, failed: calls.append(len(ok)))
    assert calls == [1, 1, 1]
