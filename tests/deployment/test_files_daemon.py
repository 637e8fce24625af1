"""Files of a bucket and a lake on Azure under the real daemon: runs are killed while files arrive."""

import json
import os
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from uuid import uuid4

import polars as pl
import pytest

from pipeline_platform.connectors.files import FileSource
from pipeline_platform.lake.storage import Lake
from servers import sqs
from tests.connectors.test_file_notifications import event
from tests.deployment.test_daemon import deployment, done, run_at_work
from tests.fixtures.location import write_location

HANDLING = """
import time
from datetime import timedelta
from pathlib import Path

from pydantic import BaseModel

from pipeline_platform import Pipeline, Processors, Producer, TableBatcher


class Line(BaseModel):
    number: int
    gate: str = ""
    fails: bool = False


class Lines(Pipeline):
    name = "lines"
    producer = Producer(source="files", idle_timeout=timedelta(seconds=3))
    processors = Processors(concurrency=2, max_demand=400)
    batchers = {"lake": TableBatcher(schema=Line)}

    def handle_message(self, message, context):
        line = message.json(Line)
        while line.gate and not Path(line.gate).exists():
            time.sleep(0.1)
        if line.fails:
            raise ValueError("as asked")
        return message.put(line, batcher="lake")
"""


@pytest.fixture
def bucket(tmp_path, s3, sqs_server, sqs_queue, monkeypatch) -> tuple[FileSource, Callable[..., None]]:
    """A bucket that is listed each second, with notifications that are delivered twice; a function that fills it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", sqs_server)
    monkeypatch.setenv("AWS_REGION", sqs.REGION)
    lake, queue = Lake(root=f"s3://lake/{uuid4().hex[:8]}", storage_options=s3), sqs_queue()

    def send(name: str, rows: list[dict[str, object]]) -> None:
        lake.write(name, content(rows))
        sqs.fill(queue, [event(f"{lake.root.removeprefix('s3://lake/')}/{name}")] * 2)

    options = {"storage_options": s3, "notifications": queue, "list_every_s": 1}
    return FileSource(name="files", root=lake.root, catalog=f"sqlite:///{tmp_path}/files.sqlite", **options), send


def content(rows: list[dict[str, object]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_each_row_is_stored_once_on_azure_if_runs_are_killed_while_they_handle_and_after_they_publish(
    tmp_path, warm_spark, bucket, azure_lake
):
    source, send = bucket
    lake = Lake(root=f"az://lake/{uuid4().hex[:8]}", storage_options=azure_lake)
    location = write_location(tmp_path, "lines", warm_spark.folder, HANDLING, "Lines", source, lake=lake)
    gates = [str(tmp_path / "first"), str(tmp_path / "second")]

    def rows(table: str) -> list[int]:
        """Return the numbers in a table, as a reader outside the platform finds them."""
        if not lake.names(f"lines/{table}/_delta_log"):
            return []
        found = pl.read_delta(lake.uri("lines", table), storage_options=lake.options)
        return sorted(found["number"] if table == "lake" else map(number_of, found["data"]))

    with deployment(tmp_path, warm_spark.folder, files=[location]) as deployed:
        for number, gate in enumerate(gates):
            first = 100 * number
            send(f"{number}.jsonl", [{"number": first, "gate": gate}, *({"number": first + n} for n in range(1, 100))])
        os.kill(run_at_work(deployed, "lines")[1], signal.SIGKILL)
        Path(gates[0]).touch()

        process = run_at_work(deployed, "lines")[1]
        Path(gates[1]).touch()
        deployed.until("rows are published", lambda: rows("lake"))
        with suppress(ProcessLookupError):  # it may have ended
            os.kill(process, signal.SIGKILL)

        send("2.jsonl", [*({"number": number} for number in range(200, 300)), {"number": 300, "fails": True}])
        deployed.until("all rows are stored", lambda: rows("lake") == [*range(300)])
        deployed.until("no file waits", lambda: source.backlog().messages == 0)
        deployed.until("the runs have ended", lambda: done(deployed.instance))
        assert {run.status.value for run in deployed.instance.get_runs()} >= {"SUCCESS", "FAILURE"}

    assert (rows("lake"), rows("failed")) == ([*range(300)], [300])
    assert not (tmp_path / "lake").exists(), "all tables are on Azure"
    with closing(sqlite3.connect(tmp_path / "files.sqlite")) as catalog:
        assert catalog.execute("SELECT path, is_done FROM files ORDER BY path").fetchall() == [
            (f"{number}.jsonl", 1) for number in range(3)
        ]
    source.close()


def number_of(row: bytes) -> int:
    return int(json.loads(row)["number"])
