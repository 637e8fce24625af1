"""Export of events as OpenTelemetry spans and metrics, through its API; the SDK determines the destination."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

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


class _Gauge(NamedTuple):
    name: str
    unit: str
    description: str


GAUGES = {
    "backlog": _Gauge("backlog", "{message}", "Messages waiting at the source."),
    "oldest": _Gauge("oldest", "s", "Age of the oldest message at the source; 0 if none is waiting."),
    "in_flight": _Gauge("in_flight", "{message}", "Messages that runs have leased or may lease."),
    "open": _Gauge("failures.open", "{message}", "Open failures, including dead and scheduled ones."),
    "dead": _Gauge("failures.dead", "{message}", "Failures without an automatic retry."),
    "scheduled": _Gauge("failures.scheduled", "{message}", "Failures with a time for their retry."),
    "due": _Gauge("failures.due", "{message}", "Failures whose retry was due when the sensor of retries counted them."),
}
"""Gauges, by the field that they show."""
HISTOGRAMS = {
    "duration": "Duration of events and tasks.",
    "latency": "Time from the publication of a message at the source to its acknowledgement.",
}
"""Descriptions of the histograms."""
_SECONDS = 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 20, 30, 60, 120, 300, 600, 1_800, 3_600, 14_400, 86_400
"""Bounds of the buckets of histograms."""
_RECORDED = 1_000
"""Most latencies to record for a receive: recording one takes microseconds."""
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
        self._rounds = meter.create_counter(f"{_PREFIX}.rounds", "{round}", "Receives that were acknowledged.")
        self._durations, self._latency = (
            meter.create_histogram(f"{_PREFIX}.{name}", "s", description, explicit_bucket_boundaries_advisory=_SECONDS)
            for name, description in HISTOGRAMS.items()
        )
        self._gauges = {
            field: meter.create_gauge(f"{_PREFIX}.{gauge.name}", gauge.unit, gauge.description)
            for field, gauge in GAUGES.items()
        }

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
        for field, gauge in self._gauges.items():
            if (value := event.fields.get(field)) is not None:
                gauge.set(value, by)
        if event.fields.get("acknowledged"):
            self._rounds.add(1, by)
        for seconds in _sample(event.fields.get("latency", {})):
            self._latency.record(seconds, by)
        span.end()


def _sample(latency: Mapping[float, int]) -> list[float]:
    """Return the latency of each message, or of every n-th, so that no receive has more than `_RECORDED`."""
    return sorted(Counter(latency).elements())[:: -(-sum(latency.values()) // _RECORDED) or 1]


def _attributes(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{_PREFIX}.{name}": value for name, value in fields.items() if isinstance(value, str | int | float)}
