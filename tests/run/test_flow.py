"""Whole flows on a real Spark, from queue to tables to acknowledgement."""

import dataclasses
import time
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pipeline_platform import Batcher, BatchInfo, Message, Pipeline, Processors, Producer, telemetry
from pipeline_platform.model.options import RateLimiting
from pipeline_platform.model.pipeline import PipelineError
from pipeline_platform.run import steps
from pipeline_platform.spark.engine import TaskError
from pipeline_platform.telemetry import Event, configuration
from pipeline_platform.telemetry.exporter import Exporter
from pipeline_platform.telemetry.tracing import traceparent
from tests.fixtures.flow import begun, kinds, received, rows, run
from tests.fixtures.flow_pipelines import Blocks, Columns, Obedient, Place, Twisted
from tests.fixtures.pooled import Pooled, Splitting, Timed


def test_few_messages_are_received_without_spark(filled_on_spark):
    def refused() -> NoReturn:
        raise RuntimeError("asked for Spark")

    flow = dataclasses.replace(filled_on_spark(Obedient, (b"%d" % number for number in range(201))), session=refused)
    few, more = (begun(flow, demand=wanted) for wanted in (100, 101))

    assert steps.receive_messages(flow, few).rows("messages") == 100
    with pytest.raises(RuntimeError, match="asked for Spark"):
        steps.receive_messages(flow, more)


def test_a_failure_is_driven_again_until_it_succeeds_and_a_replay_changes_nothing(filled):
    flow = filled(Obedient, [b"one", b"raise", b"none", b"exit"])
    run(flow)
    run(flow, "failed")
    again = rows(flow, "failed")
    run(flow, "messages")
    assert sorted(again["attempt"]) == [1, 1, 1, 2, 2, 2]
    assert sorted(rows(flow, "failed")["attempt"]) == [2, 2, 2], "a replay takes the place of what came before"
    assert rows(flow, "words")["word"].to_list() == ["one"]
    assert rows(flow, "messages")["message_id"].n_unique() == rows(flow, "messages").height == 4


@pytest.mark.parametrize("pipeline", [Columns, Blocks])
def test_columns_and_blocks_route_fail_and_miss_rows_like_the_other_lane(filled_on_spark, pipeline):
    flow = filled_on_spark(pipeline, [b"one", b"drop", b"fail", b"lost", b"two", b"batch 1", b"batch 2", b"batch 3"])
    flow.control.set_rate_limiting(pipeline.name, RateLimiting(allowed_messages=8, interval=timedelta(days=1)))

    run(flow)
    assert sorted(rows(flow, "words")["word"]) == ["one", "two"]
    assert sorted(rows(flow, "batches")["word"]) == ["batch 1", "batch 2", "batch 3"]
    reasons = rows(flow, "failed").sort("message_id")["reason"].to_list()
    assert reasons == [
        "handle_messages did not return it", "as told", "'nowhere' is not a batcher. Batchers: ['batches', 'words']",
    ]  # fmt: skip
    assert flow.source.backlog().messages == 0


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("one too many", "returned 4 rows for 3 messages"),
        ("one for another", "more than once"),
    ],
)
def test_the_spark_lane_refuses_rows_that_are_not_those_it_gave(filled_on_spark, fault, said):
    """No message is decided: no message is twice in a table, and none is lost."""
    flow = filled_on_spark(Twisted, [fault.encode(), b"two", b"three"])
    with pytest.raises((PipelineError, TaskError), match=said):
        run(flow)
    assert rows(flow, "words").height == rows(flow, "outcomes").height == 0


def test_the_spark_lane_may_use_the_names_of_a_delivery_for_its_own(filled_on_spark):
    """A row is identified by its position, so the delivered payload cannot be overwritten."""
    flow = filled_on_spark(Twisted, [b"message_id ack_id data window", b"two"])
    run(flow)
    assert sorted(rows(flow, "words")["message_id"]) == ["1", "2"]
    assert flow.source.backlog().messages == 0


@pytest.mark.parametrize("place", ["filled_locally", "filled_on_spark"])
def test_tasks_that_fork_in_workers_with_threads_of_a_library_do_not_hang(request, place):
    filled_there = request.getfixturevalue(place)
    words = {f"word {number}" for number in range(40)}
    for pipeline, bad in (Pooled, []), (Timed, ["kill"]), (Pooled, ["kill"]):
        flow = filled_there(pipeline, [word.encode() for word in (*words, *bad)])
        run(flow)
        assert set(rows(flow, "kept")["text"]) == words
        assert kinds(flow) == dict.fromkeys(bad, "worker killed")
    run(flow := filled_there(Splitting, [word.encode() for word in words]))
    assert set(rows(flow, "outcomes")["outcome"]) == {"handled"}


def note_event(event: Event) -> None:
    """Print text, which the manifest returns."""
    if event.phase != "start":
        print(f"told of {event.name} {event.phase} of {event.fields['messages']} in task {event.fields['task']}")  # noqa: T201


class Traced(Pipeline):
    """Record the current span, and emit chunks and batches."""

    name = "traced"
    producer = Producer(source="queue")
    processors = Processors(concurrency=2, threads=2)
    batchers = {"all": Batcher(batch_size=4)}
    context = Place()
    telemetry = {"chunk": note_event, "batch": note_event, "handle_failed": note_event}

    def handle_message(self, message: Message, context: Place) -> Message:
        (Path(context.folder) / f"handle-{message.message_id}").write_text(traceparent())
        if message.data == b"raise":
            raise ValueError("as told")
        return message.put_batcher("all")

    def handle_batch(
        self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Place
    ) -> list[Message]:
        (Path(context.folder) / f"batcher-{batch_info.batch_id}").write_text(traceparent())
        return messages


@pytest.fixture
def spans():
    exporter, tracers = InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry.attach(configuration.NAME, configuration.EXPORTED, Exporter(tracers))
    yield exporter
    telemetry.detach(configuration.NAME)


@pytest.mark.parametrize("place", ["filled_locally", "filled_on_spark"])
def test_workers_are_in_the_span_of_their_step_and_each_task_is_one(request, place, spans, tmp_path):
    flow, folder = request.getfixturevalue(place)(Traced, [b"1", b"2", b"3", b"raise"]), tmp_path / "seen"
    folder.mkdir()
    before = time.time_ns()
    receive = received(flow, context={"folder": str(folder)})
    manifests = [steps.handle_messages(flow, receive), *steps.batch_messages(flow, receive).values()]

    by_name: dict[str, list[Any]] = defaultdict(list)
    for span in spans.get_finished_spans():
        by_name[span.name].append(span)
    ids = {}
    for name in ("handle", "batcher"):
        (span,) = by_name[name]
        ids[name] = span.context.span_id
        seen = {tuple(path.read_text().split("-")[1:3]) for path in folder.glob(f"{name}-*")}
        assert seen == {(f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}")}
    tasks = {name: [task for task in by_name["task"] if task.parent.span_id == ids[name]] for name in ids}
    assert sorted(task.attributes["pipeline_platform.task"] for task in tasks["handle"]) == [0, 1]
    assert sum(task.attributes.get("pipeline_platform.failed", 0) for task in tasks["handle"]) == 1
    assert all(before < task.start_time < task.end_time < time.time_ns() for task in by_name["task"])
    outputs = [output for manifest in manifests for output in manifest.totals.output]
    assert sorted(line for output in outputs for line in output.text.splitlines()) == [
        "told of batch stop of 3 in task 0",
        "told of chunk stop of 2 in task 0",
        "told of chunk stop of 2 in task 1",
        "told of handle_failed stop of 1 in task 1",
    ]
