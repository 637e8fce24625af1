"""The phase of a receive, by its record and manifests in the lake, its transactions, and its claim."""

from enum import IntEnum
from functools import cached_property

from pipeline_platform.lake.decisions import decision
from pipeline_platform.lake.decisions.decision import FencedError, UnhandledError
from pipeline_platform.lake.decisions.ledger import Receive
from pipeline_platform.lake.tables import DECIDED, FENCED
from pipeline_platform.run.flow import Flow


class Phase(IntEnum):
    """Progress of a receive. The comments say what follows."""

    FENCED = 0  # nothing: it was fenced, and its messages were released
    BEGUN = 1  # its messages are leased and written
    LEASED = 2  # they are handled; a receive without messages is acknowledged at once
    HANDLED = 3  # they are batched
    BATCHED = 4  # its outcomes are decided
    DECIDED = 5  # its tables are published, by its run or any later one
    PUBLISHED = 6  # it is acknowledged
    ACKNOWLEDGED = 7  # nothing


class ReceiveState:
    """The state of one receive. Each part is looked up once, on first access."""

    def __init__(self, flow: Flow, receive_id: str) -> None:
        self._flow, self._receive_id = flow, receive_id

    @cached_property
    def receive(self) -> Receive | None:
        """Its record; None once it is finished or released."""
        return self._flow.ledger.get(self._receive_id)

    @cached_property
    def _state(self) -> int | None:
        """Its state in `outcomes`: decided, fenced, or none yet."""
        return decision.state_of(self._flow.tables["outcomes"], self._receive_id, self.receive)

    @property
    def is_decided(self) -> bool:
        """Whether its outcomes are final."""
        return self._state == DECIDED

    @property
    def unfinished(self) -> Receive | None:
        """The receive if it is decided and not finished: any run may publish and acknowledge it."""
        return self.receive if self.is_decided else None

    @cached_property
    def phase(self) -> Phase:
        """Its phase.

        Raises:
            ReceiveError: Its record or a manifest cannot be read.
        """
        ledger, receive, is_decided = self._flow.ledger, self.receive, self.is_decided
        if receive is None:
            return Phase.ACKNOWLEDGED if is_decided else Phase.FENCED
        if is_decided:
            is_published = decision.is_published(self._flow.tables, receive, ledger.manifest(receive))
            return Phase.PUBLISHED if is_published else Phase.DECIDED
        if self._state == FENCED:
            return Phase.FENCED
        steps = ledger.steps(receive)
        if "handle" not in steps:
            return Phase.LEASED if "receive" in steps else Phase.BEGUN
        manifest = ledger.manifest(receive)
        return Phase.BATCHED if manifest.rows("messages") == manifest.rows("outcomes") else Phase.HANDLED

    def expect_published(self) -> None:
        """Check that its tables are published.

        Raises:
            FencedError: It was fenced.
            UnhandledError: It is at an earlier phase.
        """
        if self.phase is Phase.FENCED:
            raise FencedError.of(self._receive_id)
        if self.phase < Phase.PUBLISHED:
            phase = self.phase.name.lower()
            raise UnhandledError(f"receive {self._receive_id} is {phase}, not published: publish it first")

    @property
    def is_live(self) -> bool:
        """Whether a run works on it: its claim has not expired."""
        claims = self._flow.control.in_flight(self._flow.pipeline.name, of_all=True)
        return any(claim.receive_id == self._receive_id for claim in claims)
