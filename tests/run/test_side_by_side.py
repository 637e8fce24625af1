"""Batchers of a receive in parallel: none delays or breaks another."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline_platform import Batcher, BatchInfo, Message, Pipeline, Processors, Producer
from pipeline_platform.lake.decisions.ledger import Receive
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.task_report import CallbackOutput, TaskReport
from pipeline_platform.run import batching, steps
from pipeline_platform.run.flow import Flow
from pipeline_platform.spark.engine import TaskError, warm_up
from pipeline_platform.tasks.batch.batch_plan import CutBatches
from tests.fixtures.flow import begun, finish, handled, rows
from tests.fixtures.flow_pipelines import Place


class Pair(Pipeline):
    """Two batchers, each with more tasks than Spark has cores. A batch obeys its first message."""

    name = "pair"
    producer = Producer(source="queue", max_runs=2)
    processors = Processors(concurrency=1)
    batchers = {"left": Batcher(batch_size=1, concurrency=4), "right": Batcher(batch_size=1, concurrency=4)}
    context = Place()

    def handle_message(self, message: Message, context: Place) -> Message:
        batcher, says = message.data.decode().split(maxsplit=1)
        return message.put(says, batcher=batcher)

    def handle_batch(
        self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Place
    ) -> list[Message]:
        """Obey the message, and record each call."""
        folder = Path(context.folder)
        (folder / f"{batcher}-{time.monotonic_ns()}").touch()
        says = messages[0].data
        if says == "wait for the other":
            other = "left" if batcher == "right" else "right"
            while not any(folder.glob(f"{other}-*")):
                time.sleep(0.05)
        if says == "wait for ever":
            while True:
                time.sleep(0.05)
        return messages


def received(flow: Flow, folder: Path) -> Receive:
    """A receive whose messages are handled but not batched."""
    folder.mkdir(exist_ok=True)
    return handled(flow, context={"folder": str(folder)})


def calls(folder: Path, batcher: str) -> int:
    return len([*folder.glob(f"{batcher}-*")])


PLACES = pytest.mark.parametrize("place", ["filled_locally", "filled_on_spark"])


@PLACES
def test_two_batchers_that_wait_for_each_other_s_batch_both_end(request, place, tmp_path):
    payloads = [b"left wait for the other", b"right wait for the other"] * 4
    flow, folder = request.getfixturevalue(place)(Pair, payloads), tmp_path / "calls"
    receive = received(flow, folder)
    written = steps.batch_messages(flow, receive)
    finish(flow, receive)
    assert {name: manifest.totals.batches for name, manifest in written.items()} == {"left": 4, "right": 4}
    assert [rows(flow, name).height for name in ("left", "right")] == [4, 4]


def test_what_one_batcher_wrote_is_kept_when_another_fails_and_its_batches_are_not_handled_again(
    filled_locally, tmp_path, monkeypatch
):
    flow, folder = filled_locally(Pair, [b"left -", b"right -"]), tmp_path / "calls"
    receive = received(flow, folder)
    real = CutBatches.__call__

    def full(self: CutBatches, index: int) -> Any:
        if self.batcher == "left":
            raise OSError(28, "No space left on device")
        return real(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(CutBatches, "__call__", full)
        with pytest.raises(OSError, match="No space left") as raised:
            steps.batch_messages(flow, receive)
    assert raised.value.__notes__ == ["Raised in batcher 'left'."]
    assert (calls(folder, "left"), calls(folder, "right")) == (0, 1)

    steps.batch_messages(flow, receive)
    finish(flow, receive)

    assert (calls(folder, "left"), calls(folder, "right")) == (1, 1)
    assert [rows(flow, name).height for name in ("left", "right")] == [1, 1]


@PLACES
def test_a_run_that_is_terminated_ends_the_work_of_all_its_batchers(request, place, tmp_path):
    filled = request.getfixturevalue(place)
    flow, folder = filled(Pair, [b"left wait for ever", b"right wait for ever"]), tmp_path / "calls"
    receive = received(flow, folder)

    def terminate() -> None:
        while not (calls(folder, "left") and calls(folder, "right")):
            time.sleep(0.05)
        while not ended.is_set():  # again where code that lets no error out was interrupted, such as a destructor
            os.kill(os.getpid(), signal.SIGINT)
            ended.wait(60)

    ended = threading.Event()
    threading.Thread(target=terminate, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        steps.batch_messages(flow, receive)
    ended.set()

    assert flow.ledger.manifest(receive, "batch-left", "batch-right").reports == []
    if flow.worker is None:
        warm_up(flow.session(), 2)  # has both cores again
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batcher")]


def test_errors_of_several_batchers_are_told_together(filled_locally):
    flow = filled_locally(Pair, [])

    def fail(why: str) -> None:
        raise TaskError(why)

    works = {"left": lambda: fail("one"), "right": lambda: fail("two"), "third": lambda: None}
    receive = begun(flow)
    with pytest.raises(TaskError, match="one") as raised:
        batching.run_batchers(works, flow, receive)

    assert raised.value.__notes__ == ["Raised in batcher 'left'.", "Batcher 'right' failed, too: TaskError: two"]


def test_each_of_several_batchers_finds_a_core_of_six(filled_on_spark):
    flow = filled_on_spark(Pair, [])
    assert [batching.most_tasks(flow, batchers) for batchers in (1, 2, 5, 9)] == [None, 5, 2, 1]


def test_a_job_of_spark_is_tagged_with_its_pipeline_batcher_and_receive(filled_on_spark):
    def tags(index: int) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        told = TaskContext.get().getLocalProperty("spark.job.tags")  # type: ignore[union-attr]
        yield from Manifest(reports=[TaskReport(output=[CallbackOutput("tags", told)])]).to_arrow().to_batches()

    (output,) = filled_on_spark(Pair, []).work("r1", "batch-left").run(tags, 1).totals.output

    assert "_pair/batch-left-" in output.text
    assert "_receive-r1," in f"{output.text},"
