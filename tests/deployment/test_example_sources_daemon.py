"""The documents' example sources under the real daemon: runs are killed as they handle, and after they publish."""

import os
import shutil
import signal
import sys
from contextlib import suppress

import polars as pl
import pytest

from tests.deployment.test_daemon import deployment, done, run_at_work
from tests.fixtures.location import write_location
from tests.fixtures.source_rows import nats, redis

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
    producer = Producer(source="contract", idle_timeout=timedelta(seconds=3))
    batchers = {"lake": TableBatcher(schema=Line)}

    def handle_message(self, message, context):
        text = message.data.decode()
        while text.startswith("wait for ") and not Path(text.removeprefix("wait for ")).exists():
            time.sleep(0.1)
        return message.put(Line(text=text), batcher="lake")
"""


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [redis, nats])
def test_each_message_is_stored_once_although_runs_are_killed(tmp_path, warm_spark, request, kind):
    new, _ = kind(request, 4)
    source = new()
    location = write_location(tmp_path, "lines", warm_spark.folder, HANDLING, "Lines", source)
    module = sys.modules[type(source).__module__]
    shutil.copy(str(module.__file__), location.parent)  # as a user does
    location.write_text(location.read_text().replace(module.__name__, module.__name__.rpartition(".")[2]))
    gates = [tmp_path / "first", tmp_path / "second"]
    sent = [f"wait for {gate}" for gate in gates] + [str(number) for number in range(100)]

    with deployment(tmp_path, warm_spark.folder, files=[location]) as deployed:

        def stored() -> list[str]:
            table = tmp_path / "lake" / "lines" / "lake"
            return sorted(pl.read_delta(str(table))["text"]) if table.exists() else []

        source.send([text.encode() for text in sent])
        os.kill(run_at_work(deployed, "lines")[1], signal.SIGKILL)
        gates[0].touch()
        process = run_at_work(deployed, "lines")[1]
        gates[1].touch()
        deployed.until("rows are published", stored)
        with suppress(ProcessLookupError):  # it may have ended
            os.kill(process, signal.SIGKILL)

        deployed.until("all messages are stored", lambda: stored() == sorted(sent))
        deployed.until("the queue is empty", lambda: source.backlog().messages == 0)
        deployed.until("the runs have ended", lambda: done(deployed.instance))
        assert stored() == sorted(sent)
        assert {run.status.value for run in deployed.instance.get_runs()} >= {"SUCCESS", "FAILURE"}
    source.close()
