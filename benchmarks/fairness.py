"""Number of workers that are busy with ten messages of 30 ms each, a known weakness of Broadway.

Run it as `python -m benchmarks.fairness [--rounds N]`. Of ten workers, Broadway kept 1 busy when a producer's messages
went to the first worker that asked, and keeps 6.5 busy when it hashes messages over ten workers. Here a receive is
distributed evenly over tasks, and each thread of a task takes the next message: two tasks with five threads, on two
cores.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import closing
from pathlib import Path

import polars as pl

from benchmarks.events import Waiting
from benchmarks.options import options
from benchmarks.whole_run import WINDOW
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.orchestration.resources.spark_resource import WARM, SparkResource
from pipeline_platform.run import steps
from pipeline_platform.run.begin import begin
from pipeline_platform.run.flow import Flow
from pipeline_platform.spark import server as spark_server

MESSAGES = 10


def busy(folder: Path, spark: SparkResource) -> int:
    """Return the number of workers that one receive of all messages keeps busy."""
    queue = TableQueue(name="queue", url=f"sqlite:///{folder}/queue.sqlite")
    queue.create()
    queue.enqueue(b"%d" % number for number in range(MESSAGES))
    control = ControlStore(f"sqlite:///{folder}/control.sqlite")
    flow = Flow(BoundProducer(Waiting), queue, Lake(root=f"{folder}/lake"), control, lambda: spark.spark_session)
    receive = begin(flow, origin="source", run_id="bench", windows=[WINDOW])
    steps.receive_messages(flow, receive)
    steps.handle_messages(flow, receive)
    steps.decide(flow, receive)
    steps.publish(flow, receive)
    handled = pl.read_delta(flow.tables["workers"].uri).select("process", "thread")
    assert handled.height == MESSAGES
    return handled.n_unique()


def main() -> None:
    """Run the benchmark and print the result."""
    rounds = options(__doc__, rounds=5).rounds
    with tempfile.TemporaryDirectory(prefix="bench-") as root:
        spark_server.start(Path(root) / "spark", cores=2)
        try:
            packages = ["benchmarks"]
            with closing(SparkResource(remote=WARM, state_folder=f"{root}/spark", packages=packages)) as spark:
                counts = [busy(Path(tempfile.mkdtemp(dir=root)), spark) for _ in range(rounds)]
        finally:
            spark_server.stop(Path(root) / "spark")
    print(
        f"busy of {MESSAGES}: {statistics.median(counts)}, single rounds {min(counts)} to {max(counts)} (at least 10)"
    )


if __name__ == "__main__":
    main()
