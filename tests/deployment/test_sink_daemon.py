"""Sinks under the real daemon: a killed run, and a database that refuses connections for a while."""

import os
import signal
import time

import psycopg
import pytest
from psycopg import sql
from pyiceberg.table import StaticTable

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.sinks.iceberg import IcebergSink
from pipeline_platform.sinks.postgres import PostgresSink
from tests.deployment.test_daemon import deployment, run_at_work
from tests.fixtures.location import write_location
from tests.fixtures.postgres import administrator

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
    batchers = {name: TableBatcher(schema=Line, sink=name) for name in ("postgresql", "iceberg")}

    def handle_message(self, message, context):
        text = message.data.decode()
        while text.startswith("wait for ") and not Path(text.split()[2]).exists():
            time.sleep(0.1)
        return message.put(Line(text=text), batcher="iceberg" if text[-1] in "13579" else "postgresql")
"""


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_each_sink_has_each_row_once_after_a_killed_run_and_an_outage(
    tmp_path, warm_spark, postgres_url, postgres_server
):
    gate, address = tmp_path / "gate", postgres_url.removeprefix("postgresql://")
    (tmp_path / "warehouse").mkdir()
    catalog = {"type": "sql", "uri": f"postgresql+psycopg://{address}", "warehouse": f"{tmp_path}/warehouse"}
    postgresql = PostgresSink(name="postgresql", url=postgres_url)
    iceberg = IcebergSink(name="iceberg", namespace="public", properties=catalog)
    queue = TableQueue(name="queue", url=f"sqlite:///{tmp_path}/lines.sqlite", lease_s=4.0)
    queue.create()
    spark = warm_spark.folder
    location = write_location(tmp_path, "lines", spark, HANDLING, "Lines", queue, postgresql, iceberg)
    sent = list[str]()

    def send(*texts: str) -> None:
        sent.extend(texts)
        queue.send([text.encode() for text in texts])

    def has_all() -> bool:
        try:
            with psycopg.connect(postgres_url) as connection:
                texts = [text for (text,) in connection.execute("SELECT text FROM lines_postgresql")]
                tables = connection.execute("SELECT metadata_location FROM iceberg_tables").fetchall()
        except psycopg.Error:
            return False
        for (place,) in tables:
            texts += StaticTable.from_metadata(place).scan().to_arrow()["text"].to_pylist()
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
        os.kill(run_at_work(deployed, "lines")[1], signal.SIGKILL)
        gate.touch()
        deployed.until("a later run stores its rows", has_all)

        allow("false")
        send(*(f"away {number}" for number in range(50)))
        time.sleep(45)
        allow("true")
        deployed.until("the rows of the outage are stored", has_all)
        deployed.until("all are acknowledged", lambda: queue.backlog().messages == 0)
