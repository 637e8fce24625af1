"""A lake on Azure Blob Storage under the real daemon: runs are killed while they handle, and after they publish."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import polars as pl
import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.lake.storage import Lake
from tests.deployment.test_daemon import deployment, done, run_at_work
from tests.fixtures.location import write_location

HANDLING = """
import time
from datetime import timedelta
from pathlib import Path

from pydantic import BaseModel

from pipeline_platform import Pipeline, Processors, Producer, TableBatcher


class Line(BaseModel):
    text: str


class Lines(Pipeline):
    name = "lines"
    producer = Producer(source="queue", idle_timeout=timedelta(seconds=3))
    processors = Processors(concurrency=2, max_demand=400)
    batchers = {"lake": TableBatcher(schema=Line)}

    def handle_message(self, message, context):
        text = message.data.decode()
        if text.startswith("fail"):
            raise ValueError(text)
        while text.startswith("wait for ") and not Path(text.split()[2]).exists():
            time.sleep(0.1)
        return message.put(Line(text=text), batcher="lake")
"""


@pytest.fixture
def lake(azure_lake) -> Lake:
    return Lake(root=f"az://lake/{uuid4().hex[:8]}", storage_options=azure_lake)


@pytest.fixture
def rows(lake) -> Callable[[str], pl.DataFrame]:
    """Return the rows of a table, as a reader outside the platform finds them."""

    def rows(table: str) -> pl.DataFrame:
        if not lake.names(f"lines/{table}/_delta_log"):
            return pl.DataFrame({"text": [], "data": []})
        return pl.read_delta(lake.uri("lines", table), storage_options=lake.options)

    return rows


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_each_message_is_stored_once_on_azure_if_runs_are_killed_while_they_handle_and_after_they_publish(
    tmp_path, warm_spark, lake, rows
):
    queue = TableQueue(name="queue", url=f"sqlite:///{tmp_path}/lines.sqlite", lease_s=4.0)
    queue.create()
    location = write_location(tmp_path, "lines", warm_spark.folder, HANDLING, "Lines", queue, lake=lake)
    gates = [str(tmp_path / name) for name in ("first", "second")]
    sent = list[str]()

    def send(*texts: str) -> None:
        sent.extend(texts)
        queue.send([text.encode() for text in texts])

    with deployment(tmp_path, warm_spark.folder, files=[location]) as deployed:
        send(f"wait for {gates[0]}", *(f"first {number}" for number in range(100)))
        os.kill(run_at_work(deployed, "lines")[1], signal.SIGKILL)
        Path(gates[0]).touch()
        deployed.until("a later run stores the rows", lambda: rows("lake").height == len(sent))

        send(f"wait for {gates[1]}", *(f"second {number}" for number in range(100)))
        process = run_at_work(deployed, "lines")[1]
        before = rows("lake").height
        Path(gates[1]).touch()
        deployed.until("further rows are published", lambda: rows("lake").height > before)
        with suppress(ProcessLookupError):  # it may have ended
            os.kill(process, signal.SIGKILL)

        send(*(f"third {number}" for number in range(100)))
        queue.send([b"fail"])
        deployed.until("all messages are acknowledged", lambda: queue.backlog().messages == 0)
        deployed.until("the runs have ended", lambda: done(deployed.instance))
        assert {run.status.value for run in deployed.instance.get_runs()} >= {"SUCCESS", "FAILURE"}

    assert sorted(rows("lake")["text"]) == sorted(sent)
    assert rows("failed")["data"].to_list() == [b"fail"]
    assert not (tmp_path / "lake").exists(), "all tables are on Azure"
    queue.close()
