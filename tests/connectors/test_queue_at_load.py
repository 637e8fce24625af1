"""Several processes that lease, read, release and acknowledge concurrently: each message is handled once."""

import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from tests.fixtures.processes import PROCESSES
from tests.fixtures.table_queue import do, ids, receive

PROCESSES_AT_ONCE = 4


def drained_by(queue: TableQueue, seed: int, demand: int) -> list[str]:
    """Receive until the queue is empty; return the acknowledged messages, unordered and with duplicates."""
    chance, acknowledged = random.Random(seed), []
    for nth in range(100_000):
        receive_id = f"{seed}-{nth}"
        mine = ids(receive(queue, receive_id, demand=chance.randint(1, demand)))
        if not mine:
            if not queue.backlog().messages and not queue.held():
                return acknowledged
            continue
        if chance.random() < 0.1:
            queue.abandon(receive_id, list)  # as the next run does for one that died
            continue
        chance.shuffle(mine)
        back = len(mine) // 20
        assert queue.release(receive_id, mine[:back]) == []
        for part in (mine[back::2], mine[back + 1 :: 2]):
            assert queue.ack(receive_id, part) == []
            acknowledged += part
    raise AssertionError(f"still {queue.backlog()}, and held {queue.held()}")


@pytest.mark.faults
@pytest.mark.parametrize("gone", ["false", "id % 50 = 0", "id % 3 > 0"], ids=["consecutive", "holes", "scattered"])
def test_each_message_is_given_to_one_of_four_processes(url, gone):
    queue = TableQueue(name="load", url=url, lease_s=600)
    queue.create()
    queue.enqueue(b"x" for _ in range(3_000))
    do(url, f"DELETE FROM messages WHERE {gone}")
    do(url, "ANALYZE")  # query plans are outdated: the tables were empty when statistics were last collected
    expected = {str(id_) for (id_,) in do(url, "SELECT id FROM messages")}

    with ProcessPoolExecutor(PROCESSES_AT_ONCE, mp_context=PROCESSES) as pool:
        acknowledged = [*pool.map(partial(drained_by, queue, demand=200), range(PROCESSES_AT_ONCE))]

    times = Counter(id_ for part in acknowledged for id_ in part)
    assert times == dict.fromkeys(expected, 1)
    assert sum(bool(part) for part in acknowledged) > 1, "one process did all"
