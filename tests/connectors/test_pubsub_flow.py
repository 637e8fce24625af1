"""Whole runs over Pub/Sub, on a real Spark."""

import pickle
from contextlib import closing
from typing import Any

import dagster as dg
import pytest
from pydantic import Field, ValidationError

from pipeline_platform.connectors.pubsub import PubsubSource
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.orchestration.resources.source_resources import source_resource
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


class Tenants(PubsubSource):
    """Pulls for one tenant."""

    tenant: str = Field(description="Whose messages.")


def test_options_of_a_subclass_are_options_of_its_resource_and_reach_tasks(monkeypatch):
    monkeypatch.setenv("TENANT", "north")
    own: dict[str, Any] = {"name": "flights", "subscription": "flights", "project": "shop"}

    with dg.build_resources({"flights": source_resource(Tenants)(**own, tenant=dg.EnvVar("TENANT"))}) as resources:
        copied = pickle.loads(pickle.dumps(resources.flights))
    assert (type(copied), copied.tenant) == (Tenants, "north")
    with pytest.raises(ValidationError, match="tenant"):
        Tenants(**own)
