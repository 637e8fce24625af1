"""Causes of the open failures of a pipeline's newest windows."""

from datetime import UTC, datetime

from pipeline_platform.cli.dagster_instance import unavailable
from pipeline_platform.cli.dashboard.picture import Cause, Causes
from pipeline_platform.cli.status.status_data import FailuresStatus
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.failures.inspection import grouped
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.pipeline import Pipeline

_FAILURES, _WINDOWS = 50_000, 50
"""Maximum failures and windows to read. The newest window is always read, unless it has more than `_OF_A_WINDOW`."""
_OF_A_WINDOW = 200_000
_SHOWN = 5


class CausesOfFailures:
    """The causes of a pipeline's open failures, read again when their number has changed."""

    def __init__(self, lake: Lake, pipeline: type[Pipeline]) -> None:
        self._failed = FailedMessages(name=pipeline.name, lake=lake, pipeline=pipeline.name)
        self._known = Causes()
        self._of: FailuresStatus | None = None

    def newest(self, failures: FailuresStatus) -> Causes:
        """Return the causes in the newest windows; `failures` are the current numbers."""
        if failures != self._of:
            try:
                self._known, self._of = self._read() if failures.open else Causes(), failures
            except Exception as error:  # any error of the lake; the state of the pipeline is known
                return Causes(unknown=unavailable(error))
        return self._known

    def _read(self) -> Causes:
        chosen, messages = list[str](), 0
        for window, counts in sorted(self._failed.by_window().items(), reverse=True)[:_WINDOWS]:
            if messages + counts.open > (_FAILURES if chosen else _OF_A_WINDOW):
                break
            chosen.append(window)
            messages += counts.open
        if not chosen:
            return Causes()
        found = grouped(self._failed.model_copy(update={"windows": tuple(chosen)}), datetime.now(UTC))
        by_cause: dict[tuple[str, str], Cause] = {}
        for group in found.groups:  # of equal causes in several states
            kind, cause = group.kind, group.cause
            before = by_cause.get((kind, cause), Cause(0, kind, cause, group.last))
            last = max(before.last, group.last)
            by_cause[kind, cause] = Cause(before.messages + group.messages, kind, cause, last)
        largest = sorted(by_cause.values(), key=lambda each: each.messages, reverse=True)
        return Causes(tuple(largest[:_SHOWN]), found.messages)
