"""Rescue: messages that `handle_failed` returns as ok continue as if they had not failed, with the option `rescue`."""

from typing import Any

import pytest
from pydantic import BaseModel

from pipeline_platform import Batcher, Message, Processors, TableBatcher
from pipeline_platform.model.failure import RunError
from pipeline_platform.tasks.record.step import receive_table
from tests.fixtures.obedient import Obedient
from tests.fixtures.small_lake import DRIVEN_AGAIN, Keeping, Memory, Row, handled, numbered, outcomes, rows_of
from tests.tasks.test_batch import batched, staged


class Rescuing(Keeping):
    """Fails messages as their payloads say, and rescues those with `back`."""

    name = "rescuing"
    processors = Processors(chunk_size=3, rescue=True)
    batchers = {"kept": TableBatcher(schema=Row), "called": Batcher(rescue=True)}
    seen: list[str | None] = []

    def handle_message(self, message: Message, context: Any) -> Message:
        text = message.data.decode()
        put = message.put({"text": text}, batcher="called" if "call" in text else "kept", batch_key=text[0])
        if "misfit" in text:
            return put.put_data({"txt": text})
        if "nowhere" in text:
            return put.put_batcher("nowhere")
        if "kill" in text:
            Obedient().handle_message(message.put_data(b"kill"), context)
        return put.failed("as told") if "fail" in text else put

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        self.seen.extend(message.reason for message in messages)
        return [self._brought_back(message) for message in messages]

    def _brought_back(self, message: Message) -> Message:
        text = message.data.decode() if isinstance(message.data, bytes) else str(message.data)
        if "mend" in text:
            return message.put({"text": "mended"}, batcher="kept").rescued()
        return message.rescued() if "back" in text else message.put_data({"text": "changed"})

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: Any, context: Any) -> list[Message]:
        return [message.failed("as told") if "fail" in str(message.data) else message for message in messages]


class Unrescued(Rescuing):
    """The same without the options."""

    name = "unrescued"
    processors = Processors(chunk_size=3)
    batchers = {"kept": TableBatcher(schema=Row), "called": Batcher()}


def test_a_rescued_message_goes_to_its_batcher_with_what_was_put(lake):
    manifest = handled(lake, Rescuing, b"1", b"fail back", b"fail", b"back fail call")
    told = outcomes(lake, "rescuing", manifest)
    assert told == {"m0": "handled", "m1": "handled", "m2": "failed"}, "m3 waits for its batch"
    kept = rows_of(lake, "rescuing", manifest, "kept")
    assert [(row["text"], row["batch_key"]) for row in kept] == [("1", "1"), ("fail back", "f")]
    (waiting,) = rows_of(lake, "rescuing", manifest, receive_table("r1", "called"))
    assert (waiting["message_id"], waiting["batch_key"]) == ("m3", "b")
    assert [row["message_id"] for row in rows_of(lake, "rescuing", manifest, "failed")] == ["m2"]
    assert (manifest.totals.handled.total(), manifest.totals.failed.total(), manifest.totals.rescued) == (2, 1, 2)


def test_an_outage_of_a_registry_or_a_store_in_handle_failed_ends_the_run(lake, monkeypatch):
    def outage(*given: Any) -> None:
        raise RunError("the registry does not answer")

    monkeypatch.setattr(Rescuing, "handle_failed", outage)
    with pytest.raises(RunError):
        handled(lake, Rescuing, b"fail")


def test_without_the_option_a_rescued_message_stays_failed_and_is_counted(lake):
    manifest = handled(lake, Unrescued, b"1", b"fail back")
    assert outcomes(lake, "unrescued", manifest) == {"m0": "handled", "m1": "failed"}
    (failure,) = rows_of(lake, "unrescued", manifest, "failed")
    assert (failure["reason"], failure["stage"], failure["data"]) == ("as told", "handle_message", b"fail back")
    assert (manifest.totals.rescued, manifest.totals.not_rescued) == (0, 1)


@pytest.mark.parametrize(("payload", "kind"), [(b"misfit back", "ColumnError"), (b"nowhere back", "unknown batcher")])
def test_a_rescued_message_that_fits_no_batcher_stays_failed(lake, payload, kind):
    Rescuing.seen.clear()
    manifest = handled(lake, Rescuing, payload, b"2")
    assert outcomes(lake, "rescuing", manifest) == {"m0": "failed", "m1": "handled"}
    assert [row["kind"] for row in rows_of(lake, "rescuing", manifest, "failed")] == [kind]
    assert manifest.totals.rescued == 0
    assert len(Rescuing.seen) == 1, "handle_failed sees it once"


@pytest.mark.parametrize("payload", [b"misfit mend", b"nowhere mend", b"fail mend"])
def test_a_message_is_rescued_with_other_data_and_another_batcher(lake, payload):
    manifest = handled(lake, Rescuing, payload)
    assert outcomes(lake, "rescuing", manifest) == {"m0": "handled"}
    assert [row["text"] for row in rows_of(lake, "rescuing", manifest, "kept")] == ["mended"]
    assert rows_of(lake, "rescuing", manifest, "failed") == []


def test_what_handle_failed_changes_is_recorded_but_for_the_data(lake):
    class Renaming(Rescuing):
        name = "renaming"

        def handle_failed(self, messages, context):
            changed = [message.put({"secret": 1}, batcher="called", batch_key="new") for message in messages]
            return [message.failed("found out").configure_ack(on_failure="noop") for message in changed]

    backfill = handled(lake, Renaming, b"fail", ack_policy=DRIVEN_AGAIN)

    (failure,) = rows_of(lake, "renaming", backfill, "failed")
    assert (failure["reason"], failure["batcher"], failure["batch_key"]) == ("found out", "called", "new")
    assert failure["data"] == b"fail", "a retry needs the original payload"
    assert rows_of(lake, "renaming", backfill, "outcomes")[0]["action"] == "noop"


def test_a_rescued_message_has_its_own_ack_actions(lake):
    class Acknowledging(Rescuing):
        name = "acknowledging"

        def handle_failed(self, messages, context):
            return [message.configure_ack(on_success="noop", on_failure="nack:5").rescued() for message in messages]

    manifest = handled(lake, Acknowledging, source=Memory(deliveries_=numbered(b"fail", b"2")))

    told = {row["message_id"]: row["action"] for row in rows_of(lake, "acknowledging", manifest, "outcomes")}
    assert told == {"m0": "noop", "m1": "ack"}


def test_in_forks_a_message_is_rescued_but_not_one_that_ended_its_worker(lake):
    manifest = handled(lake, Rescuing, b"1", b"fail back", b"kill back", b"4", careful=True)
    told = outcomes(lake, "rescuing", manifest)
    assert told == {"m0": "handled", "m1": "handled", "m2": "failed", "m3": "handled"}
    (failure,) = rows_of(lake, "rescuing", manifest, "failed")
    assert (failure["kind"], failure["data"]) == ("worker killed", b"kill back")
    assert manifest.totals.not_rescued == 1


def test_a_message_that_is_larger_than_the_pipeline_takes_is_not_rescued(lake):
    class Small(Rescuing):
        name = "small"
        processors = Processors(max_message_bytes=10, rescue=True)

    manifest = handled(lake, Small, b"mend what is too large", b"fail back")

    assert outcomes(lake, "small", manifest) == {"m0": "failed", "m1": "handled"}
    (failure,) = rows_of(lake, "small", manifest, "failed")
    assert failure["kind"] == "too large"
    assert manifest.totals.not_rescued == 1


# Batches


@pytest.mark.parametrize(("pipeline", "expected"), [(Rescuing, "handled"), (Unrescued, "failed")])
def test_a_message_that_is_rescued_after_its_batch_is_handled_and_in_the_table(lake, pipeline, expected):
    batch = staged("1", "fail back", "fail")
    manifest = batched(lake, batch, pipeline=pipeline, batcher="called")
    name = pipeline.name
    assert outcomes(lake, name, manifest) == {"m0": "handled", "m1": expected, "m2": "failed"}
    table = rows_of(lake, name, manifest, "called")
    assert [row["data"] for row in table] == ['"1"', '"fail back"'][: 2 if expected == "handled" else 1]
    assert len({row["batch_id"] for row in table}) == 1
    assert manifest.totals.not_rescued == (expected == "failed")


class Stop(BaseModel):
    name: str


def test_data_that_cannot_be_decoded_for_its_batch_is_not_rescued(lake):
    class Typed(Rescuing):
        name = "typed"
        batchers = {"called": Batcher(schema=Stop, rescue=True)}

        def handle_failed(self, messages, context):
            return [message.rescued() for message in messages]

    manifest = batched(lake, staged({"name": 1}), pipeline=Typed, batcher="called")

    assert outcomes(lake, "typed", manifest) == {"m0": "failed"}
    assert manifest.totals.not_rescued == 1
