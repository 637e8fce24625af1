"""Fencing an undecided receive and releasing its messages to their source, without losing one."""

import uuid

from pipeline_platform.lake.decisions import decision
from pipeline_platform.lake.decisions.early_acks import Notes
from pipeline_platform.lake.decisions.ledger import Receive
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import divide
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import common, intake_of
from pipeline_platform.run.lease import held
from pipeline_platform.tasks.receive.undecided import KeepForgotten


def fence_and_release(flow: Flow, receive: Receive) -> Receive | None:
    """Fence a receive, release its messages, and remove its record.

    Messages that `ack_immediately` acknowledged are no longer at the source. A receive of their own records them as
    open failures, and decides.

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
    """Decide a receive of the messages that the source has forgotten, as open failures.

    After a crash this is done again under another id: the decision drops messages that are decided already.
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
