"""Origins of a run's messages, and what differs by origin: pull, retry of failures, full replay."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline_platform.lake.decisions.decision import publish
from pipeline_platform.lake.decisions.ledger import Origin, Receive
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.failures.failure_events import ALL, Selection
from pipeline_platform.lake.replay import ReplayedMessages
from pipeline_platform.lake.task_report import Totals
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.receive_state import ReceiveState
from pipeline_platform.source.contract import Source
from pipeline_platform.telemetry.tracing import traceparent


@dataclass(frozen=True)
class Intake(ABC):
    """Messages that a run receives. Each origin is a subclass; no other code tests the origin of a run.

    Attributes:
        flow: The pipeline and its resources.
        windows: Windows of the run.
        version: Version of the table `outcomes` that the run reads.
        selection: Open failures that a retry selects.
        name: Name of the origin for users.
        room_within_s: Seconds that a run waits for capacity before it uses the free capacity.
        is_outside: Whether messages come from outside the lake: the source may be unavailable, and needs an
            acknowledgement.
        is_alone: Whether the run must be the only active run of the pipeline, to keep messages in order.
        is_whole: Whether the results count only if all messages are handled.
        selects: Whether the run retries a selection of the open failures.
    """

    flow: Flow
    windows: tuple[str, ...]
    version: int
    selection: Selection = ALL

    name: ClassVar[str]
    room_within_s: ClassVar[float] = 60.0
    is_outside: ClassVar[bool] = False
    is_whole: ClassVar[bool] = False
    selects: ClassVar[bool] = False

    @property
    @abstractmethod
    def source(self) -> Source:
        """Source of the messages."""

    @property
    def is_alone(self) -> bool:
        """Whether the run must be alone. A source that leases partitions keeps messages in order without it."""
        return self.flow.pipeline.takes_turns(leases_partitions=self.source.leases_partitions)

    @property
    def gives_back(self) -> bool:
        """Whether unstarted messages can be released if the run is asked to stop.

        In the Spark lane, a single query starts all messages.
        """
        return not self.flow.pipeline.uses_columns()

    @abstractmethod
    def asked(self, demand: int | None) -> int:
        """Return the number of messages to receive if there is enough capacity."""

    def wanted(self, asked: int, log: Callable[[str], None]) -> int:
        """Return the number of messages to claim. `log` gets the reason if they are fewer than `asked`."""
        return min(asked, self.flow.quota.per_run)

    def is_enough(self, granted: int, wanted: int) -> bool:
        """Whether the run may start with the capacity that it got."""
        return True

    def base(self) -> int:
        """Return the version of `outcomes` after which the decision reads the decisions of other runs."""
        return self.version

    def replaces(self) -> tuple[str, ...]:
        """Return the receives whose rows this run replaces."""
        return ()

    def left(self, receive: Receive) -> int:
        """Return the number of messages that the run handles in further receives after this receive."""
        return 0

    def left_out(self, receive: Receive, totals: Totals) -> str | None:
        """Return a description of messages that the run left out and that are not requested again; None if none."""
        return None


class Pull(Intake):
    """Messages from the pipeline's source. A pull uses the free capacity immediately; the sensor requests more runs."""

    name = "pull"
    room_within_s = 0.0
    is_outside = True

    @property
    def source(self) -> Source:
        """Source of the producer."""
        return self.flow.source

    @property
    def gives_back(self) -> bool:
        """Whether the source supports the release of messages, by an ack action or by offsets."""
        takes_back = self.source.gives_back_offsets or self.source.ack_policy.giving_back is not None
        return super().gives_back and takes_back

    def asked(self, demand: int | None) -> int:
        """Return the demand; without a demand, the limit of a run."""
        return self.flow.quota.for_a_pull() if demand is None else demand


class RetryFailures(Intake):
    """Open failures of the windows, all or a selection, to be retried."""

    name = "retry"
    selects = True

    @property
    def source(self) -> FailedMessages:
        """Table of failed messages."""
        flow = self.flow
        return FailedMessages(
            name=flow.source.name,
            lake=flow.lake,
            pipeline=flow.pipeline.name,
            windows=self.windows,
            selection=self.selection,
            holds=flow.pipeline.holds_partitions(),
        )

    def base(self) -> int:
        """Return a version before the decisions of other retries: their failures seem open until published."""
        ledger = self.flow.ledger
        others = (
            receive
            for receive in ledger.under_way()[0]
            if receive.origin != "source" and not ledger.was_published(receive)
        )
        return min([self.version, *(other.base for other in others if {*other.windows} & {*self.windows})])

    def asked(self, demand: int | None) -> int:
        """Return the number of selected failures, up to the demand."""
        waiting = self.source.backlog().messages or 0
        return waiting if demand is None else min(demand, waiting)

    def wanted(self, asked: int, log: Callable[[str], None]) -> int:
        """Return the number of failures to claim, up to the limit of a receive."""
        wanted = super().wanted(asked, log)
        if not asked:
            log(f"Found no {self.selection.state} failures in {', '.join(self.windows)}")
        elif wanted < asked:
            log(f"Retrying {wanted:,} of {asked:,} failures: the limit of a receive")
        return wanted

    def is_enough(self, granted: int, wanted: int) -> bool:
        """Whether there is any capacity. The retry sensor requests due failures again, so its run ends without it."""
        return granted > 0 or not wanted or self.selection.state == "due"

    def left(self, receive: Receive) -> int:
        """Return the number of failures for which the receive had no space or no capacity.

        It is 0 if another run retries these failures: the retry sensor requests due failures again, and a command that
        launches several runs requests the failures from before its start again.
        """
        only = receive.selection
        return 0 if only.state == "due" or only.failed_before else max(0, receive.asked - receive.demand)

    def left_out(self, receive: Receive, totals: Totals) -> str | None:
        """Return a description of failures without time, or that wait for others."""
        if totals.released:
            left = "1 open failure was" if totals.released == 1 else f"{totals.released:,} open failures were"
            return f"The run was asked to stop: {left} not retried. Materialise these windows again"
        if receive.selection.state != "due" and totals.still_held:
            left = "1 failure waits" if totals.still_held == 1 else f"{totals.still_held:,} failures wait"
            return (
                f"{left} for an earlier open failure of the same partition. Retry or close the earlier failure. The "
                "retry sensor then retries the failures that wait"
            )
        return None


class Replay(Intake):
    """All messages of the windows, to replace their results. A part of a window would lose rows."""

    name = "replay"
    is_whole = True

    @property
    def source(self) -> ReplayedMessages:
        """Table of received messages."""
        flow, version = self.flow, self.version
        return ReplayedMessages(
            name=flow.source.name, lake=flow.lake, pipeline=flow.pipeline.name, windows=self.windows, version=version
        )

    def asked(self, demand: int | None) -> int:
        """Return the number of all messages; the demand is ignored."""
        return self.source.backlog().messages or 0

    def wanted(self, asked: int, log: Callable[[str], None]) -> int:
        """Return the number of all messages, up to the capacity of all runs."""
        return min(asked, self.flow.quota.capacity)

    def is_enough(self, granted: int, wanted: int) -> bool:
        """Whether there is capacity for all messages."""
        return granted == wanted

    def replaces(self) -> tuple[str, ...]:
        """Return the receives that decided messages of the windows, after publishing them: later rows would remain."""
        found, ledger = self.source.finished(), self.flow.ledger
        for receive_id in {*found} & {*ledger.unfinished()}:
            if done := ReceiveState(self.flow, receive_id).unfinished:
                publish(self.flow.tables, done, ledger.manifest(done))
        return found


INTAKES: dict[Origin, type[Intake]] = {"source": Pull, "failed": RetryFailures, "messages": Replay}


def common(flow: Flow, receive: Receive) -> dict[str, Any]:
    """Return the common fields of a `Step` of a receive, by name."""
    intake = intake_of(flow, receive)
    return {
        "pipeline": flow.pipeline,
        "context": flow.pipeline.context_of(receive.context),
        "ack_policy": intake.source.ack_policy,
        "lake": flow.lake,
        "receive_id": receive.receive_id,
        "run_id": receive.run_id,
        "base": receive.base,
        "started_at": receive.started_at,
        "traceparent": traceparent(),
        "kept_columns": flow.kept_columns,
        "source": intake.source if flow.pipeline.acks_immediately and intake.is_outside else None,
        "variables": flow.variables,
    }


def intake_of(flow: Flow, receive: Receive) -> Intake:
    """Return the intake of a receive."""
    return INTAKES[receive.origin](flow, receive.windows, receive.base, receive.selection)
