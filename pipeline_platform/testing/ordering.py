"""Promises about partitions, on which pipelines with `partition_by` rely."""

from pipeline_platform.testing.acknowledging import ACKNOWLEDGES
from pipeline_platform.testing.returning import RETURNS
from pipeline_platform.testing.trial import Trial, promise


@promise(builds_on=ACKNOWLEDGES)
def partitions_are_in_order(trial: Trial) -> None:
    """Over all receives, `sequence` numbers the messages of a partition as sent; if it is null, they arrive as sent."""
    first = trial.first(demand=len(trial.sent) // 2)
    trial.acknowledge(first, trial.actions(ending=True)[0])
    receives = [first, *trial.come(set(trial.sent) - set(first.data), trial.soon_s)]
    partitions: dict[str, dict[int, int]] = {}
    for arrival, row in enumerate(row for received in receives for row in received.rows):
        if row["partition"] is not None:
            orders = partitions.setdefault(row["partition"], {})
            order = arrival if row["sequence"] is None else row["sequence"]
            orders.setdefault(trial.sent.index(row["data"]), order)
    trial.need(partitions, "its messages have no partition")
    for partition, orders in partitions.items():
        as_sent = [orders[sent] for sent in sorted(orders)]
        expected = f"sequences, or arrivals, of partition {partition!r} that ascend as its messages were sent"
        trial.expect(as_sent == sorted(set(as_sent)), expected, as_sent[:10])


@promise(builds_on=RETURNS)
def partitions_are_leased_once(trial: Trial) -> None:
    """If it `leases_partitions`, a receive gets no message of a partition of which another receive has messages."""
    trial.need(trial.source.leases_partitions, "it does not lease partitions (leases_partitions)")
    first = trial.first(demand=len(trial.sent) // 2)
    by = trial.another()
    others = [row for received in (trial.receive(by=by), trial.receive(by=by)) for row in received.rows]
    both = {row["partition"] for row in first.rows} & {row["partition"] for row in others}
    trial.expect(not both, "no partition in two receives at a time", f"{', '.join(sorted(both)[:3])} in both")
