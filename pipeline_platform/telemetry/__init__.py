"""Telemetry events for functions of users and for OpenTelemetry, which is imported only if it is configured."""

from pipeline_platform.model.events import EVENTS, Event
from pipeline_platform.telemetry.spans import attach, detach

__all__ = ["EVENTS", "Event", "attach", "detach"]
