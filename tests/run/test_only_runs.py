"""`Producer(only=...)` in whole flows: acknowledgement, retries, replays and the Spark lane."""

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pipeline_platform import Message, Pipeline, Processors, Producer, RateLimiting, TableBatcher
from pipeline_platform.cli.lake.deliveries import deliveries_of
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.run.flow import Flow
from tests.fixtures.faults import fault
from tests.fixtures.flow import kinds, rows, run
from tests.fixtures.flow_pipelines import Place
from tests.fixtures.small_lake import Row, Shared

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

HEARD = Shared(0)


def wanted(message: Message) -> bool:
    """Return whether a payload is wanted; some payloads make the predicate misbehave."""
    fault(message.data.decode())
    return not message.data.startswith(b"other")


class Wanted(Pipeline):
    """Stores wanted messages, and counts the messages that `acknowledge` gets."""

    name = "wanted"
    producer = Producer(
        source="queue", only=wanted, rate_limiting=RateLimiting(allowed_messages=2, interval=timedelta(days=1))
    )
    processors = Processors(concurrency=1, message_timeout=timedelta(seconds=0.5))
    batchers = {"kept": TableBatcher(schema=Row)}

    def handle_message(self, message: Message, context: Any) -> Message:
        if message.data.startswith(b"skip"):
            return message.skip("by the callback")
        return message.put(Row(text=message.data.decode()), batcher="kept")

    def acknowledge(self, ack_ref: str, successful: list[Message], failed: list[Message], context: Any) -> None:
        HEARD.value += len(successful) + 100 * len(failed)


class InOrder(Wanted):
    """The same in order, by a function of the message."""

    partition_by = staticmethod(lambda message: 1)


class BySource(Wanted):
    """The same in the order of the source."""

    partition_by = "source"


class Narrow(Wanted):
    """The same with another predicate."""

    producer = Producer(source="queue", only=lambda message: message.data.startswith(b"other"))


class Columns(Pipeline):
    """The same in the Spark lane."""

    name = "wanted"
    producer = Producer(source="queue", only=wanted)
    processors = Wanted.processors
    batchers = Wanted.batchers

    def handle_messages(self, messages: "DataFrame", context: Any) -> "DataFrame":
        from pyspark.sql import functions as f

        text = f.col("data").cast("string")
        number = f.when(text == "seven", text.cast("long")).otherwise(f.lit(0))
        return messages.withColumns({"text": f.concat(text, number.cast("string")), "batcher": f.lit("kept")})

    context = Place()

    def acknowledge(self, ack_ref: str, successful: list[Message], failed: list[Message], context: Place) -> None:
        """Write the payloads to a file per call: the workers of Spark share no memory with the test."""
        heard = Path(context.folder, f"heard-{os.urandom(8).hex()}")
        heard.write_bytes(b"\n".join(message.data for message in [*successful, *failed]))


def as_(flow: Flow, pipeline: type[Pipeline]) -> Flow:
    """Return the flow after an edit of its class."""
    return replace(flow, producer=BoundProducer(pipeline))


def ends(flow: Flow) -> dict[str, str]:
    """Return the outcomes by payload."""
    payloads = dict(rows(flow, "messages").select("message_id", "data").rows())
    return {payloads[id_].decode(): end for id_, end in rows(flow, "outcomes").select("message_id", "outcome").rows()}


@pytest.fixture(autouse=True)
def heard() -> Shared:
    HEARD.value = 0
    return HEARD


@pytest.mark.parametrize("pipeline", [Wanted, InOrder, BySource])
def test_filtered_messages_are_acknowledged_and_reach_no_callback(filled, heard, pipeline):
    flow = filled(pipeline, [b"other 1", b"a", b"other 2", b"skip", b"other 3"])

    run(flow, demand=5)

    skipped = dict.fromkeys(["other 1", "other 2", "skip", "other 3"], "skipped")
    assert ends(flow) == {**skipped, "a": "handled"}, "the rate limit allows two messages"
    assert heard.value == 2, "`acknowledge` gets messages that a callback skipped, and no filtered messages"
    assert flow.source.backlog().messages == 0
    (delivery,) = deliveries_of(flow, rows(flow, "messages")["message_id"][0])
    assert (delivery.outcome, delivery.action, delivery.rows) == ("skipped", "ack", [])


def test_a_predicate_that_crashes_or_hangs_fails_only_its_messages(filled, heard):
    flow = filled(InOrder, [b"other", b"kill", b"a", b"hang", b"raise"])

    run(flow, demand=5)

    assert kinds(flow) == {"kill": "worker killed", "hang": "timeout", "raise": "ValueError"}
    assert set(rows(flow, "failed")["stage"]) == {"only"}
    assert (ends(flow)["other"], ends(flow)["a"]) == ("skipped", "handled")
    assert heard.value == 301


def test_a_retry_evaluates_a_predicate_that_failed_and_no_other(filled):
    class Failing(Wanted):
        def handle_message(self, message: Message, context: Any) -> Message:
            raise OSError("away")

    flow = filled(Failing, [b"raise", b"a"])
    run(flow)

    run(as_(flow, Narrow), "failed")

    retried = rows(flow, "outcomes").filter(attempt=2)
    payloads = dict(rows(flow, "messages").select("message_id", "data").rows())
    found = {payloads[id_]: end for id_, end in retried.select("message_id", "outcome").rows()}
    assert found == {b"raise": "skipped", b"a": "handled"}
    assert flow.source is not None
    assert rows(flow, "failed").filter(attempt=2)["state"].to_list() == ["closed", "closed"]


def test_a_replay_evaluates_the_predicate_of_the_current_class(filled):
    flow = filled(Wanted, [b"other", b"a"])
    run(flow)
    assert rows(flow, "kept")["text"].to_list() == ["a"]

    run(as_(flow, Narrow), "messages")

    assert ends(flow) == {"other": "handled", "a": "skipped"}
    assert rows(flow, "kept")["text"].to_list() == ["other"]


def test_the_query_of_the_spark_lane_sees_no_filtered_message_and_a_value_that_it_cannot_cast_fails_alone(
    filled_on_spark, tmp_path, capfd
):
    flow = filled_on_spark(Columns, [b"other 1", b"a", b"kill", b"other 2", b"seven"])

    run(flow, context={"folder": str(tmp_path)})

    faults = {"kill": "worker killed", "seven": "CAST_INVALID_INPUT"}
    assert kinds(flow) == faults
    (failure,) = rows(flow, "failed").filter(data=b"seven").to_dicts()
    assert failure["stage"] == "handle_messages"
    assert "try_cast" in failure["reason"]
    assert "seven" not in failure["reason"] + capfd.readouterr().err, "reasons and logs are shown to many"
    assert rows(flow, "kept")["text"].to_list() == ["a0"]
    assert ends(flow) == {
        **dict.fromkeys(faults, "failed"),
        **dict.fromkeys(["other 1", "other 2"], "skipped"),
        "a": "handled",
    }
    heard = [payload for file in tmp_path.glob("heard-*") for payload in file.read_bytes().split(b"\n")]
    assert sorted(heard) == [b"a", b"kill", b"seven"]
    assert flow.source.backlog().messages == 0


def test_a_receive_of_filtered_messages_only_is_decided_in_the_spark_lane(filled_on_spark, tmp_path):
    flow = filled_on_spark(Columns, [b"other 1", b"other 2"])

    run(flow, context={"folder": str(tmp_path)})

    assert set(ends(flow).values()) == {"skipped"}
    assert flow.source.backlog().messages == 0
