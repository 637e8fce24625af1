"""A Spark cluster behind a Connect server runs a pipeline unchanged, even if a machine crashes."""

import json
import threading
import time
from collections import Counter
from contextlib import closing

import polars as pl
import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.run.flow import Flow
from tests.fixtures.numbers_under_fault import Thousands, expected
from tests.run.test_flow import run

COUNT = 30_000


@pytest.mark.faults
def test_a_worker_that_is_killed_with_its_executor_costs_no_message(spark_cluster, tmp_path):
    begun, told = tmp_path / "begun", []
    queue = TableQueue(name="queue", url=f"sqlite:///{tmp_path}/queue.sqlite")
    queue.create()
    queue.enqueue(json.dumps({"n": n, "touch": str(begun)} if n == 500 else {"n": n}).encode() for n in range(COUNT))

    def kill_in_the_middle() -> None:
        while not begun.exists():
            time.sleep(0.02)
        told.append(handled())
        spark_cluster.kill_a_worker()

    def handled() -> int:
        receive = flow.ledger.get(flow.ledger.unfinished()[0])
        assert receive is not None
        return len(flow.ledger.manifest(receive, "handle").files)

    with (
        closing(spark_cluster.resource()) as spark,
        closing(ControlStore(f"sqlite:///{tmp_path}/control.sqlite")) as control,
    ):
        flow = Flow(
            BoundProducer(Thousands), queue, Lake(root=str(tmp_path / "lake")), control, lambda: spark.spark_session
        )
        killer = threading.Thread(target=kill_in_the_middle)
        killer.start()
        run(flow)
        killer.join()

    assert told == [0], "the worker was killed before handling was done"
    assert queue.backlog().messages == 0
    wanted = expected(range(COUNT))
    for name in ("numbers", "thirds"):
        counted = Counter(pl.read_delta(flow.tables[name].uri)["n"])
        assert counted == Counter(wanted[name])
    failed = [json.loads(data)["n"] for data in pl.read_delta(flow.tables["failed"].uri)["data"]]
    assert Counter(failed) == Counter(wanted["failed"])
