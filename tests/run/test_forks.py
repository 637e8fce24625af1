"""Forks on a real Spark: its workers, which it uses again, have called callbacks that left threads behind."""

from tests.fixtures.flow import Filled, kinds, rows, run
from tests.fixtures.pooled import Pooled, Splitting, Timed

WORDS = {f"word {number}" for number in range(40)}
PAYLOADS = [word.encode() for word in WORDS]


def test_tasks_that_fork_in_workers_with_threads_of_a_library_do_not_hang(filled_on_spark: Filled) -> None:
    for pipeline, bad in (Pooled, []), (Timed, [b"kill"]), (Pooled, [b"kill"]):
        flow = filled_on_spark(pipeline, [*PAYLOADS, *bad])

        run(flow)

        assert set(rows(flow, "kept")["text"]) == WORDS
        if bad:
            assert kinds(flow) == {"kill": "worker killed"}


def test_a_splitter_and_handle_batch_do_not_hang_there_either(filled_on_spark: Filled) -> None:
    run(filled_on_spark(Pooled, PAYLOADS))
    flow = filled_on_spark(Splitting, PAYLOADS)

    run(flow)

    assert set(rows(flow, "outcomes")["outcome"]) == {"handled"}
