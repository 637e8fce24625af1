"""The steps of a run, in order: receive, handle, batch, decide, publish, acknowledge. The ops of a pipeline call them.

Each step writes a manifest to the lake, so that a later process or run sees which steps are done.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from pipeline_platform.lake.decisions import decision
from pipeline_platform.lake.decisions.decision import Decision, FencedError
from pipeline_platform.lake.decisions.ledger import Receive
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import divide
from pipeline_platform.lake.task_report import SAMPLE, TaskReport
from pipeline_platform.model.options import Batcher
from pipeline_platform.model.pipeline import PipelineError
from pipeline_platform.run import batching, dead_letters, handling, notifying
from pipeline_platform.run.dead_letters import Letters
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import intake_of
from pipeline_platform.run.lease import alive, fence_and_release, finish_at_source, renew, working
from pipeline_platform.run.notifying import NotTaken
from pipeline_platform.run.receive_state import Phase, ReceiveState
from pipeline_platform.run.run_events import add_counts, emitting, tasks_of
from pipeline_platform.run.work.spark_work import FEW
from pipeline_platform.source.contract import SourceError
from pipeline_platform.source.patience import patiently
from pipeline_platform.tasks.acknowledge.acknowledger import ONCE, AcknowledgeOutcomes, Acknowledger
from pipeline_platform.tasks.receive.read_shares import ReadShares


class Acknowledgement(NamedTuple):
    """Answer of a source for a receive.

    Attributes:
        acknowledged: Messages that the source acknowledged. With `lost` and `unacknowledged` they are all messages of
            the receive.
        lost: Messages whose lease expired, or whose queue was deleted. Redeliveries are known as duplicates.
        unacknowledged: Messages that the source refused: the next run acknowledges them.
        errors: A sample of errors, for people.
        letters: Dead letters that were sent.
        not_taken: Messages for which the pipeline's own `acknowledge` raised, with the errors.
        latency: Messages by seconds since their publication; empty for a source without publication times, for retries
            and replays, and if a message is unacknowledged.
        is_kept: Whether the receive stays unfinished, so that a later run acknowledges the rest.
    """

    acknowledged: int
    lost: int
    unacknowledged: int
    errors: list[str]
    letters: Letters = Letters()
    not_taken: NotTaken = NotTaken()
    latency: Mapping[float, int] = {}
    is_kept: bool = False


def advance(flow: Flow, receive: Receive, phase: Phase) -> None:
    """Bring a receive, whose messages are leased, to a phase: perform the steps that are missing.

    A run that skips steps, such as a re-execution of its last ones, thus performs them as well.
    """
    if phase >= Phase.HANDLED:
        handle_messages(flow, receive)
    if phase >= Phase.BATCHED:
        batch_messages(flow, receive)
    is_due = phase >= Phase.PUBLISHED and flow.ledger.manifest(receive).files
    if is_due and ReceiveState(flow, receive.receive_id).phase < Phase.PUBLISHED:
        with alive(flow, receive):
            decide(flow, receive)
            publish(flow, receive)


def receive_messages(flow: Flow, receive: Receive) -> Manifest:
    """Lease messages and write them to the lake, from which all later steps read. A run that is to stop leases none.

    Raises:
        FencedError: The receive was fenced: its run stalled after it began.
    """
    if not receive.demand:
        return Manifest()
    if flow.worker is not None and receive.demand <= FEW and not flow.pipeline.uses_columns():
        flow.worker.start()  # it loads while this process reads
    with working(flow, receive):
        read = partial(_read, flow, receive)
        manifest = _step(flow, receive, "receive", "receive", read, demand=receive.demand)
        flow.control.adjust(receive.receive_id, manifest.totals.received)
    return manifest


def _read(flow: Flow, receive: Receive) -> Manifest:
    intake, receive_id = intake_of(flow, receive), receive.receive_id
    source = intake.source
    # The driver reads few messages in turn: a share that waits at an empty queue would hold up the next.
    concurrency = flow.concurrency if receive.demand > FEW else 1
    stops = flow.quota.key, receive_id  # its pipeline or producer is drained, or its run was asked to end
    is_stopping = intake.is_outside and any(flow.control.draining(key) is not None for key in stops)
    demand = 0 if is_stopping else receive.demand
    plan = partial(source.plan, demand, concurrency, receive_id)
    shares = patiently(plan, source.patience) if demand else []
    task = ReadShares(source, shares, flow.lake, flow.pipeline.name, receive_id, receive.window)
    messages = sum(share.messages for share in shares) if source.in_tasks else 0
    return flow.work(receive_id, "receive").run(task, len(shares), messages)


def handle_messages(flow: Flow, receive: Receive) -> Manifest:
    """Call the callbacks for the messages of a receive, and write rows, failures and outcomes.

    Raises:
        PipelineError: A replay was asked to stop. It counts only as a whole.
        FencedError: The receive was fenced.
    """
    received, before = (flow.ledger.manifest(receive, step) for step in ("receive", "handle"))
    if not received.of_table("messages"):
        return Manifest()
    if before.reports:
        return before
    with working(flow, receive):
        manifest = _step(flow, receive, "handle", "handle", partial(handling.handle, flow, receive, received))
    if (not_begun := manifest.totals.released) and intake_of(flow, receive).is_whole:
        fence_and_release(flow, receive)
        flow.control.end(receive.receive_id)
        raise PipelineError(
            f"{receive.pipeline}: stopped this {intake_of(flow, receive).name} with {not_begun:,} unstarted messages. "
            "Its windows stay as they were. Start it again once the pipeline is resumed"
        )
    return manifest


def batch_messages(flow: Flow, receive: Receive, *batchers: str) -> dict[str, Manifest]:
    """Call `handle_batch` for the staged messages of a receive, all batchers in parallel, or only `batchers`.

    Batchers that are done are left as they are. Afterwards, messages whose children waited for batches get outcomes.

    Returns:
        Manifests by batcher.
    """
    options, handled = flow.pipeline.batchers, flow.ledger.manifest(receive, "handle")
    names = batchers or [name for name, batcher in options.items() if isinstance(batcher, Batcher)]
    written = {name: flow.ledger.manifest(receive, f"batch-{name}") for name in names}
    staged = [name for name in names if handled.staged(name)]
    left = [name for name in staged if not written[name].reports]

    def batch(name: str, most_tasks: int | None) -> None:
        work = partial(batching.batch, flow, receive, handled, name, most_tasks)
        written[name] = _step(flow, receive, f"batch-{name}", "batcher", work, batcher=name)

    if left:
        with working(flow, receive):
            largest = max(sum(file.rows for file in handled.staged(name)) for name in left)
            most = batching.most_tasks(flow, len(left)) if flow.worker is None or largest > FEW else None
            batching.run_batchers({name: partial(batch, name, most) for name in left}, flow, receive)
    if parents := batching.parents_left(flow, receive, handled):
        with working(flow, receive):
            end_parents = partial(batching.end_parents, flow, receive, parents)
            _step(flow, receive, batching.PARENTS_STEP, "parents", end_parents)
    return written


def _step(flow: Flow, receive: Receive, step: str, name: str, work: Callable[[], Manifest], **fields: Any) -> Manifest:
    """Write down what a step wrote, with the seconds it took, and emit its event."""
    started = time.monotonic()
    with emitting(name, flow, receive, **fields) as event:
        manifest = work()
        timed = manifest + Manifest(reports=[TaskReport(step=step, seconds=time.monotonic() - started)])
        flow.ledger.write(receive, step, timed)
        add_counts(event, name, timed)
    return timed


def decide(flow: Flow, receive: Receive) -> Decision:
    """Make the outcomes of a receive final, once; see `lake.decision`.

    Raises:
        FencedError: The receive was fenced.
    """
    state = ReceiveState(flow, receive.receive_id)
    if receive.demand and state.receive is None and not state.is_decided:
        raise FencedError.of(receive.receive_id)
    if not receive.demand or not flow.ledger.manifest(receive, "receive").rows("messages"):
        return Decision(0, 0)
    with emitting("decide", flow, receive) as event:
        on_success, still_ours = flow.source.on_success, partial(renew, flow, receive)
        decided = decision.decide(flow.tables, flow.ledger, receive, still_ours, on_success)
        event.add(**decided._asdict())
        return decided


def publish(flow: Flow, receive: Receive) -> dict[str, int]:
    """Commit the rows of a decided receive to its tables; return the number of rows by table."""
    with emitting("publish", flow, receive) as event:
        rows = decision.publish(flow.tables, receive, flow.ledger.manifest(receive))
        event.add(rows=sum(rows.values()))
        return rows


def acknowledge(flow: Flow, receive: Receive, acknowledger: Acknowledger = ONCE) -> Acknowledgement:
    """Send dead letters, call the pipeline's own `acknowledge`, acknowledge at the source, and remove the record.

    The record stays for a later run if the source refuses a message, `acknowledge` raises, or dead letters cannot be
    sent.

    Args:
        flow: The pipeline and its resources.
        receive: A published receive.
        acknowledger: How often to ask a source that refuses.

    Raises:
        FencedError: The receive was fenced: nothing may be acknowledged.
        UnhandledError: The receive is not published.
    """
    with emitting("acknowledge", flow, receive) as event:
        manifest, intake = flow.ledger.manifest(receive), intake_of(flow, receive)
        totals = manifest.totals
        files = manifest.of_table("outcomes") if intake.is_outside else []
        state = ReceiveState(flow, receive.receive_id)
        if receive.demand and (manifest.files or state.phase is not Phase.LEASED):
            state.expect_published()
        letters = dead_letters.send_dead_letters(flow, receive, manifest)
        not_taken = notifying.notify(flow, receive, manifest)
        looks = totals.duplicates.total() or totals.dropped
        unpublished = _publish_others(flow, receive) if looks else []
        written, messages = Manifest(), sum(file.rows for file in files)
        source = intake.source
        if files and source.acknowledges_by_id:
            # One part per connection: if it is lost between two parts, the source redelivers messages of the first.
            parts = divide(files, flow.pipeline.name, flow.concurrency if source.in_tasks else 1)
            task = AcknowledgeOutcomes(source, flow.lake, parts, acknowledger, bool(unpublished), not_taken.rows)
            work = flow.work(receive.receive_id, "acknowledge")
            written = work.run(task, len(parts), messages if source.in_tasks else 0)
        event.add(tasks=tasks_of(written))
        answer = written.totals
        acknowledged, lost = answer.acknowledged, answer.lost
        # Once, by its own run, and not for retries: old failures that fail again show nothing about new messages.
        if intake.is_outside and flow.quota.breaker and state.is_live:
            flow.quota.judge(totals.handled.total() + totals.permanent + totals.retryable, totals.retryable)
        is_over = source.acknowledges_by_id or not unpublished
        if not source.acknowledges_by_id and not unpublished and not not_taken.messages:
            acknowledged = messages  # by `finish`
        left, is_kept = messages - acknowledged - lost, True
        errors = [error for error in (letters.error, *not_taken.errors, *answer.errors) if error]
        if left == answer.withheld:  # the source redelivers these
            try:
                patiently(partial(finish_at_source, flow, receive, manifest), source.patience)
                if not letters.unsent:
                    flow.ledger.remove(receive.receive_id)
                    is_kept = False
            except SourceError as error:
                acknowledged = acknowledged if source.acknowledges_by_id else 0
                left, errors, is_over = messages - acknowledged - lost, [*errors, str(error)], False
        if is_kept and manifest.files:
            flow.ledger.note_published(receive)
        if is_over and not letters.unsent and not not_taken.messages:
            if unhandled := totals.duplicates.total() + totals.released:
                # They took hardly any time: if they counted, the next run would be sized as if callbacks were faster.
                flow.control.adjust(receive.receive_id, max(0, totals.received - unhandled))
            flow.control.finish(receive.receive_id)
        else:  # its messages do not wait at the source: the expired claim makes the sensor request a run
            flow.control.expire(receive.receive_id)
        losses = [f"lost: {reason}" for reason in sorted(set(answer.losses))]
        sample = [*unpublished, *errors, *losses, *answer.refusals][:SAMPLE]
        latency = totals.latency(time.time()) if receive.origin == "source" and not left else {}
        event.add(acknowledged=acknowledged, lost=lost, unacknowledged=left, letters=letters.sent, latency=latency)
        return Acknowledgement(acknowledged, lost, left, sample, letters, not_taken, latency, is_kept)


def _publish_others(flow: Flow, receive: Receive) -> list[str]:
    """Publish the decided receives of other runs, whose messages this run acknowledges as duplicates.

    Returns:
        For people: receives that cannot be published, or wait for the pipeline's own `acknowledge`.
    """
    unpublished = []
    for receive_id in sorted({*flow.ledger.unfinished()} - {receive.receive_id}):
        try:
            if done := ReceiveState(flow, receive_id).unfinished:
                publish(flow, done)
                if notifying.waits(flow, done, flow.ledger.manifest(done)):
                    unpublished.append(f"receive {receive_id} waits for `acknowledge`")
        except Exception as error:
            unpublished.append(unfinishable(receive_id, error))
    return unpublished


def unfinishable(receive_id: str, error: Exception) -> str:
    """Describe a receive that stays unfinished."""
    return f"Could not finish receive {receive_id}, which stays as it is: {type(error).__name__}: {error}"
