"""`Producer(only=...)`: messages that a pipeline does not handle are skipped before any other callback."""

from datetime import timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from pipeline_platform import Batcher, BatchInfo, Message, Pipeline, Processors, Producer, TableBatcher
from pipeline_platform.testing import DummySource
from pipeline_platform.testing import test_batch as trial
from tests.fixtures.faults import fault
from tests.fixtures.small_lake import WINDOW, Memory, Row, handled, numbered, outcomes, rows_of


def wanted(message: Message) -> Any:
    """Return whether a payload is wanted; some payloads make the predicate misbehave."""
    odd = {
        b"none": None,
        b"one": 1,
    }
    fault(message.data.decode())
    return odd[message.data] if message.data in odd else not message.data.startswith(b"other")


FILTERED = Producer(source="memory", only=wanted)


class Rows(Pipeline):
    """Fails if a callback gets a message that is not wanted."""

    name = "rows"
    producer = FILTERED
    processors = Processors(message_timeout=timedelta(seconds=0.5))
    batchers = {"kept": TableBatcher(schema=Row), "sent": Batcher(schema=Row)}

    def transform(self, event: Message) -> Message:
        assert wanted(event)
        return event

    def prepare_messages(self, messages: list[Message], context: Any) -> list[Message]:
        assert all(map(wanted, messages))
        return messages

    def handle_message(self, message: Message, context: Any) -> Message:
        batcher = "sent" if message.data.startswith(b"batch") else "kept"
        return message.put(Row(text=message.data.decode()), batcher=batcher)

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        return messages

    def acknowledge(self, ack_ref: str, successful: list[Message], failed: list[Message], context: Any) -> None:
        assert all(map(wanted, successful))


class InOrder(Rows):
    """The same in order, by a function."""

    name = "in_order"
    partition_by = staticmethod(lambda message: 1)


class BySource(Rows):
    """The same in the order of the source."""

    name = "by_source"
    partition_by = "source"


class InThreads(Rows):
    """The same in threads."""

    name = "in_threads"
    processors = Processors(threads=3, message_timeout=timedelta(seconds=0.5))


class Blocks(Pipeline):
    """The same in blocks of Arrow: a test before may have used Polars, which is not fork-safe then."""

    name = "blocks"
    producer = FILTERED
    processors = Processors(message_timeout=timedelta(seconds=0.5))
    batchers = {"kept": TableBatcher(schema=Row)}

    def prepare_messages(self, messages: pa.Table, context: Any) -> pa.Table:
        assert not pc.any(pc.starts_with(messages["data"], b"other")).as_py()
        return messages

    def handle_messages(self, messages: pa.Table, context: Any) -> pa.Table:
        assert not pc.any(pc.starts_with(messages["data"], b"other")).as_py()
        text = messages["data"].cast(pa.string())
        return messages.set_column(
            messages.schema.get_field_index("batcher"), "batcher", pa.repeat("kept", messages.num_rows)
        ).append_column("text", text)


@pytest.mark.parametrize("pipeline", [Rows, InThreads, Blocks])
def test_a_message_that_is_not_wanted_is_skipped_before_all_callbacks(lake, pipeline):
    manifest = handled(lake, pipeline, b"other 1", b"a", b"other 2", b"b")

    name = pipeline.name
    assert outcomes(lake, name, manifest) == {"m0": "skipped", "m1": "handled", "m2": "skipped", "m3": "handled"}
    assert [row["text"] for row in rows_of(lake, name, manifest, "kept")] == ["a", "b"]
    (report,) = manifest.reports
    assert (report.skipped, report.skip_reasons) == ({WINDOW: 2}, {"filtered by `only`": 2})
    assert not manifest.of_table("failed")


@pytest.mark.parametrize("pipeline", [Rows, InThreads, Blocks])
def test_a_predicate_that_misbehaves_fails_only_its_message(lake, pipeline):
    kinds = {b"raise": "ValueError", b"none": "TypeError", b"one": "TypeError", b"kill": "worker killed"}
    kinds[b"hang"] = "timeout"
    manifest = handled(lake, pipeline, b"other", b"a", *kinds, b"b", careful=True)

    ends = ["skipped", "handled", *["failed"] * 5, "handled"]
    assert outcomes(lake, pipeline.name, manifest) == {f"m{place}": end for place, end in enumerate(ends)}
    failures = rows_of(lake, pipeline.name, manifest, "failed")
    assert {row["data"]: (row["kind"], row["stage"]) for row in failures} == {
        odd: (kind, "only") for odd, kind in kinds.items()
    }


class Two(Rows):
    """Two producers, one of which has a predicate."""

    name = "two"
    transform = Pipeline.transform
    prepare_messages = Pipeline.prepare_messages
    acknowledge = Pipeline.acknowledge
    producer = None  # type: ignore[assignment]
    producers = {"all": Producer(source="everything"), "some": FILTERED}


@pytest.mark.parametrize(("source", "outcome"), [("memory", "skipped"), ("everything", "handled")])
def test_the_predicate_of_a_producer_applies_to_its_source(lake, source, outcome):
    manifest = handled(lake, Two, source=Memory(name=source, deliveries_=numbered(b"other")))

    assert outcomes(lake, "two", manifest) == {"m0": outcome}


@pytest.mark.parametrize("pipeline", [Rows, InOrder, BySource, InThreads, Blocks])
def test_a_test_gets_filtered_messages_among_the_skipped(pipeline):
    done = trial(pipeline, [b"a", b"other", b"raise"])

    assert [message.reason for message in done.skipped] == ["filtered by `only`"]
    assert len(done.successful) == 1
    assert [message.failure.stage for message in done.failed] == ["only"]
    assert done.actions == ["ack"] * 3


def test_a_test_of_one_of_several_producers_names_its_source():
    assert trial(Two, [b"other"]).skipped == []
    assert len(trial(Two, [b"other"], source=DummySource(name="memory")).skipped) == 1


def test_the_predicate_sees_the_metadata():
    class ByType(Rows):
        name = "by_type"
        producer = Producer(source="memory", only=lambda message: message.metadata.get("type") == "order")

    done = trial(ByType, [b"a", b"b"], metadata=[{"type": "order"}, None])

    assert (len(done.successful), len(done.skipped)) == (1, 1)
