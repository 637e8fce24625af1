"""Skipped messages: acknowledged, counted, and in no table of a batcher."""

from typing import Any

import polars as pl
import pytest

from pipeline_platform import Batcher, BatchInfo, Message, Pipeline, Processors, Producer, TableBatcher
from pipeline_platform.testing import test_batch as trial
from tests.fixtures.small_lake import WINDOW, Keeping, Memory, Row, handled, outcomes, rows_of


class Skipping(Keeping):
    """Skips messages in the callback that they name."""

    name = "skipping"
    batchers = {"kept": TableBatcher(schema=Row), "sent": Batcher(schema=Row, rescue=True)}
    processors = Processors(rescue=True)

    def _skip(self, here: str, message: Message) -> Message:
        return message.skip(f"in {here}") if message.data == here.encode() else message

    def transform(self, event: Message) -> Message:
        return self._skip("transform", event)

    def prepare_messages(self, messages: list[Message], context: Any) -> list[Message]:
        assert all(message.status == "ok" for message in messages)
        return [self._skip("prepare_messages", message) for message in messages]

    def handle_message(self, message: Message, context: Any) -> Message | list[Message]:
        if message.data.startswith(b"child"):
            return [message.skip("no row"), message.put(Row(text="second"), batcher="kept")]
        if message.data == b"children":
            return [
                message.put(Row(text="in handle_batch"), batcher="sent"),
                message.put(Row(text="b"), batcher="sent"),
            ]
        if message.data == b"handle_failed":
            return message.failed("no")
        skipped = self._skip("handle_message", message)
        batcher = "sent" if message.data.startswith(b"batch") else "kept"
        return skipped.put(Row(text=message.data.decode()), batcher=batcher)

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        return [message.skip("in handle_batch") if "skip" in message.data.text else message for message in messages]

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        return [message.skip("in handle_failed") for message in messages]


CALLBACKS = ("transform", "prepare_messages", "handle_message", "handle_failed")


@pytest.mark.parametrize("callback", CALLBACKS)
def test_a_skipped_message_is_decided_and_in_no_table(lake, callback):
    manifest = handled(lake, Skipping, callback.encode(), b"other")

    assert outcomes(lake, "skipping", manifest) == {"m0": "skipped", "m1": "handled"}
    assert [row["text"] for row in rows_of(lake, "skipping", manifest, "kept")] == ["other"]
    assert not manifest.of_table("failed")
    (report,) = manifest.reports
    assert (report.skipped, report.handled) == ({WINDOW: 1}, {WINDOW: 1})
    assert report.skip_reasons == {f"in {callback}": 1}


def test_a_skipped_message_keeps_its_own_ack_action(lake):
    class Later(Keeping):
        name = "later"

        def handle_message(self, message: Message, context: Any) -> Message:
            return message.configure_ack(on_success="nack:30").skip("not yet")

    manifest = handled(lake, Later, b"1", ack_policy=Memory().ack_policy)

    assert [row["action"] for row in rows_of(lake, "later", manifest, "outcomes")] == ["nack:30"]


def test_a_test_gets_skipped_messages_apart_from_the_others():
    calls = list[Any]()

    done = trial(
        Skipping, [b"transform", b"other", b"batch", b"batch skip"], acknowledger=lambda *call: calls.append(call)
    )

    assert [message.data.text for message in done.successful] == ["other", "batch"]
    assert [message.reason for message in done.skipped] == ["in transform", "in handle_batch"]
    assert done.actions == ["ack"] * 4
    assert calls == [("test", [*done.successful, *done.skipped], [])]
    assert done.notes["skip_reasons"] == {"in transform": 1, "in handle_batch": 1}


def test_a_skipped_child_has_no_row_and_its_message_is_handled(lake):
    manifest = handled(lake, Skipping, b"child")

    assert outcomes(lake, "skipping", manifest) == {"m0": "handled"}
    assert [(row["child"], row["text"]) for row in rows_of(lake, "skipping", manifest, "kept")] == [(1, "second")]


class Blocks(Pipeline):
    """Blocks with the status that the payload names."""

    name = "blocks"
    producer = Producer(source="memory")
    batchers = {"kept": TableBatcher(schema=Row)}

    def prepare_messages(self, messages: pl.DataFrame, context: Any) -> pl.DataFrame:
        return messages.with_columns(
            status=pl.when(pl.col("data").cast(pl.String) == "early").then(pl.lit("skipped")).otherwise("status")
        )

    def handle_messages(self, messages: pl.DataFrame, context: Any) -> pl.DataFrame:
        text = pl.col("data").cast(pl.String)
        return messages.with_columns(batcher=pl.lit("kept"), text=text, status=text, reason="why " + text)


def test_a_row_of_a_block_is_skipped_by_its_status(lake):
    manifest = handled(lake, Blocks, b"ok", b"skipped", b"failed", b"early", b"Skipped")

    assert outcomes(lake, "blocks", manifest) == {
        "m0": "handled",
        "m1": "skipped",
        "m2": "failed",
        "m3": "skipped",
        "m4": "failed",
    }
    assert [row["text"] for row in rows_of(lake, "blocks", manifest, "kept")] == ["ok"]
    (report,) = manifest.reports
    assert report.skip_reasons == {"why skipped": 1, "": 1}
