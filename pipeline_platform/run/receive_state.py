"""The state of a receive: how far it is, whose it is, and what comes next; by ledger, transactions and claim."""

from collections.abc import Sequence
from enum import IntEnum
from functools import cached_property

from pipeline_platform.lake import decision
from pipeline_platform.lake.decision import FencedError, Transaction, UnhandledError
from pipeline_platform.lake.ledger import Receive
from pipeline_platform.lake.tables import FENCED
from pipeline_platform.run.flow import Flow


class Phase(IntEnum):
    """How far a receive is, and with it what comes next."""

    GIVEN_UP = 0  # nothing: its messages are back at their source
    PLANNED = 1  # it leases messages and writes them down
    RECEIVED = 2  # it handles them; without messages it is acknowledged at once
    HANDLED = 3  # it batches and is decided; up to here the next run gives up what a dead one left
    DECIDED = 4  # it is published: by its run, or by any that meets it
    PUBLISHED = 5  # it is acknowledged
    ACKNOWLEDGED = 6  # nothing: it is finished


class ReceiveState:
    """The state of one receive. Each part of it is looked up when it is first asked for, once."""

    def __init__(self, flow: Flow, receive_id: str) -> None:
        self._flow, self._receive_id = flow, receive_id

    @cached_property
    def record(self) -> Receive | None:
        """As it was begun; None once it is finished or given up."""
        return self._flow.ledger.get(self._receive_id)

    @cached_property
    def transaction(self) -> Transaction:
        """Who owns it, and whether that run decided it."""
        return decision.transaction_of(self._flow.tables["outcomes"], self._receive_id, self.record)

    @cached_property
    def receive(self) -> Receive | None:
        """As the run that owns it has it; None once it is finished or given up."""
        return self.record and self.record.model_copy(update={"owner": self.transaction.owner})

    @property
    def unfinished(self) -> Receive | None:
        """As the run that decided it left it, for anybody to finish; None if it is not decided, or finished."""
        return self.receive if self.transaction.is_decided else None

    @cached_property
    def phase(self) -> Phase:
        """How far it is.

        Raises:
            ReceiveError: Its record or a manifest cannot be read.
        """
        ledger, receive, is_decided = self._flow.ledger, self.receive, self.transaction.is_decided
        if receive is None:
            return Phase.ACKNOWLEDGED if is_decided else Phase.GIVEN_UP
        if is_decided:
            is_published = decision.is_published(self._flow.tables, receive, ledger.manifest(receive))
            return Phase.PUBLISHED if is_published else Phase.DECIDED
        if self.transaction.mark == FENCED:
            return Phase.GIVEN_UP
        steps = ledger.steps(receive)
        return Phase.HANDLED if "handle" in steps else Phase.RECEIVED if "receive" in steps else Phase.PLANNED

    @property
    def is_live(self) -> bool:
        """Whether a run works on it: its claim is not over."""
        claims = self._flow.control.in_flight(self._flow.pipeline.name, of_all=True)
        return any(claim.receive_id == self._receive_id for claim in claims)

    def expect_published(self, receive: Receive) -> None:
        """Refuse to acknowledge what this run has not decided, or what not every table shows.

        Raises:
            FencedError: It was given up or taken over: its messages are another run's now.
            UnhandledError: A step was left out.
        """
        if self.phase is Phase.GIVEN_UP:
            raise FencedError.given_up(self._receive_id)
        if self.transaction.owner != receive.owner:
            raise FencedError.taken(self._receive_id, receive.run_id)
        if self.phase is Phase.PLANNED:
            raise UnhandledError(
                f"receive {self._receive_id} did not come to the end of `receive_messages`, and may hold messages: "
                "execute all steps again, and it receives anew. The next run gives this receive up"
            )
        if self.phase < Phase.PUBLISHED:
            what = "published" if self.transaction.is_decided else "decided"
            raise UnhandledError(f"receive {self._receive_id} is not {what}: execute `commit` first")

    def expect_finished(self, run_ids: Sequence[str]) -> None:
        """Refuse a receive without a record unless it is decided, and by the run that asks or one that it re-executes.

        Raises:
            FencedError: It was given up, and its messages come back; or a re-execution took it over from this run.
        """
        if not self.transaction.is_decided:
            raise FencedError.given_up(self._receive_id)
        if self.transaction.owner and not any(map(self.transaction.is_of, run_ids)):
            raise FencedError.taken(self._receive_id, run_ids[0])
