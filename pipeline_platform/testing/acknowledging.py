"""Promises about what becomes of messages by the word that acknowledges them."""

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
    """What is acknowledged by a word that ends it never comes again."""
    acknowledged = _acknowledged(trial, trial.words(ending=True))
    ended = [received for _, received in acknowledged]
    trial.lapse(*ended)
    trial.lose(*ended)
    rest = set(trial.sent).difference(*(received.data for received in ended))
    came = {data for one in (*trial.come(rest, trial.soon_s), trial.receive(by=trial.another())) for data in one.data}
    for word, received in acknowledged:
        wrong = came & set(received.data)
        trial.expect(not wrong, f"none of {len(received.rows)} messages that were acknowledged by {word!r}", len(wrong))


@promise(builds_on=LAPSES)
def what_is_not_ended_comes_back(trial: Trial) -> None:
    """What is acknowledged by a word that does not end it comes again."""
    words = sorted(trial.words(ending=False), key="noop".__eq__)  # last: it may hold back what comes after it
    trial.need(words, "all its words end a message")
    acknowledged = _acknowledged(trial, words)
    trial.lapse(*(received for _, received in acknowledged))
    came = {data for one in trial.come(trial.sent, trial.patience_s) for data in one.data}
    for word, received in acknowledged:
        lacking = set(received.data) - came
        trial.expect(
            not lacking, f"{len(received.rows)} messages that were acknowledged by {word!r}", f"{len(lacking)} less"
        )


@promise(builds_on=(*RETURNS, "what_is_not_ended_comes_back"), messages=5)
def what_is_given_back_comes_at_once(trial: Trial) -> None:
    """A word that gives messages back, as all do that end none but `noop`, gives them to the next receive."""
    words = _giving_back(trial)
    for word in words:
        received = trial.first()
        trial.acknowledge(received, word)
        back = trial.expect_back(received.data, trial.soon_s, f"at once, after {word!r}")
        trial.lose(*back)


@promise(family=LogSource, builds_on=(*ACKNOWLEDGES, POSITIONS, "shares_give_the_same_again"))
def what_is_not_begun_comes_at_once(trial: Trial) -> None:
    """What a stopped run gives back of a receive comes at once, and the rest of it is acknowledged."""
    received = trial.first()
    begun, left = received.part(received.rows[::2]), received.part(received.rows[1::2])
    for _ in range(2):  # the first time it died before it finished
        received.source.give_back(received.receive_id, left.held, begun.held)
    received.source.finish(received.receive_id)
    back = trial.expect_back(left.data, trial.soon_s, "at once, that were not begun")
    wrong = {data for one in back for data in one.data} & set(begun.data)
    trial.expect(not wrong, f"none of {len(begun.rows)} messages that were begun", len(wrong))


@promise(builds_on=(*RETURNS, "what_is_not_ended_comes_back"), messages=5)
def delays_are_kept(trial: Trial) -> None:
    """What is given back for later is given to nobody until then."""
    words = {word: one.longest_s for word, one in trial.source.words.items() if one.longest_s}
    trial.need(words, "no word of it takes seconds")
    for word, longest_s in words.items():
        delay_s = min(math.ceil(trial.lease_s or 2) + 1, longest_s)
        received = trial.first()
        trial.acknowledge(received, f"{word}:{delay_s}")
        trial.expect_none_of(received.data, f"within the delay of '{word}:{delay_s}'")
        trial.server.sleep(delay_s)
        trial.lose(*trial.expect_back(received.data, trial.patience_s, f"after the delay of '{word}:{delay_s}'"))


@promise(builds_on=(*ACKNOWLEDGES, "finishing_twice_is_harmless"))
def acknowledging_twice_is_harmless(trial: Trial) -> None:
    """`acknowledge` may be called twice for a message: what it refuses then is lost, and all else is as it was."""
    received, word = trial.first(demand=len(trial.sent) // 2), trial.words(ending=True)[0]
    rest = set(trial.sent) - set(received.data)
    trial.acknowledge(received, word)
    refused = [one for one in trial.acknowledge(received, word) if not one.lost]
    trial.expect(not refused, "no refusal, or of what is lost", refused[:1])
    trial.expect_back(rest, trial.soon_s, "that were not acknowledged")


@promise(builds_on=ACKNOWLEDGES, messages=5)
def acknowledging_works_elsewhere(trial: Trial) -> None:
    """A task in another process acknowledges what was received here."""
    trial.need(trial.source.in_tasks, "it is acknowledged by the process that received")
    received, word = trial.first(), trial.words(ending=True)[0]
    refused = trial.acknowledge(received, word, by=trial.another())
    trial.expect(not refused, "no refusal", refused[:1])
    trial.lose(received)
    trial.expect_none_of(received.data, f"that another process acknowledged by {word!r}")


@promise(builds_on=(*ACKNOWLEDGES, *LAPSES, POSITIONS), messages=5)
def acknowledging_late_touches_nothing(trial: Trial) -> None:
    """What another receive holds by now is not touched by whoever had it before."""
    late = trial.first()
    trial.lapse(late)
    held = trial.expect_back(late.data, trial.patience_s, "again")
    for word in (*trial.words(ending=False), *trial.words(ending=True)):
        with suppress(SourceError):  # its connection may be gone
            trial.acknowledge(late, word)
    trial.expect_none_of(late.data, "that a later receive holds")
    trial.lose(*held)
    trial.expect_back(late.data, trial.patience_s, "once more")


@promise(builds_on=(*ACKNOWLEDGES, "what_is_given_back_comes_at_once"), messages=10)
def refusals_are_reported(trial: Trial) -> None:
    """A message that is refused is returned as `Refused`, and costs the others of its group nothing."""
    trial.need(trial.source.acknowledges_by_id, "it acknowledges whole receives")
    received, giving_back = trial.first(), _giving_back(trial)[0]
    kept, given = received.part(received.rows[::2]), received.part(received.rows[1::2])
    for ack_ref, ack_ids in given.held():
        trial.source.acknowledge(giving_back, ack_ref, ack_ids)
    came = {data for one in trial.come(given.data, trial.soon_s) for data in one.data}
    trial.need(set(given.data) <= came, "it gives back nothing while the receive holds more")
    refused = trial.acknowledge(received, trial.words(ending=True)[0])
    strange = [one for one in refused if not isinstance(one, Refused)]
    trial.expect(not strange, "Refused, for each message that is refused", strange[:1])
    wrong = {one.ack_id for one in refused} & {row["ack_id"] for row in kept.rows}
    trial.expect(not wrong, "no refusal of what the receive still holds", f"{len(wrong)} refused")
    trial.lose(received)
    trial.expect_none_of(kept.data, "that were acknowledged beside refused ones")


@promise(builds_on=(*ACKNOWLEDGES, POSITIONS))
def finishing_twice_is_harmless(trial: Trial) -> None:
    """`finish` may be called twice, by the next run too, and touches no other receive."""
    word = trial.words(ending=True)[0]
    done = trial.first(demand=len(trial.sent) // 2)
    held = trial.receive(by=trial.another())
    trial.need(held.rows, "it gives all that waits to one receive at a time")
    trial.acknowledge(done, word)
    done.source.finish(done.receive_id)
    trial.another().finish(done.receive_id)
    trial.lose(held)
    trial.expect_back(held.data, trial.patience_s, "of another receive")


def _acknowledged(trial: Trial, words: list[str]) -> list[tuple[str, Received]]:
    """Acknowledge a part of what waits by each word."""
    acknowledged = []
    for word in words:
        received = trial.first(demand=len(trial.sent) // (len(words) + 1))
        trial.acknowledge(received, word)
        acknowledged.append((word, received))
    return acknowledged


def _giving_back(trial: Trial) -> list[str]:
    words = [word for word in trial.words(ending=False) if word != "noop"]
    trial.need(words, "no word of it gives back")
    return words


@promise(family=LogSource, builds_on=ACKNOWLEDGES)
def positions_wait_for_gaps(trial: Trial) -> None:
    """Nothing is committed behind a message that is not acknowledged."""
    first = trial.first(demand=len(trial.sent) // 2)
    later = trial.receive()
    trial.need(later.rows, "it gives a partition to one receive at a time")
    trial.acknowledge(later, "ack")
    committed = _committed(trial)
    for partition, (begin, _) in _bounds(first).items():
        trial.expect(
            committed.get(partition, 0) <= begin,
            f"{partition} committed up to {begin} at most",
            committed.get(partition),
        )


@promise(family=LogSource, builds_on=(*ACKNOWLEDGES, "positions_wait_for_gaps"))
def logs_remember(trial: Trial) -> None:
    """The log remembers how far it was acknowledged: who has forgotten all else goes on from there."""
    done = trial.first(demand=len(trial.sent) // 2)
    trial.acknowledge(done, "ack")
    committed, wanted = _committed(trial), {partition: past for partition, (_, past) in _bounds(done).items()}
    trial.expect(wanted.items() <= committed.items(), f"committed up to {wanted}", committed)
    trial.new_store()
    trial.expect_back(set(trial.sent) - set(done.data), trial.soon_s, "that nobody acknowledged")
    trial.expect_none_of(done.data, "that are acknowledged")


def _committed(trial: Trial) -> dict[str, int]:
    extents = trial.another()
    assert isinstance(extents, LogSource)
    return {one: extent.committed for one, extent in extents.extents().items() if extent.committed is not None}


def _bounds(received: Received) -> dict[str, tuple[int, int]]:
    """Of each partition the first offset of a receive, and the one after its last."""
    bounds: dict[str, tuple[int, int]] = {}
    for share in received.shares:
        for partition, first, past, _ in share.at["spans"]:
            known = bounds.get(partition, (first, past))
            bounds[partition] = min(first, known[0]), max(past, known[1])
    return bounds
