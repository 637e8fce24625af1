"""Where a run's messages come from, and what differs by it: a pull, a backfill of failures, a full replay."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline_platform.lake.decision import publish
from pipeline_platform.lake.failed import FailedMessages
from pipeline_platform.lake.failure_events import ALL, Selection
from pipeline_platform.lake.ledger import Origin, Receive
from pipeline_platform.lake.replay import ReplayedMessages
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.receive_state import ReceiveState
from pipeline_platform.source.contract import Source
from pipeline_platform.telemetry.tracing import traceparent


@dataclass(frozen=True)
class Intake(ABC):
    """What a run takes on. Each origin is one subclass; no other step asks which origin a run has.

    Attributes:
        flow: The pipeline and its resources.
        windows: Of the run.
        version: Of `outcomes`, which the run goes by.
        selection: Of the open failures, those that a backfill drives.
        name: For people.
        room_within_s: How long a run waits for room, before it takes on what there is: nobody asks for it again.
        is_outside: Whether messages come from outside the lake: that source may be away, and waits for the
            acknowledgement.
        is_alone: Whether no other run of the pipeline may be under way meanwhile, or messages would not keep their
            order.
        is_whole: Whether what it comes to counts only once all its messages are handled.
        selects: Whether it drives a selection of the open failures.
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
        """Gives the messages."""

    @property
    def is_alone(self) -> bool:
        """A source that gives a partition to one receive at a time keeps its order by itself."""
        return self.flow.pipeline.takes_turns(leases_partitions=self.source.leases_partitions)

    @property
    def gives_back(self) -> bool:
        """Whether messages that were not begun may be given back, where the run is to stop.

        The fast lane is one query, which begins them all.
        """
        return not self.flow.pipeline.uses_columns()

    @abstractmethod
    def asked(self, demand: int | None) -> int:
        """How many messages the run is to take on, if there is room."""

    def wanted(self, asked: int, log: Callable[[str], None]) -> int:
        """How many messages to claim room for; `log` hears why these are fewer than asked for."""
        return min(asked, self.flow.quota.per_run)

    def is_enough(self, granted: int, wanted: int) -> bool:
        """Whether the run may begin with the room that it got."""
        return True

    def base(self) -> int:
        """The version of `outcomes` from which the decision looks at what others decided."""
        return self.version

    def replaces(self) -> tuple[str, ...]:
        """The receives whose rows this run's rows replace."""
        return ()

    def left_out(self, receive: Receive, given_back: int) -> str | None:
        """What a run that is over left out and nobody asks for again, for people; None if nothing."""
        return None


class Pull(Intake):
    """Messages from the pipeline's source. The sensor asks again, so a pull takes what room there is at once."""

    name = "pull"
    room_within_s = 0.0
    is_outside = True

    @property
    def source(self) -> Source:
        """The producer's."""
        return self.flow.source

    @property
    def gives_back(self) -> bool:
        """Where the source takes them back: by a word, or as spans that nobody holds any more."""
        takes_back = self.source.gives_back_offsets or self.source.ack_policy.giving_back is not None
        return super().gives_back and takes_back

    def asked(self, demand: int | None) -> int:
        """The demand; without one, what a run takes on."""
        return self.flow.quota.for_a_pull() if demand is None else demand


class Backfill(Intake):
    """Open failures of the windows, retried: all, or those of a selection."""

    name = "backfill"
    selects = True

    @property
    def source(self) -> FailedMessages:
        """The table of failed messages."""
        flow = self.flow
        return FailedMessages(
            name=flow.source.name,
            lake=flow.lake,
            pipeline=flow.pipeline.name,
            windows=self.windows,
            selection=self.selection,
        )

    def base(self) -> int:
        """Before what others that drive such failures have decided: until that is published, these seem open."""
        others = (one for one in self.flow.ledger.under_way()[0] if one.origin != "source")
        return min([self.version, *(one.base for one in others if {*one.windows} & {*self.windows})])

    def asked(self, demand: int | None) -> int:
        """These failures, up to the demand."""
        waiting = self.source.backlog().messages or 0
        return waiting if demand is None else min(demand, waiting)

    def wanted(self, asked: int, log: Callable[[str], None]) -> int:
        """As many as a run takes on."""
        wanted = super().wanted(asked, log)
        if not asked:
            log(f"no failure is {self.selection.state} in {', '.join(self.windows)}")
        elif wanted < asked:
            log(f"{asked} failures are open, and a run takes on {wanted}: materialise these windows again for others")
        return wanted

    def is_enough(self, granted: int, wanted: int) -> bool:
        """Any room at all."""
        return granted > 0 or not wanted

    def left_out(self, receive: Receive, given_back: int) -> str | None:
        """Failures for which there was no room, or no time; the retry sensor asks again for those that are due."""
        if receive.selection.state != "due" and receive.demand < receive.asked:
            return (
                f"took on {receive.demand} of {receive.asked} open failures: a run may take on no more, or other runs "
                "hold the room. Their outcomes are published. Materialise these windows again for the others"
            )
        if given_back:
            left = f"{given_back} open failures were not begun"
            return f"was asked to stop: {left}. Materialise these windows again for them"
        return None


class Replay(Intake):
    """All messages of the windows, in place of what came of them. It takes windows whole, or it would lose rows."""

    name = "replay"
    is_whole = True

    @property
    def source(self) -> ReplayedMessages:
        """The table of received messages."""
        flow, version = self.flow, self.version
        return ReplayedMessages(
            name=flow.source.name, lake=flow.lake, pipeline=flow.pipeline.name, windows=self.windows, version=version
        )

    def asked(self, demand: int | None) -> int:
        """All, whatever the demand."""
        return self.source.backlog().messages or 0

    def wanted(self, asked: int, log: Callable[[str], None]) -> int:
        """All, up to what all runs may hold together."""
        return min(asked, self.flow.quota.capacity)

    def is_enough(self, granted: int, wanted: int) -> bool:
        """Room for all."""
        return granted == wanted

    def replaces(self) -> tuple[str, ...]:
        """The receives that decided something in the windows. What is published later would come beside its rows."""
        found, ledger = self.source.finished(), self.flow.ledger
        for receive_id in {*found} & {*ledger.unfinished()}:
            if done := ReceiveState(self.flow, receive_id).unfinished:
                publish(self.flow.tables, done, ledger.manifest(done))
        return found


INTAKES: dict[Origin, type[Intake]] = {"source": Pull, "failed": Backfill, "messages": Replay}


def common(flow: Flow, receive: Receive) -> dict[str, Any]:
    """The fields of a `Step` of a receive, by name."""
    intake = intake_of(flow, receive)
    return {
        "pipeline": flow.pipeline,
        "context": flow.pipeline.context_of(receive.context),
        "ack_policy": intake.source.ack_policy,
        "lake": flow.lake,
        "receive_id": receive.receive_id,
        "run_id": receive.run_id,
        "traceparent": traceparent(),
        "kept_columns": flow.kept_columns,
        "source": intake.source if flow.pipeline.acks_immediately and intake.is_outside else None,
        "variables": flow.variables,
    }


def intake_of(flow: Flow, receive: Receive) -> Intake:
    """Where the messages of a receive come from."""
    return INTAKES[receive.origin](flow, receive.windows, receive.base, receive.selection)
