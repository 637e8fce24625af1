"""Pipelines of `docs/migrate/from-broadway.md`: five in whole runs with real servers, one of them on Spark."""

import importlib
import json
import re
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest

from pipeline_platform.connectors.kafka import KafkaSource
from pipeline_platform.connectors.rabbitmq import RabbitmqSource
from pipeline_platform.connectors.sqs import SqsSource
from pipeline_platform.control import demand
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.sensors.runs_under_way import limits
from pipeline_platform.run.flow import Flow
from pipeline_platform.source.contract import Source
from pipeline_platform.source.patience import patiently
from tests.fixtures.documents import deployed
from tests.fixtures.flow import kinds, rows, run
from tests.fixtures.rabbitmq import create_queue

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "migrate" / "from-broadway.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", DOCUMENT, re.S)
PIPELINES = {name: block for block in BLOCKS for name in re.findall(r"^class (\w+)\(Pipeline\)", block, re.M)}
SOURCES = [block for block in BLOCKS if "source_resource(" in block]
GUIDE = (ROOT / "docs" / "connect" / "your-own.md").read_text()
GUIDED = re.findall(r"```python\n(.*?)```", GUIDE, re.S)

Started = Callable[[str, Source], Flow]


@pytest.fixture
def started(tasks_here, started_on_spark):
    return started_on_spark


@pytest.fixture
def started_on_spark(tmp_path, warm_spark, request, monkeypatch):
    """Return a flow of a pipeline of the document, whose file Spark's workers get like `pipelines`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    with closing(ControlStore(f"sqlite:///{tmp_path}/control.sqlite")) as control:

        def start(name: str, source: Source) -> Flow:
            file = f"of_the_document_{name.lower()}"
            (tmp_path / f"{file}.py").write_text(PIPELINES[name])
            monkeypatch.delitem(sys.modules, file, raising=False)
            pipeline: type[Pipeline] = getattr(importlib.import_module(file), name)
            spark = warm_spark.resource(file)
            request.addfinalizer(spark.close)
            return Flow(
                BoundProducer(pipeline), source, Lake(root=str(tmp_path / "lake")), control, lambda: spark.spark_session
            )

        yield start


@pytest.fixture
def guided(tmp_path, monkeypatch):
    """Write the sources of the guide into the files that the document names."""
    made = {}
    for name in ("Counter", "Trackings"):
        module, (block,) = f"resources.{name.lower()}", [block for block in GUIDED if f"class {name}(" in block]
        path = tmp_path / f"{name.lower()}.py"
        path.write_text(block)
        spec = importlib.util.spec_from_file_location(module, path)
        assert spec is not None
        assert spec.loader is not None
        monkeypatch.setitem(sys.modules, module, importlib.util.module_from_spec(spec))
        spec.loader.exec_module(sys.modules[module])
        made[name] = vars(sys.modules[module])[name]
    return made


def waiting(source: Source) -> list[dict[str, Any]]:
    """Return the payloads of the messages that wait at a source."""
    shares = source.plan(100, 1, "r")
    data = [data for share in shares for batch in source.read(share, "r") for data in batch["data"].to_pylist()]
    return [json.loads(payload) for payload in data]


def test_its_definitions_load_with_all_six(guided):
    names = deployed(BLOCKS)
    assert len(PIPELINES) == len(SOURCES) == 6
    jobs = {job.name for job in names["defs"].resolve_all_job_defs()}
    assert {f"{names[name].name}_pull" for name in PIPELINES} <= jobs


@pytest.mark.parametrize("name", PIPELINES)
def test_no_pipeline_has_more_than_thirty_lines(name):
    assert len([line for line in PIPELINES[name].splitlines() if line.strip()]) <= 32


def test_orders_go_to_s3_and_to_another_queue(started, sqs_server, sqs_queue, s3, monkeypatch):
    url, large = sqs_queue(), sqs_queue()
    source = SqsSource(name="orders_queue", queue_url=url, endpoint_url=sqs_server)
    orders = [{"id": number, "total": 2_000 if number % 4 == 0 else 5} for number in range(60)]
    source.send([json.dumps(order).encode() for order in orders] + [b"no order"])
    # As an operator sets it for the workers.
    for service, address in ("SQS", sqs_server), ("S3", s3["AWS_ENDPOINT_URL"]):
        monkeypatch.setenv(f"AWS_ENDPOINT_URL_{service}", address)
    flow = started("Orders", source)

    store = boto3.client("s3", endpoint_url=s3["AWS_ENDPOINT_URL"])
    store.create_bucket(Bucket="orders")

    run(flow, context={"queue_url": large})

    objects = store.list_objects_v2(Bucket="orders")["Contents"]
    bodies = [store.get_object(Bucket="orders", Key=item["Key"])["Body"].read().decode() for item in objects]
    uploaded = [json.loads(line)["id"] for body in bodies for line in body.splitlines()]
    assert sorted(uploaded) == [number for number in range(60) if number % 4]
    next_queue = SqsSource(name="large", queue_url=large, endpoint_url=sqs_server)
    assert sorted(order["id"] for order in waiting(next_queue)) == list(range(0, 60, 4))
    assert kinds(flow) == {"no order": "PayloadError"}
    assert source.backlog().messages == 0


def test_payments_are_made_and_the_refused_are_dead_lettered(started, rabbitmq_server, request):
    letters = RabbitmqSource(name="letters", url=rabbitmq_server, queue=create_queue(rabbitmq_server), wait_time_s=1)
    routes = {"x_dead_letter_exchange": "", "x_dead_letter_routing_key": letters.queue}
    queue = create_queue(rabbitmq_server, **routes)
    source = RabbitmqSource(name="payments_queue", url=rabbitmq_server, queue=queue, on_failure="reject")
    for opened in (letters, source):
        request.addfinalizer(opened.close)
    payments = [{"number": number, "amount": number % 50} for number in range(200)]
    source.send([json.dumps(payment).encode() for payment in payments])
    flow = started("Payments", source)

    receive = run(flow)

    assert sorted(rows(flow, "paid")["number"]) == [number for number in range(200) if number % 50]
    refused = {json.loads(data)["number"] for data in kinds(flow)}
    assert refused == {0, 50, 100, 150}
    assert {payment["number"] for payment in waiting(letters)} == refused
    source.close()
    assert source.backlog().messages == 0
    assert flow.ledger.get(receive.receive_id) is None


def test_each_user_s_events_are_handled_in_order(started_on_spark, kafka_server, kafka_topic, request):
    topic = kafka_topic(3)
    source = KafkaSource(name="events_topic", bootstrap_servers=kafka_server, group_id=topic, topics=(topic,))
    flow = started_on_spark("Events", source)
    request.addfinalizer(source.close)
    patiently(source._cluster.members)
    events = [{"user": f"user-{number % 7}", "number": number} for number in range(210)]
    source.send([json.dumps(event).encode() for event in events], [{"key": event["user"]} for event in events])

    run(flow)

    handled = rows(flow, "events").sort("handled_ns")
    for user in range(7):
        mine = handled.filter(handled["user"] == f"user-{user}")["number"].to_list()
        assert mine == list(range(user, 210, 7))


def test_the_counter_gives_a_run_what_it_demands_and_goes_on_from_there(started, guided, tmp_path):
    flow = started("Squares", guided["Counter"](name="numbers", path=tmp_path / "numbers"))
    found = []
    for _ in range(2):
        run(flow)
        found.append(sorted(rows(flow, "squares")["number"]))
    assert found == [list(range(50)), list(range(100))]
    assert (tmp_path / "numbers").read_text() == "100"
    assert set(rows(flow, "squares").select("number", "square").iter_rows()) == {(n, n**2) for n in range(100)}


def test_trackings_are_marked_ten_an_interval(started, guided, tmp_path):
    path = tmp_path / "trackings.sqlite"
    (schema,) = re.findall(r"```sql\n(.*?)```", GUIDE, re.S)
    flow = started("Updates", guided["Trackings"](name="trackings", path=path))
    assert flow.pipeline.producer.rate_limiting is not None
    # Of an hour, so that the test does not wait for the limit.
    spans = iter(timedelta(hours=1, minutes=minutes) for minutes in range(9))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(schema)
        codes = [(f"{['seur', 'mrw', 'owl'][number % 3]}:{number}",) for number in range(25)]
        connection.executemany("INSERT INTO trackings (code) VALUES (?)", codes)

    done = []
    for _ in range(3):
        limit = flow.pipeline.producer.rate_limiting
        flow.control.update_rate_limiting("updates", limit, interval=next(spans))
        bounds = limits(flow.producer, flow.control, datetime.now(UTC))
        ask = demand.next_ask(flow.source.backlog(), bounds, demand.NOTHING, None)
        run(flow, demand=ask.demand or 5)
        with closing(sqlite3.connect(path)) as connection:
            done.append(connection.execute("SELECT count(*) FROM trackings WHERE done").fetchone()[0])

    assert done == [10, 20, 25]
    told = Counter(json.loads(data)["status"] for name in ("updates", "unknown") for data in rows(flow, name)["data"])
    assert told == {"in transit": 17, "no such carrier": 8}
