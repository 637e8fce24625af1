"""What Spark's tasks are told of the trace of their run, and what comes back of them, on a real Spark."""

import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel

from pipeline_platform import telemetry
from pipeline_platform.model.message import BatchInfo, Message
from pipeline_platform.model.options import Batcher, Processors, Producer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.run import steps
from pipeline_platform.run.begin import begin
from pipeline_platform.telemetry import Event, configuration
from pipeline_platform.telemetry.exporter import Exporter
from pipeline_platform.telemetry.tracing import traceparent
from tests.fixtures.flow import WINDOW, Filled


class Notes(BaseModel):
    """Where workers write what they see."""

    folder: str = ""


def note_event(event: Event) -> None:
    """Print, which comes home with the manifest."""
    if event.phase != "start":
        print(f"told of {event.name} {event.phase} of {event.fields['messages']} in task {event.fields['task']}")  # noqa: T201


class Traced(Pipeline):
    """Writes down which span it is in, and tells of its chunks and batches."""

    name = "traced"
    producer = Producer(source="queue")
    processors = Processors(concurrency=2, threads=2)
    batchers = {"all": Batcher(batch_size=4)}
    context = Notes()
    telemetry = {"chunk": note_event, "batch": note_event, "handle_failed": note_event}

    def handle_message(self, message: Message, context: Notes) -> Message:
        """Fail one."""
        (Path(context.folder) / f"handle-{message.message_id}").write_text(traceparent())
        if message.data == b"raise":
            raise ValueError("told to")
        return message.put_batcher("all")

    def handle_batch(
        self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Notes
    ) -> list[Message]:
        """Nothing outside."""
        (Path(context.folder) / f"batcher-{batch_info.batch_id}").write_text(traceparent())
        return messages


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter, tracers = InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry.attach(configuration.NAME, configuration.EXPORTED, Exporter(tracers))
    yield exporter
    telemetry.detach(configuration.NAME)


def test_workers_are_in_the_span_of_their_step_and_each_task_is_one(
    filled_on_spark: Filled, spans: InMemorySpanExporter, tmp_path: Path
) -> None:
    flow, folder = filled_on_spark(Traced, [b"1", b"2", b"3", b"raise"]), tmp_path / "seen"
    folder.mkdir()
    before = time.time_ns()
    receive = begin(flow, origin="source", run_id="test", windows=[WINDOW], context={"folder": str(folder)})
    steps.receive_messages(flow, receive)
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
    said = [notes.get("said", "") for manifest in manifests for notes in manifest.notes]
    assert sorted(line for text in said for line in text.splitlines()) == [
        "told of batch stop of 3 in task 0",
        "told of chunk stop of 2 in task 0",
        "told of chunk stop of 2 in task 1",
        "told of handle_failed stop of 1 in task 1",
    ]
