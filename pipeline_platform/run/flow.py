"""The way of a message, step by step: what the ops of a pipeline do, free of Dagster.

A run receives, handles, batches, decides, publishes and acknowledges. Every step leaves its manifest in the lake, so
that it can be run again, by the same run or by the next, and changes nothing that it has changed before.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline_platform.control.room import Room
from pipeline_platform.control.store import ControlStore, ControlStoreError
from pipeline_platform.lake.decision import (
    Decision,
    FencedError,
    Standing,
    UnhandledError,
    decide,
    decided,
    expect_owner,
    fence,
    publish,
    take_over,
)
from pipeline_platform.lake.failed import FailedMessages
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import divide
from pipeline_platform.lake.receives import Origin, Receive, Receives
from pipeline_platform.lake.replay import ReceivedMessages
from pipeline_platform.lake.rewriting import DROPPED
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import DECIDED, Tables
from pipeline_platform.model.options import Batcher
from pipeline_platform.model.pipeline import Pipeline, PipelineError
from pipeline_platform.run.handling import Handling
from pipeline_platform.run.spark_work import SparkWork
from pipeline_platform.source.contract import Source
from pipeline_platform.spark import engine
from pipeline_platform.tasks import batch
from pipeline_platform.tasks.acknowledge import ONCE, Patience, SettleOutcomes
from pipeline_platform.tasks.receive import ReadShares
from pipeline_platform.tasks.staging import staged_table

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import SparkSession

_LOG = logging.getLogger(__name__)

LEASE_S = 60.0
"""Seconds that a receive's claim on capacity lasts unless its run renews it."""
FEW = 100
"""Messages that the driver reads and acknowledges by itself: a Spark stage would take longer than a few calls."""
ROOM_WITHIN_S = 60.0
"""Seconds that a backfill or replay waits for room, before it takes on what there is."""


class Acknowledgement(NamedTuple):
    """What the source was told of a receive.

    Attributes:
        acknowledged: Messages it was told of.
        lost: Messages that another receive holds by now, which will find them decided.
        unacknowledged: Messages it would not take: the next run tells it again.
        errors: In words, a sample.
    """

    acknowledged: int
    lost: int
    unacknowledged: int
    errors: list[str]


@dataclass(frozen=True)
class Flow:
    """One pipeline with everything it needs to run.

    Attributes:
        pipeline: The class.
        source: Its producer's source.
        lake: Where its tables are.
        control: Limits and claims of all runs.
        session: Gives the Spark session; asked only when there is work for it.
    """

    pipeline: type[Pipeline]
    source: Source
    lake: Lake
    control: ControlStore
    session: Callable[[], SparkSession]

    @cached_property
    def tables(self) -> Tables:
        """The pipeline's tables."""
        return Tables(self.lake, self.pipeline)

    @cached_property
    def receives(self) -> Receives:
        """Its receives under way."""
        return Receives(self.lake, self.pipeline.name)

    @cached_property
    def room(self) -> Room:
        """What its runs may hold at once."""
        return Room(self.pipeline, self.control)

    def _work(self, receive_id: str) -> SparkWork:
        return SparkWork(receive_id, self.lake, self.session)

    # Receive

    def begin(
        self,
        *,
        origin: Origin,
        run_id: str,
        windows: Sequence[str],
        demand: int | None = None,
        context: Mapping[str, Any] | None = None,
        tell: Callable[[str], None] = _LOG.info,
    ) -> Receive:
        """Begin a receive, once everything that could refuse it later has been asked now.

        Finishes what dead runs decided, gives up what they did not, and claims room for the demand. A pull takes
        what room there is; a backfill or replay, which nobody asks for again, waits for its room for a while.

        Args:
            origin: Where messages come from.
            run_id: Of the Dagster run.
            windows: Partition keys the run is about, in order.
            demand: Messages wanted; None for as many as the pipeline allows a run.
            context: What the run changes in the pipeline's context.
            tell: Told in words what was cleared up, and why the demand is less than wanted.

        Raises:
            PipelineError: The context does not fit; the windows are others than those of the data; or there is no room
                for a backfill, or for all of a replay.
            SchemaChangeError: A model no longer fits its table.
            SourceError: The source cannot be reached, or is not there.
        """
        self.pipeline.context_of(context)
        self.tables.ensure()
        if origin == "source":
            self.source.refuse_or_pass()
        base = self.tables["outcomes"].open().version()
        if cleared := self.clear_up(tell):
            tell(f"cleared up after runs that died or left something unacknowledged: receives {', '.join(cleared)}")
        receive_id = uuid.uuid4().hex
        asked = self._asked(origin, windows, demand, base)
        # Before the claim, which nobody renews yet: over many windows it takes longer than a lease.
        replaces = self._replay(windows, base).finished() if origin == "messages" else ()
        wanted = self.room.wanted(origin, asked, windows, tell)
        try:
            # Nobody asks for a backfill again; a pull is asked for at every look at the source.
            patience = 0.0 if origin == "source" else ROOM_WITHIN_S
            granted = self.room.claim(receive_id, run_id, wanted, tell, lease_s=LEASE_S, within_s=patience)
            self.room.refuse_without(origin, wanted, granted)
            receive = Receive(
                receive_id=receive_id,
                pipeline=self.pipeline.name,
                origin=origin,
                run_id=run_id,
                windows=tuple(windows),
                demand=granted,
                asked=asked,
                context=dict(context or {}),
                base=base,
                replaces=replaces,
                started_at=datetime.now(UTC),
            )
            if granted:
                self.receives.begin(receive)
        except BaseException:
            self.control.end(receive_id)
            raise
        return receive

    def _asked(self, origin: Origin, windows: Sequence[str], demand: int | None, base: int) -> int:
        """How many messages a receive is to take on, if there is room."""
        if origin == "failed":
            waiting = self._failures(windows).backlog().messages or 0
            return waiting if demand is None else min(demand, waiting)
        if origin == "messages":
            return self._replay(windows, base).at_most()
        if demand is not None:
            return demand
        return self.room.for_a_pull()

    def resume(self, receive: Receive, run_id: str) -> Receive:
        """Go on with what another run received: a re-execution of its later steps.

        From here on that other run can decide nothing, should it be alive still.

        Returns:
            The same receive, as this run's.

        Raises:
            FencedError: It was given up, or yet another run took it over from this one.
            PipelineError: There is no room for it now.
        """
        receive, is_decided = take_over(self.tables, self.receives, receive, run_id)
        if is_decided:
            return receive
        held = min(self._received(receive), receive.demand)
        granted = self.room.claim(receive.receive_id, run_id, held, _LOG.info, lease_s=LEASE_S, within_s=ROOM_WITHIN_S)
        if granted < held:
            raise PipelineError(
                f"{self.pipeline.name}: no room for the {held} messages of receive {receive.receive_id} while other "
                "runs are under way: re-execute when they are done, or let the next run receive them again"
            )
        return receive

    def _decided(self, receive: Receive) -> Receive | None:
        outcomes = self.tables["outcomes"]
        return decided(outcomes, outcomes.open(), receive)

    def source_of(self, receive: Receive) -> Source:
        """Where the messages of a receive come from and are acknowledged to."""
        if receive.origin == "failed":
            return self._failures(receive.windows)
        if receive.origin == "messages":
            return self._replay(receive.windows, receive.base)
        return self.source

    def _failures(self, windows: Sequence[str]) -> FailedMessages:
        return FailedMessages(
            name=self.source.name, lake=self.lake, pipeline=self.pipeline.name, windows=tuple(windows)
        )

    def _replay(self, windows: Sequence[str], version: int) -> ReceivedMessages:
        return ReceivedMessages(
            name=self.source.name, lake=self.lake, pipeline=self.pipeline.name, windows=tuple(windows), version=version
        )

    def receive(self, receive: Receive) -> Manifest:
        """Lease messages and write them down; what was planned is leased under the receive's id.

        Raises:
            FencedError: Its claim is over: it stalled since it began, and was given up.
        """
        if not receive.demand:
            return Manifest()
        source, started = self.source_of(receive), time.monotonic()
        self._expect_ours(receive)
        with self.alive(receive):
            # What is read here is read in turn: a share that waits at an empty queue would hold up the next.
            concurrency = self.pipeline.producer.concurrency if receive.demand > FEW else 1
            shares = source.plan(receive.demand, concurrency, receive.receive_id)
            task = ReadShares(source, shares, self.lake, self.pipeline.name, receive.receive_id, receive.window)
            few = sum(share.messages for share in shares) <= FEW
            run = _run_here if few else self._work(receive.receive_id).run
            manifest = run(task, len(shares))
            manifest = self._keep(receive, "receive", manifest, started)
            self.control.adjust(receive.receive_id, manifest.total("received"))
        return manifest

    # Handle

    def handle(self, receive: Receive) -> Manifest:
        """Put what was received through the callbacks; write all that came of it."""
        received = self.receives.manifest(receive, "receive")
        if not received.of_table("messages"):
            return Manifest()
        if (before := self.receives.manifest(receive, "handle")).files and self._decided(receive):
            return before  # executed again after the decision: what was written is what there is
        self._expect_ours(receive)
        # Of an earlier try, which may have sent messages to other batchers: what is decided is what is kept here.
        self.receives.forget_after(receive, "receive")
        started = time.monotonic()
        with self.alive(receive):
            source, work = self.source_of(receive), self._work(receive.receive_id)
            handling = Handling(self.pipeline, source, self.tables, self.control, receive, work)
            return self._keep(receive, "handle", handling.handle(received), started)

    # Batch

    def batch(self, receive: Receive, batcher: str) -> Manifest:
        """Put the messages of one batcher through `handle_batch`."""
        options = self.pipeline.batchers[batcher]
        if not isinstance(options, Batcher):
            raise PipelineError(f"{self.pipeline.name}: batcher {batcher!r} has no callback")
        staged = self.receives.manifest(receive, "handle").of_table(staged_table(receive.receive_id, batcher))
        if not staged:
            return Manifest()
        if (before := self.receives.manifest(receive, f"batch-{batcher}")).files and self._decided(receive):
            return before
        started, receive_id = time.monotonic(), receive.receive_id
        (whole,) = divide(staged, self.pipeline.name, 1)
        with self.alive(receive):
            work = self._work(receive_id)
            cut = batch.CutBatches(self.lake, self.pipeline.name, receive_id, batcher, options.batch_size, whole)
            few = sum(file.rows for file in staged) <= FEW
            planned = _run_here(cut, 1) if few else work.run(cut, 1)
            (plan,) = divide(planned.files, self.pipeline.name, 1)
            tasks = min(options.concurrency, sum(file.rows for file in planned))
            handle = batch.HandleBatches(
                pipeline=self.pipeline,
                batcher=batcher,
                context=self.pipeline.context_of(receive.context),
                source=self.source_of(receive),
                origin=receive.origin,
                lake=self.lake,
                receive_id=receive_id,
                staged=whole,
                plan=plan,
                tasks=tasks,
            )
            try:
                manifest = work.run(handle, tasks)
            except engine.WorkerDiedError:  # a Spark that tries no task again
                _LOG.warning("a batch ended its Python worker: handling again, each in a forked process")
                manifest = work.run(replace(handle, careful=True), tasks)
            return self._keep(receive, f"batch-{batcher}", manifest, started)

    # Decide, publish, acknowledge

    def decide(self, receive: Receive) -> Decision:
        """Commit what became of every message, once; see `lake.decision`.

        Raises:
            FencedError: Another run gave it up for dead meanwhile.
        """
        if receive.demand and self.receives.get(receive.receive_id) is None:
            self._expect_decided(receive)
        if not self._received(receive):
            return Decision(0, 0)
        return decide(self.tables, self.receives, receive, lambda: self._extend(receive), self.source.on_success)

    def _expect_decided(self, receive: Receive) -> None:
        """Refuse to go on with a receive that was given up or taken over: its messages are another run's now."""
        done = self._decided(receive)
        if done is None:
            raise FencedError(
                f"receive {receive.receive_id} is not decided: it was given up while its run stalled, or `commit` was "
                "left out; its messages come back when their lease is over"
            )
        expect_owner(receive, done.owner)

    def expect_finished(self, receive_id: str, run_ids: Sequence[str]) -> None:
        """Refuse to take a receive that is not there any more for done, unless its own run decided it.

        Args:
            receive_id: Which.
            run_ids: The run that asks, and those that it re-executes.

        Raises:
            FencedError: It was given up, and its messages come back; or a re-execution took it over from this run.
        """
        standing = Standing.of(self.tables["outcomes"].open(), receive_id)
        if standing.state != DECIDED:
            raise FencedError(
                f"receive {receive_id} was given up while its run stalled or had failed: its messages come back when "
                "their lease is over, and nothing is left to do here"
            )
        if standing.owner and not any(standing.is_of(run_id) for run_id in run_ids):
            raise FencedError(
                f"receive {receive_id} is not run {run_ids[0]}'s any more: another re-execution took it over and "
                "finished it; nothing is left to do here"
            )

    def _expect_ours(self, receive: Receive) -> None:
        """Refuse to go on where another run works on the receive by now, or it was given up."""
        try:
            ours = self._claims(receive)
        except ControlStoreError:  # a failover is no reason to stop, and it is asked again before the decision
            _LOG.exception("could not ask whose receive %s is", receive.receive_id)
            return
        if not ours:
            raise FencedError(
                f"receive {receive.receive_id} is not run {receive.run_id}'s any more: the run stalled, and the "
                "receive was given up for dead or is being worked on by a re-execution"
            )

    def _received(self, receive: Receive) -> int:
        return self.receives.manifest(receive, "receive").rows("messages") if receive.demand else 0

    def publish(self, receive: Receive) -> dict[str, int]:
        """Make what was decided visible in every table; return the rows by table."""
        if not self._received(receive):
            return dict.fromkeys((name for name in self.tables.names if name != "outcomes"), 0)
        return publish(self.tables, self.receives, receive)

    def acknowledge(self, receive: Receive, patience: Patience = ONCE) -> Acknowledgement:
        """Tell the source, then forget the receive; what the source would not take keeps it for the next run.

        Args:
            receive: Which; decided.
            patience: How often a source that refuses is asked.

        Raises:
            FencedError: It is not decided, or another run's by now: nothing may be acknowledged.
            UnhandledError: What it leased was never written down.
        """
        manifest = self.receives.manifest(receive)
        files = manifest.of_table("outcomes")
        if manifest.files or (receive.demand and self.receives.get(receive.receive_id) is None):
            # Outcomes lie there before they are decided; and who runs this step alone may have left out publishing.
            self._expect_decided(receive)
            self.publish(receive)
        elif receive.demand and not manifest.notes:
            raise UnhandledError(
                f"receive {receive.receive_id} did not come to the end of `receive_messages`, and may hold messages: "
                "execute all steps again, and it receives anew. The next run gives this receive up"
            )
        unpublished: list[str] = []
        if manifest.total("duplicates") or manifest.total(DROPPED):
            unpublished = self._publish_decided()
        source = self.source_of(receive)
        told = Manifest()
        if files and receive.origin == "source":
            parts = divide(files, self.pipeline.name, self.pipeline.producer.concurrency)
            task = SettleOutcomes(source, self.lake, parts, patience, withhold_duplicates=bool(unpublished))
            if source.acknowledges_in_tasks and sum(file.rows for file in files) > FEW:
                told = self._work(receive.receive_id).run(task, len(parts))
            else:
                told = _run_here(task, len(parts))
        errors = [error for notes in told.notes for error in notes["errors"]]
        refusals = [refusal for notes in told.notes for refusal in notes["refusals"]]
        total = sum(file.rows for file in files) if receive.origin == "source" else 0
        left = total - told.total("acknowledged") - told.total("lost")
        if left == told.total("withheld"):  # those are delivered again
            self.receives.remove(receive.receive_id)
        self.control.end(receive.receive_id)
        return Acknowledgement(
            told.total("acknowledged"),
            told.total("lost"),
            left,
            [*unpublished, *errors, *(f"{refusal['ack_id']}: {refusal['reason']}" for refusal in refusals)][:10],
        )

    def _publish_decided(self) -> list[str]:
        """Publish what others decided and have not published: they may have stalled, and here it is acknowledged.

        Returns:
            In words, what cannot be published.
        """
        outcomes = self.tables["outcomes"]
        handle, unpublished = outcomes.open(), []
        for receive_id in self.receives.unfinished():
            try:
                receive = self.receives.get(receive_id)
                if receive is not None and (done := decided(outcomes, handle, receive)):
                    self.publish(done)
            except Exception as error:
                unpublished.append(_unfinishable(receive_id, error))
        return unpublished

    def clear_up(self, tell: Callable[[str], None] = _LOG.info) -> list[str]:
        """Finish what dead runs decided, give up what they did not; return the ids of what was cleared up.

        Args:
            tell: Told in words of a receive that cannot be finished, each time; it is left as it is.
        """
        dead = {claim.receive_id: claim for claim in self.control.over(self.pipeline.name)}
        for receive_id in dead:
            self._work(receive_id).interrupt()  # it would hold up this run's
        # First what lies there, then what lives: a receive claims its room before it leaves a trace.
        unfinished = self.receives.unfinished()
        live = {claim.receive_id for claim in self.control.in_flight(self.pipeline.name)}
        handle = self.tables["outcomes"].open()
        cleared = []
        for receive_id in unfinished:
            try:
                if self._clear_up(receive_id, handle, is_live=receive_id in live):
                    cleared.append(receive_id)
            except Exception as error:  # whatever is wrong with one receive, it keeps no run from beginning
                tell(_unfinishable(receive_id, error))
        for receive_id in dead:
            self.control.end(receive_id, if_over=True)
        return cleared

    def _clear_up(self, receive_id: str, handle: DeltaTable, *, is_live: bool) -> bool:
        """Clear up one receive; say whether there was anything to do that ends it."""
        receive = self.receives.get(receive_id)
        if receive is None:
            # What a task of a dead run wrote after the receive was given up or finished.
            if not is_live:
                self.receives.remove(receive_id)
            return False
        if done := decided(self.tables["outcomes"], handle, receive):
            if is_live:
                # What this run looks up must be published before it is acknowledged.
                self.publish(done)
                return False
            self.acknowledge(done)
        elif is_live or not fence(self.tables, receive_id):
            return False
        else:
            self.source_of(receive).abandon(receive_id)
            self.receives.remove(receive_id)
        return True

    # The lease

    @contextmanager
    def alive(self, receive: Receive) -> Iterator[None]:
        """Keep the leases of a receive alive while a step works.

        Each beats for itself: a queue that is locked for long must not cost the claim, or the run would be taken for
        dead.
        """
        source = self.source_of(receive)
        with (
            _beating(f"claim of receive {receive.receive_id}", lambda: self._claims(receive), LEASE_S / 3),
            _beating(
                f"lease of receive {receive.receive_id} at {source.name}",
                lambda: source.extend(receive.receive_id),
                source.lease_s / 3,
            ),
        ):
            yield

    def _claims(self, receive: Receive) -> bool:
        return self.control.beat(receive.receive_id, LEASE_S, run_id=receive.run_id)

    def _extend(self, receive: Receive) -> bool:
        return self._claims(receive) and self.source_of(receive).extend(receive.receive_id)

    def _keep(self, receive: Receive, step: str, manifest: Manifest, started: float) -> Manifest:
        """Keep a step's manifest, with the time it took."""
        timed = Manifest(manifest.files, [*manifest.notes, {"step": step, "took": time.monotonic() - started}])
        self.receives.keep(receive, step, timed)
        return timed


@contextmanager
def _beating(what: str, renew: Callable[[], bool], every_s: float) -> Iterator[None]:
    """Renew something at once and then at intervals, in a thread of its own."""
    done = threading.Event()

    def beat() -> None:
        while True:
            try:
                renew()
            except Exception:  # a store that fails over is back before two more tries
                _LOG.exception("could not renew the %s; trying again", what)
            if done.wait(every_s):
                return

    thread = threading.Thread(target=beat, name=what, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _unfinishable(receive_id: str, error: Exception) -> str:
    return f"receive {receive_id} cannot be finished and is left as it is: {type(error).__name__}: {error}"


def _run_here(task: engine.Task, shares: int) -> Manifest:
    """Run a task for each share in this process: for few messages that takes less time than to ask Spark."""
    return sum((Manifest.of(rows) for index in range(shares) for rows in task(index)), Manifest())
