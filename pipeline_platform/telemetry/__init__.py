"""Events of what the platform does, for functions of yours and for OpenTelemetry.

It imports OpenTelemetry only where that is configured.
"""

from pipeline_platform.model.events import EVENTS, Event
from pipeline_platform.telemetry.spans import attach, detach

__all__ = ["EVENTS", "Event", "attach", "detach"]
