"""Giving up a receive that a dead run did not decide: its messages go back to their source, none is lost."""

import uuid

from pipeline_platform.lake import decision
from pipeline_platform.lake.early_acks import Notes
from pipeline_platform.lake.ledger import Receive
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import divide
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import common, intake_of
from pipeline_platform.run.lease import held
from pipeline_platform.tasks.receive.undecided import KeepForgotten


def give_up(flow: Flow, receive: Receive) -> Receive | None:
    """Give a receive's messages back, and forget it.

    What `ack_immediately` acknowledged is not there any more. These messages are decided, as open failures.

    Returns:
        The receive, if something of it is decided and is yet to be published; None if nothing of it is left.

    Raises:
        FencedError: Another run gives it up at the same time.
    """
    source = intake_of(flow, receive).source
    notes = Notes(flow.lake, flow.pipeline.name, receive.receive_id)
    notes.close()  # a task that lives yet acknowledges nothing from here on
    if not any(source.ack_policy.ends(entry.action) for entry in notes.read().values()):
        done = decision.fence(flow.tables, receive)
        if done is None:
            source.abandon(receive.receive_id, lambda: held(flow, receive))
            flow.ledger.remove(receive.receive_id)
        return done
    mine, is_decided = decision.take_over(flow.tables, flow.ledger, receive, uuid.uuid4().hex)
    if not is_decided:
        source.abandon(receive.receive_id, lambda: held(flow, mine))
        _keep_forgotten(flow, mine)
        decision.decide(flow.tables, flow.ledger, mine, on_success=source.on_success)
    return mine


def _keep_forgotten(flow: Flow, receive: Receive) -> None:
    """Put the messages that the source has forgotten in the place of all that was received and handled.

    A run that dies here leaves either all that was received, or what this makes of it: the next one does it again.
    """
    flow.ledger.forget_after(receive, "receive")
    received = flow.ledger.manifest(receive, "receive").of_table("messages")
    parts = divide(received, flow.pipeline.name, flow.processors.concurrency)
    # The source in any case: the class may have lost `acks_immediately` since.
    task = KeepForgotten(**{**common(flow, receive), "source": intake_of(flow, receive).source}, parts=parts)
    messages = sum(file.rows for file in received)
    kept = flow.work(receive.receive_id, "give-up").run(task, len(parts), messages)
    raw = kept.of_table("messages")
    flow.ledger.write(receive, "handle", Manifest([file for file in kept if file not in raw], kept.notes))
    flow.ledger.write(receive, "receive", Manifest(raw))
