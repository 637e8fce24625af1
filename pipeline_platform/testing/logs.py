"""Promises of logs, about positions."""

from pipeline_platform.source.log import LogSource
from pipeline_platform.testing.acknowledging import ACKNOWLEDGES
from pipeline_platform.testing.promise import promise
from pipeline_platform.testing.trial import Received, Trial


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
