"""The batchers of a receive, side by side: each cuts its messages into batches and puts them through `handle_batch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait

from pipeline_platform.lake.ledger import Receive
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import divide
from pipeline_platform.model.message import Trigger
from pipeline_platform.model.options import Batcher, Splitter
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import common
from pipeline_platform.run.spark_work import carefully
from pipeline_platform.spark import engine
from pipeline_platform.tasks.batch import HandleBatches
from pipeline_platform.tasks.plan import CutBatches, plan_table
from pipeline_platform.tasks.staging import staged_table

CUT_HERE = 100_000
"""Messages that the driver cuts by itself, without a splitter: it takes less time than to ask Spark."""


def batch(flow: Flow, receive: Receive, handled: Manifest, batcher: str, most_tasks: int | None) -> Manifest:
    """Put the messages of one batcher through `handle_batch`, in so many tasks at the most."""
    options = flow.pipeline.batchers[batcher]
    assert isinstance(options, Batcher)
    name, receive_id, work = flow.pipeline.name, receive.receive_id, flow.work(receive.receive_id)
    staged = handled.of_table(staged_table(receive_id, batcher))
    (whole,) = divide(staged, name, 1)
    shared = common(flow, receive)
    drained = flow.control.draining(flow.room.key) is not None
    rest: Trigger = "timeout" if receive.origin == "source" and not drained else "flush"
    most = min(options.concurrency, most_tasks or options.concurrency)
    cut = CutBatches(flow.lake, name, receive_id, batcher, options, shared["settling"], whole, rest, tasks=most)
    messages = sum(file.rows for file in staged)
    # A splitter is code of the author's, which may end its process.
    is_ours = not isinstance(options.batch_size, Splitter) and messages <= CUT_HERE
    planned = work.run_here(cut, 1) if is_ours else carefully(lambda task: work.run(task, 1), cut)
    batches = planned.of_table(plan_table(receive_id, batcher))
    tasks = min(most, sum(file.rows for file in batches))
    (plan,) = divide(batches, name, 1)
    handle = HandleBatches(**shared, batcher=batcher, staged=whole, plan=plan, tasks=tasks)
    return carefully(lambda task: work.run(task, tasks), handle)


def side_by_side(works: Mapping[str, Callable[[], None]], flow: Flow, receive: Receive) -> None:
    """Do the work of several batchers at once. The failure of one ends no other.

    Raises:
        Exception: Of the first batcher that failed, once all have ended; it names the others.
    """
    with ThreadPoolExecutor(len(works), "batcher") as pool:
        futures = {name: pool.submit(work) for name, work in works.items()}
        try:
            # By turns: a signal that another thread receives does not end a wait.
            while wait(futures.values(), timeout=1).not_done:
                pass
        except BaseException:  # the run is being terminated
            flow.work(receive.receive_id).interrupt()
            raise
    failed = [(name, error) for name, future in futures.items() if (error := future.exception())]
    if failed:
        (name, first), *others = failed
        first.add_note(f"in batcher {name!r}")
        for name, error in others:
            first.add_note(f"batcher {name!r} failed too: {type(error).__name__}: {error}")
        raise first


def most_tasks(flow: Flow, batchers: int) -> int | None:
    """How many tasks one of several batchers may have, for each other to have one from the start; None for any."""
    slots = engine.slots(flow.session()) if batchers > 1 else None
    return slots and max(1, slots - batchers + 1)
