"""Promises about the effects of ack actions."""

import math
from contextlib import suppress

from pipeline_platform.source.contract import Refused, SourceError
from pipeline_platform.source.log import LogSource
from pipeline_platform.testing.returning import RETURNS
from pipeline_platform.testing.trial import Received, Trial, promise

ACKNOWLEDGES = (*RETURNS, "what_is_ended_is_gone")
LAPSES = (*RETURNS, "leases_end")
POSITIONS = "positions_wait_for_gaps"


@promise(builds_on=RETURNS)
def what_is_ended_is_gone(trial: Trial) -> None:
    """Messages that an ack action ends are never redelivered."""
    acknowledged = _acknowledged(trial, trial.actions(ending=True))
    ended = [received for _, received in acknowledged]
    trial.lapse(*ended)
    trial.lose(*ended)
    rest = set(trial.sent).difference(*(received.data for received in ended))
    receives = (*trial.come(rest, trial.soon_s), trial.receive(by=trial.another()))
    came = {data for received in receives for data in received.data}
    for action, received in acknowledged:
        wrong = came & set(received.data)
        trial.expect(
            not wrong, f"no redelivery of {len(received.rows)} messages acknowledged by {action!r}", len(wrong)
        )


@promise(builds_on=LAPSES)
def what_is_not_ended_comes_back(trial: Trial) -> None:
    """Messages that an ack action does not end are redelivered."""
    actions = sorted(trial.actions(ending=False), key="noop".__eq__)  # noop last: it may block later messages
    trial.need(actions, "all its ack actions end a message")
    acknowledged = _acknowledged(trial, actions)
    trial.lapse(*(received for _, received in acknowledged))
    came = {data for received in trial.come(trial.sent, trial.patience_s) for data in received.data}
    for action, received in acknowledged:
        lacking = set(received.data) - came
        expected = f"redelivery of {len(received.rows)} messages acknowledged by {action!r}"
        trial.expect(not lacking, expected, f"{len(lacking)} missing")


@promise(builds_on=(*RETURNS, "what_is_not_ended_comes_back"), messages=5)
def what_is_given_back_comes_at_once(trial: Trial) -> None:
    """Ack actions that do not end a message, except `noop`, release it to the next receive at once."""
    actions = _giving_back(trial)
    for action in actions:
        received = trial.first()
        trial.acknowledge(received, action)
        back = trial.expect_back(received.data, trial.soon_s, f"at once, after {action!r}")
        trial.lose(*back)


@promise(family=LogSource, builds_on=(*ACKNOWLEDGES, POSITIONS, "shares_give_the_same_again"))
def what_is_not_begun_comes_at_once(trial: Trial) -> None:
    """Unstarted messages of a receive that a stopped run releases are redelivered at once; the others are not."""
    received = trial.first()
    started, left = received.part(received.rows[::2]), received.part(received.rows[1::2])
    for _ in range(2):  # as if the first run had crashed before it finished
        received.source.give_back(received.receive_id, left.held, started.held)
    received.source.finish(received.receive_id, received.held)
    back = trial.expect_back(left.data, trial.soon_s, "at once, that were not started")
    wrong = {data for again in back for data in again.data} & set(started.data)
    trial.expect(not wrong, f"no redelivery of {len(started.rows)} started messages", len(wrong))


@promise(builds_on=(*RETURNS, "what_is_not_ended_comes_back"), messages=5)
def delays_are_kept(trial: Trial) -> None:
    """Messages that are released with a delay are not redelivered before its end."""
    actions = {action: effect.longest_s for action, effect in trial.source.ack_actions.items() if effect.longest_s}
    trial.need(actions, "none of its ack actions takes a delay")
    for action, longest_s in actions.items():
        delay_s = min(math.ceil(trial.lease_s or 2) + 1, longest_s)
        received = trial.first()
        trial.acknowledge(received, f"{action}:{delay_s}")
        trial.expect_none_of(received.data, f"within the delay of '{action}:{delay_s}'")
        trial.server.sleep(delay_s)
        trial.lose(*trial.expect_back(received.data, trial.patience_s, f"after the delay of '{action}:{delay_s}'"))


@promise(builds_on=(*ACKNOWLEDGES, "finishing_twice_is_harmless"))
def acknowledging_twice_is_harmless(trial: Trial) -> None:
    """`acknowledge` may be called twice for a message: refusals have `lost` set, and other messages are unaffected."""
    received, action = trial.first(demand=len(trial.sent) // 2), trial.actions(ending=True)[0]
    rest = set(trial.sent) - set(received.data)
    trial.acknowledge(received, action)
    refused = [refusal for refusal in trial.acknowledge(received, action) if not refusal.lost]
    trial.expect(not refused, "no refusals, or refusals with lost=True", refused[:1])
    trial.expect_back(rest, trial.soon_s, "that were not acknowledged")


@promise(builds_on=ACKNOWLEDGES, messages=5)
def acknowledging_works_elsewhere(trial: Trial) -> None:
    """A task in another process can acknowledge the messages of a receive."""
    trial.need(trial.source.in_tasks, "only the process that received can acknowledge")
    received, action = trial.first(), trial.actions(ending=True)[0]
    refused = trial.acknowledge(received, action, by=trial.another())
    trial.expect(not refused, "no refusals", refused[:1])
    trial.lose(received)
    trial.expect_none_of(received.data, f"that another process acknowledged by {action!r}")


@promise(builds_on=(*ACKNOWLEDGES, *LAPSES, POSITIONS), messages=5)
def acknowledging_late_touches_nothing(trial: Trial) -> None:
    """A late acknowledgement does not affect messages that another receive has leased since."""
    late = trial.first()
    trial.lapse(late)
    held = trial.expect_back(late.data, trial.patience_s, "again")
    for action in (*trial.actions(ending=False), *trial.actions(ending=True)):
        with suppress(SourceError):  # its connection may be closed
            trial.acknowledge(late, action)
    trial.expect_none_of(late.data, "that a later receive has leased")
    trial.lose(*held)
    trial.expect_back(late.data, trial.patience_s, "once more")


@promise(builds_on=(*ACKNOWLEDGES, "what_is_given_back_comes_at_once"), messages=10)
def refusals_are_reported(trial: Trial) -> None:
    """Refused messages are returned as `Refused`, and do not affect other messages of their group."""
    trial.need(trial.source.acknowledges_by_id, "it acknowledges whole receives")
    received, giving_back = trial.first(), _giving_back(trial)[0]
    kept, given = received.part(received.rows[::2]), received.part(received.rows[1::2])
    for ack_ref, ack_ids in given.held():
        trial.source.acknowledge(giving_back, ack_ref, ack_ids)
    came = {data for again in trial.come(given.data, trial.soon_s) for data in again.data}
    trial.need(set(given.data) <= came, "it releases nothing while the receive has other messages")
    refused = trial.acknowledge(received, trial.actions(ending=True)[0])
    strange = [refusal for refusal in refused if not isinstance(refusal, Refused)]
    trial.expect(not strange, "Refused for each refused message", strange[:1])
    wrong = {refusal.ack_id for refusal in refused} & {row["ack_id"] for row in kept.rows}
    trial.expect(not wrong, "no refusals of messages that the receive still has", f"{len(wrong)} refused")
    trial.lose(received)
    trial.expect_none_of(kept.data, "that were acknowledged together with refused messages")


@promise(builds_on=(*ACKNOWLEDGES, POSITIONS))
def finishing_twice_is_harmless(trial: Trial) -> None:
    """`finish` may be called twice, also by the next run, and does not affect other receives."""
    action = trial.actions(ending=True)[0]
    done = trial.first(demand=len(trial.sent) // 2)
    held = trial.receive(by=trial.another())
    trial.need(held.rows, "it leases all messages to one receive at a time")
    trial.acknowledge(done, action)
    done.source.finish(done.receive_id, done.held)
    trial.another().finish(done.receive_id, done.held)
    trial.lose(held)
    trial.expect_back(held.data, trial.patience_s, "of another receive")


def _acknowledged(trial: Trial, actions: list[str]) -> list[tuple[str, Received]]:
    acknowledged = []
    for action in actions:
        received = trial.first(demand=len(trial.sent) // (len(actions) + 1))
        trial.acknowledge(received, action)
        acknowledged.append((action, received))
    return acknowledged


def _giving_back(trial: Trial) -> list[str]:
    actions = [action for action in trial.actions(ending=False) if action != "noop"]
    trial.need(actions, "none of its ack actions releases messages")
    return actions


@promise(family=LogSource, builds_on=ACKNOWLEDGES)
def positions_wait_for_gaps(trial: Trial) -> None:
    """No offset is committed beyond a message that is not acknowledged."""
    first = trial.first(demand=len(trial.sent) // 2)
    later = trial.receive()
    trial.need(later.rows, "it leases a partition to one receive at a time")
    trial.acknowledge(later, "ack")
    committed = _committed(trial)
    for partition, (begin, _) in _bounds(first).items():
        trial.expect(
            committed.get(partition, 0) <= begin,
            f"partition {partition} committed up to at most {begin}",
            committed.get(partition),
        )


@promise(family=LogSource, builds_on=(*ACKNOWLEDGES, "positions_wait_for_gaps"))
def logs_remember(trial: Trial) -> None:
    """The log stores the acknowledged offset, and a source without other state continues there."""
    done = trial.first(demand=len(trial.sent) // 2)
    trial.acknowledge(done, "ack")
    committed, wanted = _committed(trial), {partition: past for partition, (_, past) in _bounds(done).items()}
    trial.expect(wanted.items() <= committed.items(), f"committed up to {wanted}", committed)
    trial.new_store()
    trial.expect_back(set(trial.sent) - set(done.data), trial.soon_s, "that were not acknowledged")
    trial.expect_none_of(done.data, "that were acknowledged")


def _committed(trial: Trial) -> dict[str, int]:
    source = trial.another()
    assert isinstance(source, LogSource)
    extents = source.extents().items()
    return {partition: extent.committed for partition, extent in extents if extent.committed is not None}


def _bounds(received: Received) -> dict[str, tuple[int, int]]:
    """Return the first offset of a receive, and the offset after its last, by partition."""
    bounds: dict[str, tuple[int, int]] = {}
    for share in received.shares:
        for partition, first, past, _ in share.at["spans"]:
            known = bounds.get(partition, (first, past))
            bounds[partition] = min(first, known[0]), max(past, known[1])
    return bounds
