"""Batchers of a receive, in parallel: each cuts its messages into batches and calls `handle_batch`."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from pipeline_platform.lake.decisions.ledger import Receive
from pipeline_platform.lake.decisions.rewriting import drop_rows
from pipeline_platform.lake.manifest import File, Manifest
from pipeline_platform.lake.reader import whole
from pipeline_platform.lake.task_report import TaskReport
from pipeline_platform.model.options import Batcher, Splitter
from pipeline_platform.model.pipeline import Trigger
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import common, intake_of
from pipeline_platform.spark import engine
from pipeline_platform.tasks.batch.batch_plan import CutBatches, plan_table
from pipeline_platform.tasks.batch.handle_batches import HandleBatches
from pipeline_platform.tasks.batch.parents import EndParents, failed_keys
from pipeline_platform.tasks.record.fan_out import ENDS_TABLE, PARENTS_TABLE

PARENTS_STEP = "parents"
"""Step that decides the outcomes of messages whose children were batched."""

CUT_HERE = 100_000
"""Maximum number of messages that the driver cuts into batches without Spark, if there is no splitter: it is faster."""


def batch(flow: Flow, receive: Receive, handled: Manifest, batcher: str, most_tasks: int | None) -> Manifest:
    """Call `handle_batch` for the messages of a batcher, in at most `most_tasks` tasks; None for no limit."""
    options = flow.pipeline.batchers[batcher]
    assert isinstance(options, Batcher)
    name, receive_id = flow.pipeline.name, receive.receive_id
    work = flow.work(receive_id, f"batch-{batcher}")
    staged = handled.staged(batcher)
    ranges = whole(staged, name)
    shared = common(flow, receive)
    drained = flow.control.draining(flow.quota.key) is not None
    rest: Trigger = "timeout" if intake_of(flow, receive).is_outside and not drained else "flush"
    most = min(options.concurrency, most_tasks or options.concurrency)
    cut = CutBatches(**shared, batcher=batcher, options=options, staged=ranges, rest=rest, tasks=most)
    messages = sum(file.rows for file in staged)
    # A splitter is user code, which may crash its process.
    is_ours = not isinstance(options.batch_size, Splitter) and messages <= CUT_HERE
    planned = work.run_here(cut, 1) if is_ours else work.run(cut, 1, messages)
    batches = planned.of_table(plan_table(receive_id, batcher))
    tasks = min(most, sum(file.rows for file in batches))
    handle = HandleBatches(**shared, batcher=batcher, staged=ranges, plan=whole(batches, name), tasks=tasks)
    output = [TaskReport(output=planned.totals.output)] if planned.totals.output else []
    return Manifest(reports=output) + work.run(handle, tasks, messages)


def parents_left(flow: Flow, receive: Receive, handled: Manifest) -> list[File]:
    """Return the files of undecided messages with children; empty until all batchers have handled their batches."""
    parents = handled.staged(PARENTS_TABLE)
    if not parents or flow.ledger.manifest(receive, PARENTS_STEP).reports:
        return []
    staged = {file.table.rpartition("/")[2] for file in handled if "/" in file.table}
    waiting = {name for name in staged if not name.startswith("_")}
    # If the pipeline no longer has one of these batchers, its messages cannot be decided.
    return parents if all(flow.ledger.manifest(receive, f"batch-{name}").reports for name in waiting) else []


def end_parents(flow: Flow, receive: Receive, parents: Sequence[File]) -> Manifest:
    """Record the outcomes of messages with children. Drop all rows of a message if one of its children failed."""
    name, receive_id = flow.pipeline.name, receive.receive_id
    ends = flow.ledger.manifest(receive).staged(ENDS_TABLE)
    if len(keys := failed_keys(flow.lake, ranges := whole(ends, name))):
        drop_rows(flow.tables, flow.ledger, receive, keys)
    received = flow.ledger.manifest(receive, "receive").of_table("messages")
    messages = sum(file.rows for file in parents)
    tasks = min(flow.processors.concurrency, messages)
    task = EndParents(
        **common(flow, receive), parts=[whole(received, name)], plan=whole(parents, name), ends=ranges, tasks=tasks
    )
    return flow.work(receive_id, PARENTS_STEP).run(task, tasks, messages)


def run_batchers(works: Mapping[str, Callable[[], None]], flow: Flow, receive: Receive) -> None:
    """Run several batchers in parallel. An error of a batcher does not stop the others.

    Raises:
        Exception: The error of the first batcher that failed, after all have ended. Its notes name the others.
    """
    with ThreadPoolExecutor(len(works), "batcher") as pool:
        futures = {name: pool.submit(work) for name, work in works.items()}
        try:
            # With a timeout: a signal that another thread receives does not interrupt a wait.
            while wait(futures.values(), timeout=1).not_done:
                pass
        except BaseException:  # the run is being terminated
            flow.work(receive.receive_id).interrupt_here()
            raise
    failed = [(name, error) for name, future in futures.items() if (error := future.exception())]
    if failed:
        (name, first), *others = failed
        first.add_note(f"Raised in batcher {name!r}.")
        for name, error in others:
            first.add_note(f"Batcher {name!r} failed, too: {type(error).__name__}: {error}")
        raise first


def most_tasks(flow: Flow, batchers: int) -> int | None:
    """Return the maximum number of tasks of a batcher, so that every other batcher can start; None for no limit."""
    session = flow.session()  # by this thread, for the threads of all batchers
    slots = engine.slots(session) if batchers > 1 else None
    return slots and max(1, slots - batchers + 1)
