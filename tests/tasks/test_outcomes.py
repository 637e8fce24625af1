"""Outcomes: files of handled messages, and the counts for the driver."""

from typing import Any

from pydantic import BaseModel, computed_field, field_validator

from pipeline_platform import Batcher, Pipeline, Producer, TableBatcher
from tests.fixtures.small_lake import WINDOW, Keeping, Row, handled, outcomes, rows_of


def test_messages_go_to_their_batchers_with_their_keys(lake):
    class Sorting(Keeping):
        name = "sorting"
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
    (report,) = manifest.reports
    assert report.batch_keys["odd"] == {"../1": 1, "../0": 1, "../2": 1}
    assert report.handled == {WINDOW: 6}, "each window has its own counts"


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
    """A model that a JSON round trip does not preserve: aliases and a computed field."""

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


class Batching(Keeping):
    name = "batching"
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


def test_a_long_batch_key_is_cut_in_counts_and_whole_in_its_table(lake):
    class Verbose(Keeping):
        name = "verbose"

        def handle_message(self, message, context):
            return message.put_batcher("kept").put_data(Row(text="")).put_batch_key(message.data.decode() * 10_000)

    manifest = handled(lake, Verbose, b"k")

    assert manifest.totals.batch_keys["kept"] == {"k" * 200: 1}
    assert rows_of(lake, "verbose", manifest, "kept")[0]["batch_key"] == "k" * 10_000


def test_the_driver_gets_a_sample_without_payloads(lake):
    class Typed(Keeping):
        name = "typed"
        batchers = {"kept": TableBatcher(schema=Flight)}

        def handle_message(self, message, context):
            return message.put_data(Flight.model_validate_json(message.data))

        def handle_failed(self, messages, context):
            return [Flight.model_validate_json(message.data) for message in messages]

    manifest = handled(lake, Typed, *[b'{"late": "SECRET %d"}' % number for number in range(30)])

    (report,) = manifest.reports
    assert len(report.sample) == 10
    reason = "Flight: late: Input should be a valid integer, unable to parse string as an integer"
    assert report.reasons == {
        f"ValidationError: {reason}": 30,
        f"handle_failed: ValidationError: {reason}": 1,
    }, "one cause is one reason"
    assert "SECRET" not in report.to_json()
    failures = rows_of(lake, "typed", manifest, "failed")
    assert {row["reason"] for row in failures} == {reason}
    assert not any("SECRET" in row["traceback"] for row in failures)
    assert all(b"SECRET" in row["data"] for row in failures), "where it belongs"


class Flight(BaseModel):
    late: int
