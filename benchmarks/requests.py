"""Requests that runs make at an object store, by how many messages a run has: counted in the log of a local S3 server.

Run it as `python -m benchmarks.requests [--runs N]`. Each size has a lake of its own, in which a run follows another:
the more commits a table has since its checkpoint, the more a run reads.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import closing
from pathlib import Path

from benchmarks.events import Events, payloads
from benchmarks.handling import WINDOW
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.orchestration.spark_resource import WARM, SparkResource
from pipeline_platform.run import steps
from pipeline_platform.run.begin import begin
from pipeline_platform.run.flow import Flow
from pipeline_platform.spark import server as spark_server
from servers import s3, sqs
from servers.__main__ import FOLDER

SIZES = {100: 22, 10_000: 12, 1_000_000: 2}
"""Messages of a run, and how many runs."""


def requests(spark: SparkResource, server: s3.S3, messages: int, runs: int) -> list[int]:
    """Requests of each of some runs of so many messages."""
    options = {**sqs.ENVIRONMENT, "AWS_REGION": sqs.REGION, "AWS_ENDPOINT_URL": server.address}
    lake = Lake(root=f"s3://{s3.BUCKET}/{messages}", storage_options=options)
    counted = []
    with tempfile.TemporaryDirectory() as folder:
        queue = TableQueue(name="events_queue", url=f"sqlite:///{folder}/queue.sqlite")
        queue.create()
        control = ControlStore(f"sqlite:///{folder}/control.sqlite")
        for number in range(runs):
            queue.enqueue(payloads(messages))
            before = len(server.requests())
            flow = Flow(Events, queue, lake, control, lambda: spark.spark_session)  # as a process of its own has it
            receive = begin(flow, origin="source", run_id=str(number), windows=[WINDOW])
            for step in (steps.receive_messages, steps.handle_messages, steps.decide, steps.publish):
                step(flow, receive)
            assert steps.acknowledge(flow, receive).acknowledged == messages
            counted.append(len(server.requests()) - before)
    return counted


def main() -> None:
    """Print requests a run and a thousand messages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, help="runs of each size; the first makes the tables and is not counted")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, s3.serve(FOLDER) as server:
        spark_server.start(Path(folder))
        try:
            with closing(SparkResource(remote=WARM, state_folder=folder, packages=["benchmarks"])) as spark:
                for messages, runs in SIZES.items():
                    counted = requests(spark, server, messages, arguments.runs or runs)[1:]
                    mean = statistics.mean(counted)
                    print(
                        f"{messages:>9,} messages: {mean:.0f} requests a run ({min(counted)} to {max(counted)}), "
                        f"{mean * 1_000 / messages:,.1f} a thousand messages"
                    )
        finally:
            spark_server.stop(Path(folder))


if __name__ == "__main__":
    main()
