"""Memory of a run's driver for different numbers of messages; it must not grow with them.

Run it as `python -m benchmarks.driver_memory [--messages N ...]`. For each number, one process runs from lease to
acknowledgement on a warm server and reports its peak, and another process replays these messages. Then two processes
run at once, each with this number of messages. One of them decides after the other and reads the other's commit.
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
from contextlib import closing
from multiprocessing.synchronize import Barrier
from pathlib import Path

from benchmarks.events import Events, payloads
from benchmarks.options import options
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.decisions.ledger import Origin
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.orchestration.resources.spark_resource import WARM, SparkResource
from pipeline_platform.run import steps
from pipeline_platform.run.begin import begin
from pipeline_platform.run.flow import Flow
from pipeline_platform.spark import server as spark_server


def run_once(
    root: str,
    queue: TableQueue,
    spark_folder: str,
    origin: Origin,
    demand: int,
    peaks: multiprocessing.Queue[int],
    together: Barrier,
) -> None:
    """Execute one run, which waits for the other runs before it decides; report the peak memory in MB."""
    resource_ = SparkResource(remote=WARM, state_folder=spark_folder, packages=["benchmarks"])
    with closing(resource_) as spark:
        control = ControlStore(f"sqlite:///{root}/control.sqlite")
        flow = Flow(BoundProducer(Events), queue, Lake(root=f"{root}/lake"), control, lambda: spark.spark_session)
        receive = begin(flow, origin=origin, run_id="bench", windows=["2026-11-21T0000"], demand=demand)
        steps.receive_messages(flow, receive)
        steps.handle_messages(flow, receive)
        together.wait()
        steps.decide(flow, receive)
        steps.publish(flow, receive)
        steps.acknowledge(flow, receive)
    peaks.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)


def main() -> None:
    """Run the benchmark and print the result."""
    chosen = options(__doc__, messages=[1_000, 100_000, 1_000_000])
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        spark_server.start(Path(folder) / "spark")
        try:
            for messages in chosen.messages:
                root = Path(folder) / str(messages)
                root.mkdir()
                queue = TableQueue(name="queue", url=f"sqlite:///{root}/queue.sqlite")
                queue.create()
                queue.enqueue(payloads(3 * messages))
                cases: list[tuple[str, Origin, int]] = [
                    ("received", "source", 1), ("replayed", "messages", 1), ("received beside as many", "source", 2)
                ]  # fmt: skip
                for what, origin, runs in cases:
                    peaks: multiprocessing.Queue[int] = processes.Queue()
                    given = (str(root), queue, f"{folder}/spark", origin, messages, peaks, processes.Barrier(runs))
                    working = [processes.Process(target=run_once, args=given) for _ in range(runs)]
                    for process in working:
                        process.start()
                    peak = max(peaks.get(timeout=600) for _ in working)
                    print(f"{messages:9,} messages {what}: driver's peak {peak} MB", flush=True)
                    for process in working:
                        process.join()
        finally:
            spark_server.stop(Path(folder) / "spark")


if __name__ == "__main__":
    main()
