"""Whether OpenTelemetry gets events, and its SDK's set-up by the standard environment variables."""

import logging
import os
import sys
from functools import cache

from pipeline_platform.model.events import EVENTS, IN_TASKS
from pipeline_platform.telemetry.spans import attach, is_attached

_LOG = logging.getLogger(__name__)

NAME = "opentelemetry"
"""What its function is attached as."""
EXPORTED = EVENTS.keys() - set(IN_TASKS)
"""Events that it gets: not those of tasks, which would count messages twice."""
_ENDPOINTS = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"


def export() -> None:
    """Give OpenTelemetry all events outside of tasks, where an endpoint is set or this process has loaded its SDK.

    Elsewhere nothing of it is imported. Called by each sensor and each step of a run.
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
    """Once in a process: if it raises it stays detached."""
    from pipeline_platform.telemetry.exporter import Exporter

    attach(NAME, EXPORTED, Exporter())


@cache
def _is_set_up() -> bool:
    """Give this process the SDK's providers, unless it has some; False without an SDK, or if it refuses a setting."""
    try:
        _set_up()
    except ImportError as error:
        _LOG.warning(
            "an OTLP endpoint is set, and %s is not installed: pip install 'pipeline-platform[otlp]', or unset %s",
            error.name,
            ", ".join(filter(os.environ.get, _ENDPOINTS)),
        )
        return False
    except Exception as error:  # of whatever a variable says: a run does without
        _LOG.warning("OpenTelemetry gets no events: %s", error)
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

    # Everything else these read from OTEL_* themselves: address, headers, resource, sampler, interval, temporality.
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
