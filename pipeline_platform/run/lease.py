"""Leases of a receive, its claim in the control store and its messages at the source: renewal, end and release."""

import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.control.store import ControlStoreError
from pipeline_platform.lake.decisions import decision
from pipeline_platform.lake.decisions.decision import FencedError
from pipeline_platform.lake.decisions.early_acks import Notes
from pipeline_platform.lake.decisions.ledger import Receive
from pipeline_platform.lake.manifest import File, Manifest
from pipeline_platform.lake.reader import divide, groups, only, read_ranges, whole
from pipeline_platform.lake.tables import OUTCOMES
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import common, intake_of
from pipeline_platform.run.receive_state import Phase, ReceiveState
from pipeline_platform.source.patience import patiently
from pipeline_platform.tasks.receive.undecided import KeepForgotten

_LOG = logging.getLogger(__name__)

HELD_ROWS = 65_536
CLAIM_S = 60.0
"""Seconds until a receive's claim expires unless its run renews it."""
BETWEEN_STEPS_S = 86_400.0
"""Seconds until a claim expires between two steps in different processes: no process renews it, and the next step may
start late. When Dagster marks the run as finished, the claim is released immediately."""


@contextmanager
def alive(flow: Flow, receive: Receive) -> Iterator[None]:
    """Renew both leases of a receive while a step works, each when it is due.

    Each lease has a thread: if a queue is locked for long, the claim must not expire.
    """
    every_s = intake_of(flow, receive).source.extend_every_s
    with (
        claimed(flow, receive),
        _renewing(flow.beats, _lease("messages", receive), lambda: _extend(flow, receive), every_s)
        if every_s
        else nullcontext(),
    ):
        yield


def claimed(flow: Flow, receive: Receive) -> AbstractContextManager[None]:
    """Renew the claim of a receive that leases no messages yet."""
    return _renewing(flow.beats, _lease("claim", receive), lambda: beat(flow, receive), CLAIM_S / 3)


@contextmanager
def working(flow: Flow, receive: Receive) -> Iterator[None]:
    """Renew the leases of a receive while a step works on it.

    Raises:
        FencedError: The receive was fenced. Replaces an error of the step that follows from it, such as missing files.
    """
    try:
        has_claim = beat(flow, receive)
    except ControlStoreError:  # the store may fail over; the decision asks again
        _LOG.exception("could not renew the claim of receive %s", receive.receive_id)
        has_claim = True
    if not has_claim:
        raise FencedError.of(receive.receive_id)
    with alive(flow, receive):
        try:
            yield
        except FencedError:
            raise
        except Exception as error:
            if _is_fenced(flow, receive):
                raise FencedError.of(receive.receive_id) from error
            raise


def _is_fenced(flow: Flow, receive: Receive) -> bool:
    try:
        return ReceiveState(flow, receive.receive_id).phase is Phase.FENCED
    except Exception:  # the step's own error is the one to report
        _LOG.exception("could not look up whether receive %s is fenced", receive.receive_id)
        return False


@contextmanager
def standing_by(flow: Flow, run_id: str, then_s: float = 0) -> Iterator[None]:
    """Keep a claim of no messages for a run of several receives, so that it counts as active between two receives.

    Args:
        flow: The pipeline and its resources.
        run_id: The run.
        then_s: Seconds for which the claim stays after the block, until the next step of the run renews it. By
            default, and after an error, it ends with the block.
    """
    what = f"place of run {run_id}"

    def renew() -> bool:
        flow.beats[what] = time.monotonic()
        flow.control.stand_by(flow.quota.key, run_id, CLAIM_S)
        return True

    renew()
    stays_s = 0.0
    try:
        with _renewing(flow.beats, what, renew, CLAIM_S / 3):
            yield
        stays_s = then_s
    finally:
        if stays_s:
            flow.control.stand_by(flow.quota.key, run_id, stays_s)
        else:
            flow.control.end(run_id)


def keep_until_next_step(flow: Flow, receive: Receive) -> None:
    """Renew the claim at the end of a step if the next step runs in another process."""
    try:
        flow.control.beat(receive.receive_id, BETWEEN_STEPS_S, run_id=receive.run_id)
    except ControlStoreError:  # the next step renews it, if it starts before the claim expires
        _LOG.exception("could not renew the claim of receive %s until the next step", receive.receive_id)


def begun(flow: Flow, receive: Receive) -> None:
    """Store that both leases start now: the run has just made its claim, and leases its messages next."""
    flow.beats[_lease("claim", receive)] = flow.beats[_lease("messages", receive)] = time.monotonic()


def ended(flow: Flow, receive: Receive) -> None:
    """Remove what `begun` stored: a run of many receives must not remember them all."""
    for lease in ("claim", "messages"):
        flow.beats.pop(_lease(lease, receive), None)


def beat(flow: Flow, receive: Receive) -> bool:
    """Renew the claim. Return whether this run still has it."""
    flow.beats[_lease("claim", receive)] = time.monotonic()
    return flow.control.beat(receive.receive_id, CLAIM_S, run_id=receive.run_id)


def renew(flow: Flow, receive: Receive) -> bool:
    """Renew the claim now, and the lease at the source if it is due. Return whether this run still has both.

    A source whose leases do not expire is asked each time, because it may have lost them.

    The call waits for an unavailable source up to the source's `patience`. The lease at the source is renewed only when
    due, because some sources need a request for every few messages, and a decision calls this before each attempt.
    """
    source = intake_of(flow, receive).source
    every_s = source.extend_every_s
    is_due = every_s is None or time.monotonic() >= flow.beats.get(_lease("messages", receive), -math.inf) + every_s
    return beat(flow, receive) and (not is_due or patiently(lambda: _extend(flow, receive), source.patience))


def _extend(flow: Flow, receive: Receive) -> bool:
    flow.beats[_lease("messages", receive)] = time.monotonic()
    return intake_of(flow, receive).source.extend(receive.receive_id, lambda: held(flow, receive))


def held(flow: Flow, receive: Receive) -> Iterator[tuple[str, list[str]]]:
    """Yield the `ack_id`s of a receive's messages by `ack_ref`, in portions."""
    received = flow.ledger.manifest(receive, "receive").of_table("messages")
    yield from _ack_ids(_rows(flow, received, "ack_ref", "ack_id"))


def _given_back(flow: Flow, receive: Receive, *, begun: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield the `ack_id`s of a decided receive's started or unstarted messages by `ack_ref`, in portions."""
    decided = flow.ledger.manifest(receive).of_table("outcomes")
    compare = pc.not_equal if begun else pc.equal
    rows = _rows(flow, decided, "ack_ref", "ack_id", "outcome")
    yield from _ack_ids(some.filter(compare(some.column("outcome"), "returned")) for some in rows)


def finish_at_source(flow: Flow, receive: Receive, manifest: Manifest) -> None:
    """End a receive at its source, and release the messages that were not started."""
    source = intake_of(flow, receive).source
    if source.gives_back_offsets and manifest.totals.released:
        parts = (partial(_given_back, flow, receive, begun=begun) for begun in (False, True))
        source.give_back(receive.receive_id, *parts)
    source.finish(receive.receive_id, partial(held, flow, receive))


def _rows(flow: Flow, files: Sequence[File], *columns: str) -> Iterator[pa.RecordBatch]:
    ranges = whole(files, flow.pipeline.name)
    yield from (rows for _, rows in read_ranges(flow.lake, ranges, only(OUTCOMES, *columns), HELD_ROWS))


def _ack_ids(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, list[str]]]:
    for rows in batches:
        for ack_ref, mine in groups(rows, "ack_ref"):
            yield ack_ref, mine.column("ack_id").to_pylist()


def _lease(what: str, receive: Receive) -> str:
    return f"{what} of receive {receive.receive_id}"


@contextmanager
def _renewing(beats: dict[str, float], what: str, renew: Callable[[], bool], every_s: float) -> Iterator[None]:
    done = threading.Event()

    def run() -> None:
        while not done.wait(max(0.0, beats.get(what, -math.inf) + every_s - time.monotonic())):
            try:
                renew()
            except Exception:  # a failover of the store takes less time than two more attempts
                _LOG.exception("Could not renew the %s; trying again", what)

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def fence_and_release(flow: Flow, receive: Receive) -> Receive | None:
    """Fence a receive, release its messages, and remove its record.

    The source has deleted the messages that were acknowledged early. A new receive records them as open failures, so
    that they can be retried.

    Returns:
        A decided receive that is to be published and acknowledged: the receive itself, if it was decided before it
        could be fenced, or the one of the messages that were acknowledged early. None if there is neither.
    """
    source = intake_of(flow, receive).source
    notes = Notes(flow.lake, flow.pipeline.name, receive.receive_id)
    notes.close()  # a task that still runs acknowledges nothing after this
    if decided := decision.fence(flow.tables, receive):
        return decided
    source.abandon(receive.receive_id, lambda: held(flow, receive))
    acknowledged_early = any(source.ack_policy.ends(entry.action) for entry in notes.read().values())
    kept = _keep_forgotten(flow, receive) if acknowledged_early else None
    flow.ledger.remove(receive.receive_id)
    return kept


def _keep_forgotten(flow: Flow, fenced: Receive) -> Receive:
    """Record the messages that were acknowledged early as open failures, in another receive, and decide them.

    The run after a crash repeats it in one more receive, whose decision leaves out decided messages.
    """
    receive = fenced.model_copy(update={"receive_id": uuid.uuid4().hex})
    flow.ledger.begin(receive)
    received = flow.ledger.manifest(fenced, "receive").of_table("messages")
    parts = divide(received, flow.pipeline.name, flow.processors.concurrency)
    source = intake_of(flow, receive).source  # the class may have lost `acks_immediately` since
    task = KeepForgotten(**{**common(flow, receive), "source": source}, parts=parts, fenced=fenced.receive_id)
    messages = sum(file.rows for file in received)
    kept = flow.work(receive.receive_id, "release").run(task, len(parts), messages)
    raw = kept.of_table("messages")
    flow.ledger.write(receive, "handle", Manifest([file for file in kept if file not in raw], kept.reports))
    flow.ledger.write(receive, "receive", Manifest(raw))
    decision.decide(flow.tables, flow.ledger, receive, on_success=source.on_success)
    return receive
