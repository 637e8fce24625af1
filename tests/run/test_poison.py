"""Poison: whatever a message does to its worker, the run ends and every other message is handled."""

import os
import signal
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, field_serializer

from pipeline_platform.model.message import BatchInfo, Message
from pipeline_platform.model.options import Batcher, Processors, Producer, TableBatcher
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.run import steps
from pipeline_platform.run.begin import begin
from pipeline_platform.run.flow import Flow
from tests.fixtures.flow import Filled, kinds, rows, run
from tests.fixtures.flow_pipelines import Word


def die(how: str) -> None:
    """End this worker, or make it useless, now or soon."""
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "close":
            os.closerange(3, 256)
        case "later":
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        case "interrupt":
            raise KeyboardInterrupt
        case "hang":
            time.sleep(10**6)


class Deadly(BaseModel):
    """Dies where it is made JSON."""

    how: str

    @field_serializer("how")
    def _die(self, how: str) -> str:
        die(how)
        return how


class Diary(BaseModel):
    """Where calls are written down."""

    path: str = ""


class Poisoned(Pipeline):
    """Dies where and how a payload says: `handle_message kill`."""

    name = "poisoned"
    producer = Producer(source="queue")
    processors = Processors(concurrency=2, max_demand=1_000)
    batchers = {"words": TableBatcher(schema=Word), "called": Batcher(batch_size=10)}
    context = Diary()

    def handle_message(self, message: Message, context: Diary) -> Message:
        """Obey."""
        if context.path:
            with Path(context.path).open("a") as diary:
                diary.write(f"{message.message_id}\n")
        where, _, how = message.data.decode().partition(" ")
        if where == "handle_message":
            die(how)
        if where == "handle_failed":
            return message.failed("as told")
        if where in ("handle_batch", "batched"):
            return message.put({"how": how, "where": where}, batcher="called")
        if where == "serialise":
            return message.put(Deadly(how=how), batcher="called")
        return message.put(Word(word=message.data.decode()), batcher="words")

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        """Obey."""
        for message in messages:
            if message.data.startswith(b"handle_failed"):
                die(message.data.decode().split()[1])
        return messages

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        """Obey."""
        for message in messages:
            if message.data["where"] == "handle_batch":
                die(message.data["how"])
        return messages


def words(flow: Flow) -> set[str]:
    return set(rows(flow, "words")["word"])


@pytest.mark.parametrize(
    "poison",
    ["handle_message kill", "handle_message close", "handle_failed kill", "serialise kill", "handle_batch kill"],
)
def test_a_message_that_ends_its_worker_fails_alone(filled_on_spark: Filled, poison: str) -> None:
    good = {f"word {number}" for number in range(50)}
    flow = filled_on_spark(Poisoned, [*(word.encode() for word in good), poison.encode(), b"handle_failed quietly"])

    run(flow)

    assert words(flow) == good
    assert kinds(flow) == {poison: "worker killed", "handle_failed quietly": "failed"}
    (stage,) = (row["stage"] for row in rows(flow, "failed").to_dicts() if row["kind"] == "worker killed")
    if not poison.endswith("close"):  # which is noticed later, wherever it came to pass
        assert stage == poison.split(maxsplit=1)[0].replace("serialise", "lake")
    assert flow.source.backlog().messages == 0, "nothing is left to fail the next run"


def test_a_message_that_ends_its_worker_after_it_returned_costs_nobody_anything(filled_on_spark: Filled) -> None:
    good = {f"word {number}" for number in range(50)}
    flow = filled_on_spark(Poisoned, [b"handle_message later", *(word.encode() for word in good), b"batched quietly"])

    run(flow)

    assert words(flow) >= good
    assert flow.source.backlog().messages == 0


class Timed(Poisoned):
    """The same, with a limit for each call."""

    name = "timed"
    processors = Processors(concurrency=2, max_demand=1_000, message_timeout=timedelta(seconds=2))
    batchers = {
        "words": TableBatcher(schema=Word),
        "called": Batcher(batch_size=10, message_timeout=timedelta(seconds=2)),
    }


def test_messages_that_hang_fail_alone_and_the_run_ends(filled: Filled) -> None:
    good = {f"word {number}" for number in range(50)}
    bad = [b"handle_message hang", b"handle_failed hang", b"handle_batch hang"]
    flow = filled(Timed, [*(word.encode() for word in good), *bad])

    run(flow)

    assert words(flow) == good
    assert kinds(flow) == {payload.decode(): "timeout" for payload in bad}
    assert flow.source.backlog().messages == 0


@pytest.mark.parametrize("poison", ["handle_message interrupt", "handle_batch interrupt", "serialise interrupt"])
def test_a_keyboard_interrupt_is_its_messages_failure(filled: Filled, poison: str) -> None:
    flow = filled(Poisoned, [b"word", poison.encode()])

    run(flow)

    assert words(flow) == {"word"}
    assert kinds(flow) == {poison: "PydanticSerializationError" if poison.startswith("ser") else "KeyboardInterrupt"}


def test_one_poison_message_costs_what_came_before_it_one_more_try(filled: Filled, tmp_path: Path) -> None:
    payloads = [b"handle_message kill" if number == 90 else b"word %d" % number for number in range(200)]
    flow = filled(Poisoned, payloads)

    receive = begin(
        flow, origin="source", run_id="test", windows=["2026-11-21T0000"], context={"path": str(tmp_path / "diary")}
    )
    steps.receive_messages(flow, receive)
    steps.handle_messages(flow, receive)

    calls = Counter((tmp_path / "diary").read_text().split())
    assert len(calls) == 200
    killer = max(calls.values())
    assert killer == 2, "once with all others, once alone"
    assert Counter(calls.values()) == {1: 109, 2: 91}, "of its task those before it began once in vain, and no other"


# The fast lane


class Numbers(BaseModel):
    """A number."""

    number: int


class Casting(Pipeline):
    """Makes numbers of texts, and stops at one that is no number."""

    name = "casting"
    producer = Producer(source="queue")
    batchers = {"numbers": TableBatcher(schema=Numbers)}

    def handle_messages(self, messages: Any, context: Any) -> Any:
        """Cast."""
        from pyspark.sql import functions as f

        return messages.withColumns({"number": f.col("data").cast("string").cast("long"), "batcher": f.lit("numbers")})

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        """Die of one."""
        for message in messages:
            if message.data == b"kill":
                os.kill(os.getpid(), signal.SIGKILL)
        return messages


def test_one_value_that_cannot_be_cast_fails_alone(filled: Filled, capfd: pytest.CaptureFixture[str]) -> None:
    flow = filled(Casting, [b"7", b"seven"])

    run(flow)

    assert rows(flow, "numbers")["number"].to_list() == [7]
    (failure,) = rows(flow, "failed").to_dicts()
    assert (failure["data"], failure["kind"], failure["stage"]) == (b"seven", "CAST_INVALID_INPUT", "handle_messages")
    assert "try_cast" in failure["reason"]
    assert "seven" not in failure["reason"] + capfd.readouterr().err, "reasons and logs are shown to many"
    assert flow.source.backlog().messages == 0


def _odd(data: bytes) -> int:
    if (number := int(data)) % 2:
        return number
    raise ValueError(f"{number} is even")


class Odd(Casting):
    """Calls a function of this file, which Spark's workers import from the home of the deployment."""

    name = "odd"

    def handle_messages(self, messages: Any, context: Any) -> Any:
        """Cast in Python."""
        from pyspark.sql import functions as f

        return messages.withColumns({"number": f.udf(_odd, "long")("data"), "batcher": f.lit("numbers")})


@pytest.mark.faults
def test_a_row_that_a_python_function_of_the_query_raises_at_fails_alone(filled: Filled) -> None:
    flow = filled(Odd, [b"7", b"8"])

    run(flow)

    assert rows(flow, "numbers")["number"].to_list() == [7]
    (failure,) = rows(flow, "failed").to_dicts()
    assert (failure["data"], failure["kind"], failure["reason"]) == (b"8", "TaskError", "ValueError: 8 is even")


@pytest.mark.faults
def test_many_values_that_cannot_be_cast_fail_and_cost_no_other(filled: Filled) -> None:
    flow = filled(Casting, [b"x0", b"1", b"x2", b"3"])

    run(flow)

    assert sorted(rows(flow, "numbers")["number"]) == [1, 3]
    assert set(kinds(flow)) == {"x0", "x2"}


@pytest.mark.faults
def test_a_failed_row_of_the_fast_lane_that_ends_its_worker_fails_alone(filled: Filled) -> None:
    flow = filled(Casting, [b"1", b"kill", b"no", b"2"])

    run(flow)

    assert sorted(rows(flow, "numbers")["number"]) == [1, 2]
    assert set(kinds(flow)) == {"kill", "no"}


@pytest.mark.parametrize(
    ("query", "said"),
    [
        (lambda messages: messages.select("nothing"), "nothing"),
        (lambda messages: messages.withColumn("number", 7), "should be Column"),
    ],
)
def test_a_query_that_is_wrong_by_itself_fails_the_run(
    filled: Filled, monkeypatch: pytest.MonkeyPatch, query: Any, said: str
) -> None:
    monkeypatch.setattr(Casting, "handle_messages", lambda self, messages, context: query(messages))
    flow = filled(Casting, [b"1"])

    with pytest.raises(Exception, match=said):
        run(flow)

    assert not flow.tables["outcomes"].files(flow.tables["outcomes"].open())


# Size

LARGE = 100 * 2**20


class Gathering(Poisoned):
    """All to one batch."""

    name = "gathering"
    batchers = {"called": Batcher(batch_size=10)}
    largest: list[int] = []

    def handle_message(self, message: Message, context: Any) -> Message:
        """To the batch."""
        return message.put({"length": len(message.data)}, batcher="called")

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        """Nothing outside."""
        return messages


class GatheringMore(Gathering):
    """The same, for larger ones."""

    name = "gathering_more"
    processors = Processors(max_message_bytes=128 * 2**20)

    def handle_message(self, message: Message, context: Any) -> Message:
        """As it came."""
        return message.put_batcher("called")


def test_a_message_that_is_too_large_fails_alone_with_its_payload(filled: Filled) -> None:
    flow = filled(Gathering, [b"small", b"x" * LARGE, b"small"])

    run(flow)

    (failure,) = rows(flow, "failed").to_dicts()
    assert (failure["kind"], failure["stage"], len(failure["data"])) == ("too large", "receive_messages", LARGE)
    assert failure["reason"] == "its payload has 104,857,600 bytes, and processors.max_message_bytes allows 16,777,216"
    assert rows(flow, "called").height == 2


@pytest.mark.faults
def test_messages_of_a_hundred_megabytes_do_not_end_a_spark_that_others_share(filled: Filled) -> None:
    """Its Java has 1 GB: payloads never go through it."""
    flow = filled(GatheringMore, [b"x" * LARGE, b"small", b"y" * LARGE, b"z" * LARGE])

    run(flow)

    assert rows(flow, "called").height == 4
    assert rows(flow, "called")["batch_id"].n_unique() == 4, "a batch has 128 MB of payloads and data at the most"


@pytest.mark.faults
def test_a_message_that_is_too_large_for_the_fast_lane_fails_alone(filled: Filled) -> None:
    flow = filled(Casting, [b"1", b"2" * (16 * 2**20 + 1), b"3"])

    run(flow)

    assert sorted(rows(flow, "numbers")["number"]) == [1, 3]
    assert rows(flow, "failed")["kind"].to_list() == ["too large"]
