"""Outages of the lake and of Spark, short and permanent."""

import threading

import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake import object_stores, storage
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.run import steps
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.outages import OutageError, naming_outages
from pipeline_platform.spark.engine import TaskError
from servers.server import free_ports
from tests.fixtures.flow import begun
from tests.fixtures.pipelines_under_test import Told
from tests.fixtures.s3 import lake_on, options_of
from tests.fixtures.small_lake import Keeping

SPARK = "sc://spark:15002"
AWAY_S = 3


def test_a_run_waits_in_each_step_for_a_lake_that_is_away_and_loses_nothing(tasks_here, tmp_path, own_s3_server):
    queue = TableQueue(name="queue", url=f"sqlite:///{tmp_path}/queue.sqlite")
    queue.create()
    queue.enqueue([b"one", b"two", b"fail"])
    flow = Flow(
        BoundProducer(Told),
        queue,
        lake_on(own_s3_server),
        ControlStore(f"sqlite:///{tmp_path}/control.sqlite"),
        lambda: None,
    )
    waited = []

    def away(step, *arguments):
        own_s3_server.stop()
        back = threading.Timer(AWAY_S, own_s3_server.start)
        back.start()
        done = step(*arguments)
        waited.append(not back.is_alive())
        back.join()
        return done

    receive = away(begun, flow)
    for step in (steps.receive_messages, steps.handle_messages, steps.decide, steps.publish):
        away(step, flow, receive)
    answer = away(steps.acknowledge, flow, receive)

    assert all(waited), "each step needed the lake"
    assert (answer.acknowledged, answer.errors) == (3, [])
    tables = {name: flow.tables[name] for name in ("messages", "lines", "failed")}
    shown = {}
    for name, table in tables.items():
        with table.look() as handle:
            shown[name] = sum(file.rows for file in table.files(handle))
    assert shown == {"messages": 3, "lines": 2, "failed": 1}


@pytest.mark.parametrize(
    "ask",
    [lambda lake: lake.read("file"), lambda lake: Tables(lake, Keeping)["outcomes"].version()],
    ids=["file", "table"],
)
def test_a_lake_that_stays_away_is_named_in_one_sentence(monkeypatch, ask):
    monkeypatch.setattr(object_stores, "_ATTEMPTS", 1)
    monkeypatch.setattr(storage, "_PATIENCE", {"max_retries": "1", "retry_timeout": "1s"})
    nobody = Lake(root="s3://lake/here", storage_options=options_of(f"http://127.0.0.1:{free_ports(1)[0]}"))
    said = r"^the lake s3://lake/here did not answer for about 120 s \(.+\)\. Check that the store is running"
    with pytest.raises(OutageError, match=said) as raised, naming_outages(nobody, SPARK):
        ask(nobody)
    with pytest.raises(OutageError, match=said), naming_outages(nobody, SPARK):
        raise TaskError(f"A Spark task failed:\n{raised.value.__cause__}")


@pytest.mark.parametrize(
    "said",
    [
        "[RESPONSE_ALREADY_RECEIVED] INVALID_HANDLE.SESSION_NOT_FOUND",
        "[INVALID_HANDLE.SESSION_CHANGED] The handle is invalid",
        '<_MultiThreadedRendezvous ... status = StatusCode.UNAVAILABLE details = "Connection refused">',
    ],
)
def test_a_spark_server_that_was_killed_is_named_in_one_sentence(lake, said):
    named = "^Spark at sc://spark:15002 is unavailable"
    with pytest.raises(OutageError, match=named), naming_outages(lake, SPARK):
        raise RuntimeError(said)


def test_what_a_callback_says_of_a_store_of_its_own_stays_as_it_is(lake):
    with pytest.raises(TaskError, match="boto"), naming_outages(lake, "warm"):
        raise TaskError("boto: StatusCode.UNAVAILABLE, AWS Error SLOW_DOWN")
