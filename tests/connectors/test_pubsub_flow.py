"""Whole runs over Pub/Sub, on a real Spark."""

from contextlib import closing

import pytest

from pipeline_platform.connectors.pubsub import PubsubSource
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.run.flow import Flow
from tests.fixtures.flow import kinds, rows, run
from tests.fixtures.flow_pipelines import Obedient
from tests.fixtures.received import received


@pytest.fixture
def flow(tmp_path, warm_spark, subscribed):
    control = ControlStore(f"sqlite:///{tmp_path}/control.sqlite")
    with closing(warm_spark.resource()) as spark:
        yield Flow(
            BoundProducer(Obedient),
            subscribed(name="queue"),
            Lake(root=str(tmp_path / "lake")),
            control,
            lambda: spark.spark_session,
        )


def test_spark_s_tasks_receive_handle_and_acknowledge(flow):
    words = [f"word {n}" for n in range(1_500)]
    flow.source.send([*(word.encode() for word in words), b"raise", b"batch a"])

    receive = run(flow)

    assert sorted(rows(flow, "words")["word"]) == sorted(words)
    assert rows(flow, "batches")["batch_key"].to_list() == ["a"]
    assert kinds(flow) == {"raise": "ValueError"}
    assert flow.ledger.get(receive.receive_id) is None
    assert isinstance(flow.source, PubsubSource)
    flow.source.release(flow.source._path, rows(flow, "messages")["ack_id"].to_list())
    assert received(flow.source, 1) == [], "all was acknowledged, what failed, too: none is there to be given back"
