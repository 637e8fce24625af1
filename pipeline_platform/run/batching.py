"""The batchers of a receive, side by side: each cuts its messages into batches and puts them through `handle_batch`."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from pipeline_platform.lake.ledger import Receive
from pipeline_platform.lake.manifest import File, Manifest
from pipeline_platform.lake.reader import whole
from pipeline_platform.lake.rewriting import drop_rows
from pipeline_platform.model.message import Trigger
from pipeline_platform.model.options import Batcher, Splitter
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import common, intake_of
from pipeline_platform.spark import engine
from pipeline_platform.tasks.batch.batch_plan import CutBatches, plan_table
from pipeline_platform.tasks.batch.handle_batches import HandleBatches
from pipeline_platform.tasks.batch.parents import EndParents, failed_keys
from pipeline_platform.tasks.record.fan_out import ends_table, parents_table
from pipeline_platform.tasks.record.staging import staged_table

PARENTS = "parents"
"""The step that ends the messages with children that waited for batches."""

CUT_HERE = 100_000
"""Messages that the driver cuts by itself, without a splitter: it takes less time than to ask Spark."""


def batch(flow: Flow, receive: Receive, handled: Manifest, batcher: str, most_tasks: int | None) -> Manifest:
    """Put the messages of one batcher through `handle_batch`, in so many tasks at the most."""
    options = flow.pipeline.batchers[batcher]
    assert isinstance(options, Batcher)
    name, receive_id = flow.pipeline.name, receive.receive_id
    work = flow.work(receive_id, f"batch-{batcher}")
    staged = handled.of_table(staged_table(receive_id, batcher))
    ranges = whole(staged, name)
    shared = common(flow, receive)
    drained = flow.control.draining(flow.quota.key) is not None
    rest: Trigger = "timeout" if intake_of(flow, receive).is_outside and not drained else "flush"
    most = min(options.concurrency, most_tasks or options.concurrency)
    cut = CutBatches(**shared, batcher=batcher, options=options, staged=ranges, rest=rest, tasks=most)
    messages = sum(file.rows for file in staged)
    # A splitter is code of the author's, which may end its process.
    is_ours = not isinstance(options.batch_size, Splitter) and messages <= CUT_HERE
    planned = work.run_here(cut, 1) if is_ours else work.run(cut, 1)
    batches = planned.of_table(plan_table(receive_id, batcher))
    tasks = min(most, sum(file.rows for file in batches))
    handle = HandleBatches(**shared, batcher=batcher, staged=ranges, plan=whole(batches, name), tasks=tasks)
    output = ("said", "unsaid", "who")
    said = Manifest(notes=[{name: notes[name] for name in output} for notes in planned.notes if "said" in notes])
    return said + work.run(handle, tasks)


def parents_left(flow: Flow, receive: Receive, handled: Manifest) -> list[File]:
    """Where the messages are whose children are all at their end, and that are not: none before all batches are."""
    parents = handled.of_table(parents_table(receive.receive_id))
    if not parents or flow.ledger.manifest(receive, PARENTS).notes:
        return []
    staged = {file.table.rpartition("/")[2] for file in handled if "/" in file.table}
    waiting = {name for name in staged if not name.startswith("_")}
    # Of a batcher that the pipeline has no more nothing is batched, and nothing of its messages can be decided.
    return parents if all(flow.ledger.manifest(receive, f"batch-{name}").notes for name in waiting) else []


def end_parents(flow: Flow, receive: Receive, parents: Sequence[File]) -> Manifest:
    """Record what became of messages with children; drop all rows of those of which a child failed."""
    name, receive_id = flow.pipeline.name, receive.receive_id
    ends = flow.ledger.manifest(receive).of_table(ends_table(receive_id))
    if len(keys := failed_keys(flow.lake, ranges := whole(ends, name))):
        drop_rows(flow.tables, flow.ledger, receive, keys)
    received = flow.ledger.manifest(receive, "receive").of_table("messages")
    tasks = min(flow.processors.concurrency, sum(file.rows for file in parents))
    task = EndParents(
        **common(flow, receive), parts=[whole(received, name)], plan=whole(parents, name), ends=ranges, tasks=tasks
    )
    return flow.work(receive_id, PARENTS).run(task, tasks)


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
