"""Promises about deliveries: all messages, unchanged, and no more than requested."""

import json
from collections import Counter

import pyarrow as pa

from pipeline_platform.model.message import DELIVERIES
from pipeline_platform.source.contract import Share, Source
from pipeline_platform.testing.trial import MANY, Received, Row, Trial, promise, some

FILLED = ("source", "message_id", "data", "ack_ref", "ack_id", "attempt", "redelivered")
"""Columns without nulls."""


@promise(builds_on=())
def nothing_is_lost(trial: Trial) -> None:
    """All waiting messages are delivered, each of them once."""
    came = len(_rows(trial.come(trial.sent, trial.soon_s, by=trial.source)))
    trial.expect(came == len(trial.sent), f"{len(trial.sent)} messages, the number that waits", came)


@promise(builds_on=("nothing_is_lost",))
def payloads_are_untouched(trial: Trial) -> None:
    """Payloads are delivered byte by byte as they were sent."""
    seen = {row["data"] for row in _rows(trial.come(trial.sent, trial.soon_s, by=trial.source))}
    changed, lacking = seen - set(trial.sent), set(trial.sent) - seen
    trial.expect(not changed and not lacking, some(lacking) or "the sent payloads", some(changed) or "no such payload")


@promise()
def columns_are_as_said(trial: Trial) -> None:
    """`read` yields record batches of the schema `DELIVERIES`; `deliveries()` builds them."""
    for share in trial.source.plan(MANY, 2, "columns"):
        for batch in trial.source.read(share, "columns"):
            trial.expect(isinstance(batch, pa.RecordBatch), "a pyarrow.RecordBatch", type(batch).__name__)
            trial.expect(
                batch.schema == DELIVERIES, " ".join(str(DELIVERIES).split()), " ".join(str(batch.schema).split())
            )


@promise()
def columns_are_filled(trial: Trial) -> None:
    """Each delivery has source, ids and payload; its `attempt` is 1; its metadata is a JSON object or null."""
    for row in trial.first().rows:
        nulls = [name for name in FILLED if row[name] is None]
        trial.expect(not nulls, f"a value in each of {', '.join(FILLED)}", f"null in {', '.join(nulls)}")
        trial.expect(row["source"] == trial.source.name, f"source {trial.source.name!r}", repr(row["source"]))
        # Duplicates are recognised by id and attempt: a count of deliveries would make each one a new message.
        trial.expect(row["attempt"] == 1, "attempt 1, as deliveries() sets it", row["attempt"])
        trial.expect(_is_object(row["metadata"]), "metadata that is a JSON object or null", repr(row["metadata"])[:80])


@promise(messages=2)
def equal_payloads_are_two_messages(trial: Trial) -> None:
    """Each message has its own id, also with equal payloads."""
    trial.need(trial.source.has_identity, "its messages have no ids")
    send = trial.server.sender(trial.source)
    if send is not None:
        send(trial.sent)
    ids = Counter(row["message_id"] for row in _rows(trial.come(trial.sent, trial.soon_s)))
    twice = [message_id for message_id, count in ids.items() if count > 1]
    trial.expect(not twice, "a different message_id per message", f"{twice[:1]} for {ids.most_common(1)[0][1:]}")


@promise()
def no_more_than_demanded(trial: Trial) -> None:
    """A receive gets no more messages than it requests."""
    demand = len(trial.sent) // 2
    received = trial.first(demand=demand)
    planned = sum(share.messages for share in received.shares)
    trial.expect(planned <= demand, f"shares of at most {demand} messages in all", planned)
    trial.expect(len(received.rows) <= demand, f"at most {demand} messages", len(received.rows))


@promise()
def shares_fit_the_tasks(trial: Trial) -> None:
    """`plan` returns no more shares than there are tasks."""
    for concurrency in (1, 3):
        shares = trial.source.plan(len(trial.sent) // 3, concurrency, f"for-{concurrency}")
        trial.expect(len(shares) <= concurrency, f"at most {concurrency} shares", len(shares))


@promise()
def shares_say_their_size(trial: Trial) -> None:
    """A share delivers at most its number of messages."""
    for share in trial.source.plan(len(trial.sent) // 2, 3, "sizes"):
        rows = sum(batch.num_rows for batch in trial.source.read(share, "sizes"))
        trial.expect(rows <= share.messages, f"at most {share.messages} messages of {share.at}", rows)


@promise()
def shares_are_read_elsewhere(trial: Trial) -> None:
    """A task in another process can read a share that was stored as JSON."""
    trial.need(trial.source.in_tasks, "only the process that plans can read it")

    def receive() -> Received:
        shares = [Share.model_validate_json(share.model_dump_json()) for share in trial.source.plan(MANY, 3, "kept")]
        rows = [row for share in shares for row in _read(trial.another(), share, "kept")]
        return Received(trial.source, "kept", shares, rows)

    came = {row["data"] for row in _rows(trial.come(trial.sent, trial.soon_s, receive=receive))}
    trial.expect(came >= set(trial.sent), f"all {len(trial.sent)} messages", f"{len(came)}")


@promise()
def shares_give_the_same_again(trial: Trial) -> None:
    """A share that is read again delivers the same messages in the same order."""
    trial.need(trial.source.reads_again, "it does not promise this (reads_again)")
    for share in trial.source.plan(MANY, 2, "again"):
        first, second = (
            [(row["message_id"], row["data"], row["ack_id"]) for row in _read(source, share, "again")]
            for source in (trial.source, trial.another())
        )
        seen = f"{len(second)}, starting with {second[:1]}"
        trial.expect(first == second, f"{len(first)} messages again, starting with {first[:1]}", seen)


@promise()
def a_second_planner_gets_others(trial: Trial) -> None:
    """Two receives at the same time get different messages."""
    planners = [("first", trial.source, len(trial.sent) // 2), ("second", trial.another(), MANY)]
    planned = [(by, source, source.plan(demand, 2, by)) for by, source, demand in planners]
    first, second = (
        {row["data"] for share in shares for row in _read(source, share, by)} for by, source, shares in planned
    )
    common = first & second
    trial.expect(not common, "no message for both", f"{len(common)} for both: {some(common)}")


@promise(messages=2)
def sending_is_counted(trial: Trial) -> None:
    """`send` returns the number of sent messages, and they are delivered."""
    trial.need(type(trial.source).send is not Source.send, "it has no send()")
    more = [b"one more", b"and another"]
    for payloads in (more, []):
        sent = trial.source.send(payloads)
        trial.expect(sent == len(payloads), f"{len(payloads)} from send() of as many", sent)
    trial.expect_back(more, trial.soon_s, "that were sent")


def _read(source: Source, share: Share, receive_id: str) -> list[Row]:
    return [row for batch in source.read(share, receive_id) for row in batch.to_pylist()]


def _rows(came: list[Received]) -> list[Row]:
    return [row for received in came for row in received.rows]


def _is_object(text: str | None) -> bool:
    try:
        return text is None or isinstance(json.loads(text), dict)
    except ValueError:
        return False
