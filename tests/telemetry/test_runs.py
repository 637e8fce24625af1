"""Events of runs and sensors, for functions and for OpenTelemetry."""

import dataclasses
import logging
import sys
from collections import Counter
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pipeline_platform import telemetry
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.run import steps
from pipeline_platform.run.begin import begin
from pipeline_platform.source.contract import SourceError
from pipeline_platform.telemetry import EVENTS, configuration
from pipeline_platform.telemetry.exporter import Exporter
from tests.fixtures.flow import WINDOW, run
from tests.fixtures.flow_pipelines import Obedient
from tests.fixtures.telemetry import named

PAYLOADS = [b"one", b"two", b"raise", b"batch a", b"batch a", b"batch few"]


class Exported:
    """Spans and metrics that OpenTelemetry got."""

    def __init__(self) -> None:
        self._spans, self._metrics = InMemorySpanExporter(), InMemoryMetricReader()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        exporter = Exporter(tracers, MeterProvider([self._metrics]))
        telemetry.attach(configuration.NAME, configuration.EXPORTED, exporter)

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._spans.get_finished_spans()

    def by_parent(self) -> Counter[tuple[str, str]]:
        """Return the number of spans by name and name of the parent."""
        names = {span.context.span_id: span.name for span in self.spans}
        return Counter((span.name, names[span.parent.span_id] if span.parent else "") for span in self.spans)

    def metrics(self) -> dict[str, Any]:
        """Return sums by name, and counts of histograms by event."""
        data = self._metrics.get_metrics_data()
        found: Counter[str] = Counter()
        for metric in data.resource_metrics[0].scope_metrics[0].metrics:
            for point in metric.data.data_points:
                event = f" {point.attributes['event']}" if "event" in point.attributes else ""
                found[metric.name.removeprefix("pipeline_platform.") + event] += (
                    getattr(point, "count", 0) or point.value
                )
        return dict(found)


@pytest.fixture(autouse=True)
def as_in_a_new_process():
    def forget() -> None:
        telemetry.detach(configuration.NAME)
        configuration._attach.cache_clear()
        configuration._is_set_up.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture
def exported():
    return Exported()


def test_a_run_emits_each_step_with_the_documented_fields(here, heard):
    run(here(Obedient, PAYLOADS))

    for event in heard:
        expected = {*EVENTS[event.name].start, *(EVENTS[event.name].stop if event.phase == "stop" else ())}
        if event.phase != "exception":
            assert event.fields.keys() == expected, event
    steps_told = [event.name for event in heard if event.phase != "start" and event.name not in ("chunk", "message")]
    assert steps_told == [
        "begin", "receive", "handle_failed", "handle", "batch", "batch", "handle_failed", "batcher", "decide",
        "publish", "acknowledge",
    ]  # fmt: skip
    figures = {event.name: event.fields for event in heard if event.phase == "stop"}
    assert figures["receive"]["demand"] == 2_000
    assert figures["receive"]["received"] == 6
    assert {name: figures["handle"][name] for name in ("handled", "failed", "staged")} == {
        "handled": 2, "failed": 1, "staged": 3
    }  # fmt: skip
    assert {name: figures["batcher"][name] for name in ("handled", "failed", "batches")} == {
        "handled": 2, "failed": 1, "batches": 2
    }  # fmt: skip
    assert figures["acknowledge"]["acknowledged"] == 6


def test_a_receive_that_raises_emits_an_exception_instead_of_a_stop(here, heard, monkeypatch):
    flow = here(Obedient, PAYLOADS)
    receive = begin(flow, origin="source", run_id="test", windows=[WINDOW])

    def away(*_: Any) -> None:
        raise SourceError("refused")

    monkeypatch.setattr(TableQueue, "plan", away)
    with pytest.raises(SourceError):
        steps.receive_messages(flow, receive)

    (start, (phase, fields)) = named(heard, "receive")
    assert (start[0], phase, fields["kind"]) == ("start", "exception", "SourceError")


def test_a_step_that_is_executed_again_after_the_decision_is_not_counted_again(here, heard):
    flow = here(Obedient, PAYLOADS)
    receive = begin(flow, origin="source", run_id="test", windows=[WINDOW])
    steps.receive_messages(flow, receive)
    for _ in range(2):
        steps.handle_messages(flow, receive)
        steps.batch_messages(flow, receive)
        steps.decide(flow, receive)
    assert [len(named(heard, name)) for name in ("handle", "batcher")] == [2, 2]


def test_a_sensor_emits_its_backlog_its_demand_and_that_its_source_is_unavailable(place, heard, exported):
    place.enqueue(130)
    place.tick()
    assert exported.metrics()["backlog"] == 130
    place.tick(source=TableQueue(name="queue", url=f"sqlite:///{place.folder}/elsewhere.sqlite"))
    known = {"pipeline": "asked", "producer": "", "source": "queue"}
    start, (phase, fields), *unavailable = named(heard, "ask")
    assert 0 <= fields.pop("oldest") < 60
    expected = known | {"backlog": 130, "in_flight": 0, "demand": 100, "runs": 1}
    assert [start, (phase, fields)] == [("start", known), ("stop", expected)]
    assert unavailable == [("start", known), ("exception", known | {"kind": "SourceError"})]


def test_the_spans_of_a_run_are_one_trace_with_each_task_under_its_step_and_metrics_count_each_message_once(
    here, exported
):
    run(here(Obedient, PAYLOADS))

    assert len({span.context.trace_id for span in exported.spans}) == 1
    tree = exported.by_parent()
    assert tree[("begin", "")] == 1
    for step in ("receive", "handle", "batcher", "decide", "publish", "acknowledge"):
        assert tree[(step, "begin")] == 1, step
    assert {step for (name, step) in tree if name == "task"} == {"receive", "handle", "batcher", "acknowledge"}
    steps_spans = {span.context.span_id: span for span in exported.spans}
    for span in exported.spans:
        if span.name == "task":
            parent = steps_spans[span.parent.span_id]
            assert parent.start_time <= span.start_time <= span.end_time
            assert "pipeline_platform.seconds" in span.attributes

    found = exported.metrics()
    counts = {name: found[f"messages.{name}"] for name in ("received", "handled", "failed", "acknowledged")}
    assert counts == {"received": 6, "handled": 4, "failed": 2, "acknowledged": 6}
    assert (found["rounds"], found["latency"]) == (1, 6)
    assert {found[f"duration {step}"] for step in ("begin", "receive", "handle", "batcher", "decide")} == {1}
    assert found["duration handle.task"] == 2


def test_another_process_continues_the_trace_of_the_receive(here, exported):
    flow = here(Obedient, PAYLOADS)
    receive = begin(flow, origin="source", run_id="test", windows=[WINDOW])
    steps.receive_messages(flow, receive)
    again = dataclasses.replace(flow)
    steps.handle_messages(again, again.ledger.get(receive.receive_id))
    handle, begun = (next(span for span in exported.spans if span.name == name) for name in ("handle", "begin"))
    assert handle.context.trace_id == begun.context.trace_id
    assert handle.parent.span_id == begun.context.span_id
    assert handle.parent.is_remote
    assert handle.attributes["pipeline_platform.run_id"] == "test"


def test_an_exception_sets_the_status_of_its_span(here, exported, monkeypatch):
    monkeypatch.setattr(TableQueue, "plan", lambda *_: 1 / 0)
    flow = here(Obedient, PAYLOADS)
    with pytest.raises(ZeroDivisionError):
        run(flow)
    (span,) = (span for span in exported.spans if span.name == "receive")
    assert (span.status.status_code.name, span.status.description) == ("ERROR", "ZeroDivisionError")


def test_an_endpoint_without_the_sdk_is_one_warning(here, monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.metric_exporter", None)
    run(here(Obedient, [b"one"]))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    (said,) = [message for message in warnings if "OTLP" in message]
    assert "pip install 'pipeline-platform[otlp]', or unset OTEL_EXPORTER_OTLP_ENDPOINT" in said
    assert not telemetry.spans.is_attached(configuration.NAME)


def test_an_sdk_that_raises_is_logged_once_and_fails_no_run(here, monkeypatch, caplog):
    monkeypatch.setattr(Exporter, "_end", lambda *_: 1 / 0)
    flow = here(Obedient, [b"one"])
    run(flow)
    assert flow.source.backlog().messages == 0
    assert [message for message in caplog.messages if "telemetry" in message] == [
        "Detached opentelemetry from telemetry: raised ZeroDivisionError at begin.stop"
    ]
