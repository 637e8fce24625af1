"""Export of a run to a server that accepts OTLP over HTTP."""

import os
import subprocess
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pipeline_platform.telemetry import configuration


class Collector:
    """OTLP server that records spans and metrics."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.metrics: dict[str, list[Any]] = {}
        self.services: set[str] = set()
        self.headers: set[str | None] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.take(self.path, self.rfile.read(int(self.headers["Content-Length"])))
                collector.headers.add(self.headers["x-tenant"])
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def take(self, path: str, body: bytes) -> None:
        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                self._note(resource)
                self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        elif path == "/v1/metrics":
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                self._note(resource)
                for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                    self.metrics[metric.name] = list(getattr(metric, metric.WhichOneof("data")).data_points)

    def _note(self, resource: Any) -> None:
        attributes = resource.resource.attributes
        self.services |= {attribute.value.string_value for attribute in attributes if attribute.key == "service.name"}


@pytest.fixture
def collector():
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever)
    thread.start()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()
    thread.join()


def told_run(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Execute a run in a new process with only these variables of OpenTelemetry."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    command = [sys.executable, "-m", "tests.fixtures.told_run", str(folder)]
    return subprocess.run(command, env=plain | environment, capture_output=True, text=True, check=True)


def test_an_endpoint_in_the_environment_gets_the_spans_and_metrics_of_a_run(tmp_path, collector):
    told_run(
        tmp_path,
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.address,
        OTEL_EXPORTER_OTLP_HEADERS="x-tenant=flights",
        OTEL_SERVICE_NAME="flights-runs",
    )

    (root,) = (span for span in collector.spans if span.name == "begin")
    children = [span.name for span in collector.spans if span.parent_span_id == root.span_id]
    assert sorted(children) == ["acknowledge", "batcher", "decide", "handle", "publish", "receive"]
    assert {span.trace_id for span in collector.spans} == {root.trace_id}
    sums = {
        name.removeprefix("pipeline_platform.messages."): sum(point.as_int for point in points)
        for name, points in collector.metrics.items()
        if name.startswith("pipeline_platform.messages.")
    }
    assert sums == {"received": 5, "handled": 3, "failed": 2, "acknowledged": 5}
    assert sum(point.count for point in collector.metrics["pipeline_platform.duration"]) >= 7
    assert (collector.services, collector.headers) == ({"flights-runs"}, {"flights"})


@pytest.fixture
def set_up(monkeypatch):
    """Return a function that sets variables, and returns the providers that a step or a sensor sets up."""
    providers: dict[str, Any] = {}
    monkeypatch.setattr("opentelemetry.trace.set_tracer_provider", partial(providers.__setitem__, "spans"))
    monkeypatch.setattr("opentelemetry.metrics.set_meter_provider", partial(providers.__setitem__, "metrics"))
    monkeypatch.setattr(configuration, "is_attached", lambda _: False)  # an earlier test of this process may export
    monkeypatch.setattr(configuration, "_is_set_up", configuration._is_set_up.__wrapped__)
    monkeypatch.setattr(configuration, "_attach", lambda: None)

    def export(variable: str, value: str) -> set[str]:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
        monkeypatch.setenv(variable, value)
        configuration.export()
        return {*providers}

    yield export
    for provider in providers.values():
        provider.shutdown()


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("OTEL_TRACES_EXPORTER", "none", {"metrics"}),
        ("OTEL_METRICS_EXPORTER", "none", {"spans"}),
        ("OTEL_SDK_DISABLED", "true", set()),
    ],
)
def test_spans_and_metrics_can_be_disabled(set_up, variable, value, expected):
    assert set_up(variable, value) == expected


def test_an_invalid_setting_of_the_sdk_is_logged_and_fails_no_run(set_up, caplog):
    assert set_up("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "5000") == set()
    assert "No events are exported to OpenTelemetry: max_export_batch_size must be less" in caplog.text


def test_an_unavailable_collector_fails_no_run(tmp_path):
    away = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    assert told_run(tmp_path, **away).returncode == 0


def test_without_an_endpoint_opentelemetry_is_not_loaded(tmp_path):
    assert told_run(tmp_path).stdout.split() == []
