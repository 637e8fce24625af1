"""Numbers of open failures, for reports and alerts, with an event for telemetry."""

from pipeline_platform.lake.failures.failed import Counts, FailedMessages
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.telemetry.spans import span

_SUMMED = ("open", "dead", "scheduled")


def count_failures(pipeline: type[Pipeline], lake: Lake) -> dict[str, Counts]:
    """Return the numbers of failures of each window with open failures, and emit their sums."""
    with span("count_failures", pipeline) as event:
        counts = FailedMessages(name=pipeline.name, lake=lake, pipeline=pipeline.name).by_window()
        event.add(**{name: sum(getattr(each, name) for each in counts.values()) for name in _SUMMED})
    return counts
