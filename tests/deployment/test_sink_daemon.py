"""Sinks under the real daemon: a killed run, and a database that refuses connections for a while."""

import os
import signal
import time
from typing import Any

import psycopg
import pytest
from psycopg import sql
from pyiceberg.table import StaticTable

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from tests.deployment.test_daemon import deployment, handling_in
from tests.fixtures.postgres import administrator

LOCATION = """
from handling import Lines
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.orchestration import ControlResource, LakeResource, SparkResource
from pipeline_platform.orchestration import platform_definitions, sink_resource, source_resource
from pipeline_platform.run import lease
from pipeline_platform.sinks.iceberg import IcebergSink
from pipeline_platform.sinks.postgres import PostgresSink

lease.CLAIM_S = 4.0
RESOURCES = {{
    "lake": LakeResource(root="{folder}/lake"),
    "control": ControlResource(url="sqlite:///{folder}/control.sqlite"),
    "spark": SparkResource(remote="warm", state_folder="{spark}"),
    "queue": source_resource(TableQueue)(name="queue", url="sqlite:///{folder}/lines.sqlite", lease_s=4.0),
    "warehouse": {sink},
}}
defs = platform_definitions([Lines], RESOURCES)
"""
URL = "postgresql://"
"""Start of the address of the database, which contains the rows or the catalog."""
SINKS = {
    "postgresql": 'sink_resource(PostgresSink)(name="warehouse", url="postgresql://{address}")',
    "iceberg": """sink_resource(IcebergSink)(
        name="warehouse",
        namespace="public",
        properties={{"type": "sql", "uri": "postgresql+psycopg://{address}", "warehouse": "{folder}/warehouse"}},
    )""",
}
FOUND = {
    "postgresql": "SELECT text FROM lines_lines",
    "iceberg": "SELECT metadata_location FROM iceberg_tables",
}
"""Statements that find the texts, or the newest metadata of the table with the texts."""
HANDLING = """
import time
from datetime import timedelta
from pathlib import Path

from pydantic import BaseModel

from pipeline_platform import Pipeline, Producer, TableBatcher


class Line(BaseModel):
    text: str


class Lines(Pipeline):
    name = "lines"
    producer = Producer(source="queue", idle_timeout=timedelta(seconds=3))
    batchers = {"lines": TableBatcher(schema=Line, sink="warehouse")}

    def handle_message(self, message, context):
        text = message.data.decode()
        while text.startswith("wait for ") and not Path(text.split()[2]).exists():
            time.sleep(0.1)
        return message.put(Line(text=text), batcher="lines")
"""


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", SINKS)
def test_the_sink_has_each_row_once_after_a_killed_run_and_an_outage(
    tmp_path, warm_spark, postgres_url, postgres_server, kind
):
    gate, address = tmp_path / "gate", postgres_url.removeprefix(URL)
    place = {"folder": tmp_path, "spark": warm_spark.folder}
    place["sink"] = SINKS[kind].format(folder=tmp_path, address=address)
    (tmp_path / "warehouse").mkdir()
    location = tmp_path / "lines" / "location.py"
    location.parent.mkdir()
    location.write_text(LOCATION.format(**place))
    location.with_name("handling.py").write_text(HANDLING)
    queue = TableQueue(name="queue", url=f"sqlite:///{tmp_path}/lines.sqlite")
    queue.create()
    sent = list[str]()

    def send(*texts: str) -> None:
        sent.extend(texts)
        queue.send([text.encode() for text in texts])

    def has_all() -> bool:
        try:
            with psycopg.connect(postgres_url) as connection:
                found = connection.execute(FOUND[kind]).fetchall()
        except psycopg.Error:
            return False
        texts = [value for (value,) in found]
        if kind == "iceberg":
            texts = [
                text for at in texts for text in StaticTable.from_metadata(at).scan().to_arrow()["text"].to_pylist()
            ]
        return sorted(texts) == sorted(sent)

    def allow(connections: str) -> None:
        name = sql.Identifier(postgres_url.rpartition("/")[2])
        with administrator(postgres_server) as connection:
            connection.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS " + connections).format(name))
            if connections == "false":
                others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
                connection.execute(others, [postgres_url.rpartition("/")[2]])

    with deployment(tmp_path, warm_spark.folder, files=[location]) as deployed:
        send(*(f"line {number}" for number in range(200)))
        deployed.until("the rows are stored", has_all)

        send(f"wait for {gate}", *(f"late {number}" for number in range(50)))
        control = ControlStore(f"sqlite:///{tmp_path}/control.sqlite")

        def at_work() -> Any:
            held = [claim.run_id for claim in control.in_flight("lines") if claim.messages]
            return held and handling_in(deployed.instance, held[0])

        os.kill(deployed.until("a run handles the messages", at_work), signal.SIGKILL)
        gate.touch()
        deployed.until("a later run stores its rows", has_all)

        allow("false")
        send(*(f"away {number}" for number in range(50)))
        time.sleep(45)
        allow("true")
        deployed.until("the rows of the outage are stored", has_all)
        deployed.until("all are acknowledged", lambda: queue.backlog().messages == 0)
