"""An erasure beside a continuous run under the real daemon, killed and repeated while messages arrive."""

import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.lake.storage import Lake
from tests.deployment.test_daemon import Deployed, deployment
from tests.fixtures.erasing import places

LOCATION = """
from handling import Visits
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.orchestration import ControlResource, LakeResource, SparkResource
from pipeline_platform.orchestration import platform_definitions, source_resource

RESOURCES = {{
    "lake": LakeResource(root="{folder}/lake"),
    "control": ControlResource(url="sqlite:///{folder}/control.sqlite"),
    "spark": SparkResource(remote="warm", state_folder="{spark}"),
    "queue": source_resource(TableQueue)(name="queue", url="sqlite:///{folder}/visits.sqlite"),
}}
defs = platform_definitions([Visits], RESOURCES)
"""
HANDLING = """
from datetime import timedelta

from pydantic import BaseModel

from pipeline_platform import Pipeline, Producer, TableBatcher


class Visit(BaseModel):
    person: str
    number: int


class Visits(Pipeline):
    name = "visits"
    producer = Producer(source="queue", idle_timeout=timedelta(seconds=60))
    batchers = {"visits": TableBatcher(schema=Visit)}

    def handle_message(self, message, context):
        visit = message.json(Visit)
        if visit.number % 10 == 7:
            raise ValueError(f"refused {visit.person}")
        return message.put(visit, batcher="visits")
"""
ANNA, BEN = "anna@example.com", "ben@example.com"
KILLS = 3


def numbers(deployed: Deployed, person: str) -> Counter[int]:
    """Return the numbers of a person's visits in the tables, handled or failed."""
    found: Counter[int] = Counter()
    for table in ("visits", "failed"):
        folder = deployed.folder / "lake" / "visits" / table
        if (folder / "_delta_log").exists():
            rows = pl.read_delta(str(folder)).to_dicts()
            given = rows if table == "visits" else [json.loads(row["data"]) for row in rows]
            found.update(row["number"] for row in given if row["person"] == person)
    return found


def erasing(folder: Path) -> subprocess.Popen[str]:
    command = [Path(sys.executable).with_name("pipeline-platform"), "-m", "location", "erase", "visits"]
    options = ["--containing", ANNA, "--reason", "request 7", "--yes"]
    return subprocess.Popen([*command, *options], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_an_erasure_beside_a_continuous_run_loses_and_doubles_no_other_message(tmp_path, warm_spark):
    location = tmp_path / "visits" / "location.py"
    location.parent.mkdir()
    location.write_text(LOCATION.format(folder=tmp_path, spark=warm_spark.folder))
    location.with_name("handling.py").write_text(HANDLING)
    queue = TableQueue(name="queue", url=f"sqlite:///{tmp_path}/visits.sqlite")
    queue.create()
    sent, is_over = list[int](), threading.Event()

    def send(person: str, some: range) -> None:
        queue.send([json.dumps({"person": person, "number": number}).encode() for number in some])

    def arrive() -> None:
        while not is_over.wait(0.5):
            some = range(len(sent), len(sent) + 20)
            send(BEN, some)
            sent.extend(some)

    with deployment(tmp_path, warm_spark.folder, files=[location]) as deployed:
        send(ANNA, range(60))
        arriving = threading.Thread(target=arrive)
        arriving.start()
        try:
            deployed.until("her visits are stored", lambda: len(numbers(deployed, ANNA)) == 60)
            for seed in range(KILLS):
                with erasing(location.parent) as process:
                    assert process.stderr is not None
                    assert process.stderr.readline()  # it has begun
                    time.sleep(random.Random(seed).uniform(0, 1.5))
                    process.kill()

            def is_erased() -> Any:
                process = erasing(location.parent)
                said = process.communicate(timeout=200)
                assert process.returncode in (0, 1), said
                return process.returncode == 0

            deployed.until("the erasure is complete", is_erased)
            assert numbers(deployed, ANNA) == Counter()
        finally:
            is_over.set()
            arriving.join()
        deployed.until("the other visits are stored", lambda: len(numbers(deployed, BEN)) == len(sent))
        deployed.until("all are acknowledged", lambda: queue.backlog().messages == 0)
        assert numbers(deployed, BEN) == Counter(sent)
        lake = SimpleNamespace(pipeline=SimpleNamespace(name="visits"), lake=Lake(root=f"{tmp_path}/lake"))
        assert places(lake, ANNA) == set()
