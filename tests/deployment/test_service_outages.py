"""Services that callbacks call are down for a while, under the daemon, over real brokers, with killed runs."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread

import dagster as dg
import polars as pl
import pytest

from pipeline_platform.connectors.kafka import KafkaSource
from pipeline_platform.connectors.rabbitmq import RabbitmqSource
from servers.server import free_ports
from tests.deployment.test_daemon import Deployed, deployment, done, run_at_work
from tests.fixtures.fake_schema_registry import framed
from tests.fixtures.kafka_source import patiently_send
from tests.fixtures.location import write_location
from tests.model.test_avro import encoded, field

ORDERS = """
from pydantic import BaseModel

from pipeline_platform import Pipeline, Processors, Producer, TableBatcher
from pipeline_platform.connectors.schema_registry import SchemaRegistry


class Order(BaseModel):
    number: int


class Orders(Pipeline):
    name = "orders"
    producer = Producer(source="orders_queue")
    processors = Processors(concurrency=2, max_demand=100)
    batchers = {{"lake": TableBatcher(schema=Order)}}

    def __init__(self):
        self.registry = SchemaRegistry({{"url": "{url}"}})

    def handle_message(self, message, context):
        return message.put(message.avro(Order, self.registry), batcher="lake")
"""
PAYMENTS = """
import socket
import time
from datetime import timedelta

from pydantic import BaseModel

from pipeline_platform import Backoff, Batcher, Breaker, Pipeline, Processors, Producer, Retry


class Payment(BaseModel):
    number: int


class Payments(Pipeline):
    name = "payments"
    producer = Producer(
        source="orders_queue",
        breaker=Breaker(of_last=20, pause=Backoff(first=timedelta(seconds=3), most=timedelta(seconds=6))),
    )
    processors = Processors(concurrency=2, max_demand=20)
    batchers = {{"lake": Batcher(batch_size=5, schema=Payment)}}
    retry = Retry(max_attempts=50, backoff=Backoff(first=timedelta(seconds=1), most=timedelta(seconds=5)))

    def handle_message(self, message, context):
        return message.put(message.json(Payment), batcher="lake")

    def handle_batch(self, batcher, messages, batch_info, context):
        try:
            socket.create_connection(("127.0.0.1", {port}), 5).close()
        except ConnectionError:
            time.sleep(1)  # as long as a client that tries once more
            raise
        return messages
"""


def numbers(deployed: Deployed, pipeline: str, table: str = "lake") -> list[int]:
    """Return the numbers in a table, sorted; empty without a table."""
    folder = deployed.folder / "lake" / pipeline / table
    return sorted(pl.read_delta(str(folder))["number"]) if (folder / "_delta_log").exists() else []


def skip_reasons(instance: dg.DagsterInstance, sensor: str) -> list[str]:
    """Return the reasons of a sensor's ticks without a run."""
    states = [state for state in instance.all_instigator_state() if state.instigator_name == sensor]
    ticks = (tick for state in states for tick in instance.get_ticks(state.instigator_origin_id, state.selector_id))
    return [tick.skip_reason for tick in ticks if tick.skip_reason]


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_while_a_schema_registry_is_away_no_message_fails_and_afterwards_each_is_stored_once(
    tmp_path, warm_spark, kafka_server, kafka_topic, fake_schema_registry
):
    topic = kafka_topic(partitions=2)
    source = KafkaSource(
        name="orders_queue", bootstrap_servers=kafka_server, group_id=f"group-{topic}", topics=(topic,)
    )
    row = {"type": "record", "name": "Order", "fields": [field("number", "long")]}
    schemas = [fake_schema_registry.register("orders", json.dumps({**row, "doc": text})) for text in ("old", "new")]

    def send(schema_id: int, among: range) -> None:
        patiently_send(source, [framed(schema_id, encoded(row, {"number": number})) for number in among])

    url = fake_schema_registry.url
    location = write_location(tmp_path, "orders", warm_spark.folder, ORDERS.format(url=url), "Orders", source)
    with deployment(tmp_path, warm_spark.folder, files=[location]) as deployed:
        send(schemas[0], range(150))
        deployed.until("the first are stored", lambda: len(numbers(deployed, "orders")) == 150)
        fake_schema_registry.stop()
        ends = time.monotonic() + 60
        send(schemas[0], range(150, 300))
        send(schemas[1], range(300, 450))
        run_id, pid = run_at_work(deployed, "orders")
        os.kill(pid, signal.SIGKILL)
        time.sleep(max(0.0, ends - time.monotonic()))
        fake_schema_registry.start()
        deployed.until("all are stored", lambda: len(set(numbers(deployed, "orders"))) == 450, within_s=400)
        deployed.until("the runs have ended", lambda: done(deployed.instance))

        assert numbers(deployed, "orders") == list(range(450))
        failed = tmp_path / "lake" / "orders" / "failed"
        assert pl.read_delta(str(failed)).height == 0
        killed = deployed.instance.get_run_by_id(run_id)
        assert killed is not None
        assert killed.status == dg.DagsterRunStatus.FAILURE


class Target(ThreadingTCPServer):
    """A service on a port, which accepts connections until it is closed."""

    allow_reuse_address = True
    daemon_threads = True


@contextmanager
def target(port: int) -> Iterator[Callable[[], None]]:
    """Yield a function that starts the service."""
    started: list[Target] = []

    def start() -> None:
        started.append(Target(("127.0.0.1", port), BaseRequestHandler))
        Thread(target=started[-1].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    try:
        yield start
    finally:
        for server in started:
            server.shutdown()
            server.server_close()


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_a_producer_with_a_breaker_pauses_while_its_target_is_down_and_resumes_by_itself(
    tmp_path, warm_spark, rabbitmq_server, rabbitmq_queue
):
    source = RabbitmqSource(name="orders_queue", url=rabbitmq_server, queue=rabbitmq_queue())
    (port,) = free_ports(1)
    handling = PAYMENTS.format(port=port)
    location = write_location(tmp_path, "orders", warm_spark.folder, handling, "Payments", source)
    with target(port) as start, deployment(tmp_path, warm_spark.folder, files=[location]) as deployed:
        payloads = [json.dumps({"number": number}).encode() for number in range(200)]
        source.send(payloads, [{"message_id": f"m{number}"} for number in range(200)])

        def paused() -> list[str]:
            reasons = skip_reasons(deployed.instance, "payments_producer")
            return [reason for reason in reasons if "messages failed; next attempt at" in reason]

        deployed.until("the breaker is open, and a tick says so", paused)
        run_id, pid = run_at_work(deployed, "payments")
        os.kill(pid, signal.SIGKILL)
        reasons = len(paused())
        deployed.until("the breaker is open again", lambda: len(paused()) > reasons)
        assert numbers(deployed, "payments") == []
        table = str(tmp_path / "lake" / "payments" / "failed")
        assert pl.read_delta(table)["message_id"].n_unique() <= 80, "the others wait at the broker"

        start()
        deployed.until("all are stored", lambda: len(set(numbers(deployed, "payments"))) == 200, within_s=400)
        deployed.until("the runs have ended", lambda: done(deployed.instance))

        assert numbers(deployed, "payments") == list(range(200))
        last = pl.read_delta(table).sort("attempt").group_by("message_id", maintain_order=True).last()
        assert set(last["state"]) == {"closed"}
        killed = deployed.instance.get_run_by_id(run_id)
        assert killed is not None
        assert killed.status == dg.DagsterRunStatus.FAILURE
    source.close()
