"""Set-up of OpenTelemetry by its standard environment variables."""

import logging
import os
import sys
from functools import cache

from pipeline_platform.model.events import EVENTS, IN_TASKS
from pipeline_platform.telemetry.spans import attach, is_attached

_LOG = logging.getLogger(__name__)

NAME = "opentelemetry"
"""Name of the attached exporter."""
EXPORTED = EVENTS.keys() - set(IN_TASKS)
"""Exported events: without events of tasks, which would count messages twice."""
_ENDPOINTS = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"


def export() -> None:
    """Export all events outside of tasks to OpenTelemetry, if an endpoint is set or this process has loaded its SDK.

    Otherwise OpenTelemetry is not imported. Called by each sensor and each step of a run.
    """
    if is_attached(NAME) or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return
    if any(map(os.environ.get, _ENDPOINTS)) and not _is_set_up():
        return
    if not {"opentelemetry.sdk.trace", "opentelemetry.sdk.metrics"} & sys.modules.keys():
        return
    _attach()


@cache
def _attach() -> None:
    """Attach the exporter once per process; if it raises, it stays detached."""
    from pipeline_platform.telemetry.exporter import Exporter

    attach(NAME, EXPORTED, Exporter())


@cache
def _is_set_up() -> bool:
    """Set the SDK's providers unless the process has some; return False without an SDK, or with invalid settings."""
    try:
        _set_up()
    except ImportError as error:
        _LOG.warning(
            "No events are exported: an OTLP endpoint is set, but %s is not installed. "
            "Run pip install 'pipeline-platform[otlp]', or unset %s.",
            error.name,
            ", ".join(filter(os.environ.get, _ENDPOINTS)),
        )
        return False
    except Exception as error:  # an invalid variable must not fail the run
        _LOG.warning("No events are exported to OpenTelemetry: %s", error)
        return False
    return True


def _set_up() -> None:
    from opentelemetry import metrics, trace
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # The SDK reads all other settings from OTEL_* itself: address, headers, resource, sampler, interval, temporality.
    if _wants("TRACES") and not isinstance(trace.get_tracer_provider(), TracerProvider):
        tracers = TracerProvider()
        tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(tracers)
    if _wants("METRICS") and not isinstance(metrics.get_meter_provider(), MeterProvider):
        metrics.set_meter_provider(MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())]))


def _wants(signal: str) -> bool:
    return os.environ.get(f"OTEL_{signal}_EXPORTER", "otlp") == "otlp" and bool(
        os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    )
