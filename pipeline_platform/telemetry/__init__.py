"""Events of what the platform does, for functions of yours and for OpenTelemetry.

The lowest room: it imports nothing of the platform's, and OpenTelemetry only where that is configured.
"""

from pipeline_platform.telemetry.events import EVENTS, Event, attach, detach

__all__ = ["EVENTS", "Event", "attach", "detach"]
