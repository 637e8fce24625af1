"""Export of events as OpenTelemetry spans and metrics, through its API; the SDK determines the destination."""

from collections.abc import Mapping
from typing import Any

from opentelemetry import context, metrics, trace
from opentelemetry.trace import Span, Status, StatusCode

from pipeline_platform.model.events import Event

_PREFIX = "pipeline_platform"
COUNTED = {
    "received": "Messages that runs received.",
    "handled": "Messages that were handled.",
    "skipped": "Messages that a callback skipped.",
    "failed": "Messages that failed; a message counts once per receive.",
    "acknowledged": "Messages that were acknowledged.",
}
"""Descriptions of the counters of messages, by the field that they sum."""
_BY = "pipeline", "producer", "origin", "batcher"
"""Attributes of metrics: fields with few values."""


class Exporter:
    """A function of events that records a span per event and counts messages. A task is a child span of its step.

    Tasks are exported from the timings in their manifests, so that workers need no SDK and no network.

    Args:
        tracers: Provider of the tracer. None: the provider of the process.
        meters: Provider of the meter. None: the provider of the process.
    """

    def __init__(
        self, tracers: trace.TracerProvider | None = None, meters: metrics.MeterProvider | None = None
    ) -> None:
        self._tracer = trace.get_tracer(_PREFIX, tracer_provider=tracers)
        meter = metrics.get_meter(_PREFIX, meter_provider=meters)
        self._open: dict[object, tuple[Span, Any]] = {}
        self._counters = {
            field: meter.create_counter(f"{_PREFIX}.messages.{field}", "{message}", description)
            for field, description in COUNTED.items()
        }
        self._durations = meter.create_histogram(f"{_PREFIX}.duration", "s", "Duration of events and tasks.")
        self._backlog = meter.create_gauge(f"{_PREFIX}.backlog", "{message}", "Messages waiting at the source.")

    def __call__(self, event: Event) -> None:
        """Start or end the span of an event."""
        if event.phase == "start":
            span = self._tracer.start_span(event.name, attributes=_attributes(event.fields))
            self._open[event.span] = span, context.attach(trace.set_span_in_context(span))
        elif event.span in self._open:  # otherwise it started before the exporter was attached
            self._end(event, *self._open.pop(event.span))

    def _end(self, event: Event, span: Span, token: Any) -> None:
        context.detach(token)
        span.set_attributes(_attributes(event.fields))
        if event.phase == "exception":
            span.set_status(Status(StatusCode.ERROR, event.fields["kind"]))
        by = {name: value for name in _BY if (value := event.fields.get(name))}
        self._durations.record(event.duration or 0.0, {**by, "event": event.name})
        parent = trace.set_span_in_context(span)
        for task in event.fields.get("tasks", ()):
            begin, end = (round(at * 1e9) for at in (task["began"], task["began"] + task["seconds"]))
            self._tracer.start_span("task", parent, attributes=_attributes(task), start_time=begin).end(end)
            self._durations.record(task["seconds"], {**by, "event": f"{event.name}.task"})
        for field, counter in self._counters.items():
            if count := event.fields.get(field):
                counter.add(count, by)
        if event.fields.get("backlog") is not None:
            self._backlog.set(event.fields["backlog"], by)
        span.end()


def _attributes(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{_PREFIX}.{name}": value for name, value in fields.items() if isinstance(value, str | int | float)}
