"""Held partitions under the real daemon, with a killed run and a shard that splits."""

import os
import signal
from collections import defaultdict

import polars as pl
import pytest

from pipeline_platform.connectors.kinesis import KinesisSource
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.storage import Lake
from tests.deployment.test_daemon import Deployed, deployment, run_at_work
from tests.fixtures.kinesis import split
from tests.fixtures.location import write_location

HANDLING = """
import time
from datetime import timedelta
from pathlib import Path

from pydantic import BaseModel

from pipeline_platform import Pipeline, Processors, Producer, Retry, TableBatcher


class Line(BaseModel):
    text: str
    handled_at: int


class Accounts(Pipeline):
    name = "accounts"
    producer = Producer(source="log", idle_timeout=timedelta(seconds=3))
    processors = Processors(concurrency=2, on_failure="hold")
    partition_by = "source"
    retry = Retry(max_attempts=50, backoff=timedelta(seconds=1))
    batchers = {"lines": TableBatcher(schema=Line)}

    def handle_message(self, message, context):
        text = message.data.decode()
        if text.startswith("fail until ") and not Path(text.split()[2]).exists():
            return message.failed("not yet")
        while text.startswith("wait for ") and not Path(text.split()[2]).exists():
            time.sleep(0.1)
        return message.put(Line(text=text, handled_at=time.monotonic_ns()), batcher="lines")
"""


def handled(deployed: Deployed) -> dict[int, list[int]]:
    """Return the numbers of the handled messages by partition, in the order of handling."""
    folder, found = deployed.folder / "lake" / "accounts" / "lines", defaultdict(list)
    if not folder.exists():
        return {}
    for text in pl.read_delta(str(folder)).sort("handled_at")["text"]:
        partition, number = text.split()[-2:]
        found[int(partition)].append(int(number))
    return dict(found)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_a_failure_holds_its_partition_until_it_is_handled_even_if_a_run_is_killed(
    tmp_path, warm_spark, kinesis_server, kinesis_stream
):
    source = KinesisSource(name="log", stream=kinesis_stream(2), endpoint_url=kinesis_server, region_name="us-east-1")
    fixed, gate = tmp_path / "fixed", tmp_path / "gate"
    location = write_location(tmp_path, "accounts", warm_spark.folder, HANDLING, "Accounts", source)

    def send(texts: list[str], first: int) -> None:
        numbered = [f"{text} {number % 3} {number}".strip() for number, text in enumerate(texts, first)]
        numbers = [number % 3 for number in range(first, first + len(texts))]
        source.send([text.encode() for text in numbered], [{"partition_key": f"{number}"} for number in numbers])

    with deployment(tmp_path, warm_spark.folder, files=[location]) as deployed:
        texts = [""] * 60
        texts[10] = f"fail until {fixed}"  # in partition 1
        send(texts, 0)
        expected = {0: [*range(0, 60, 3)], 1: [1, 4, 7], 2: [*range(2, 60, 3)]}
        deployed.until("the other partitions are handled", lambda: handled(deployed) == expected)

        split(source, 1)  # the shard of all three keys
        texts = [""] * 30
        texts[0] = f"wait for {gate}"  # in partition 0
        send(texts, 60)
        os.kill(run_at_work(deployed, "accounts")[1], signal.SIGKILL)
        gate.touch()
        expected = {0: [*range(0, 90, 3)], 1: [1, 4, 7], 2: [*range(2, 90, 3)]}
        deployed.until("a later run handles them", lambda: handled(deployed) == expected)

        fixed.touch()
        expected[1] = [*range(1, 90, 3)]
        deployed.until("the partition is handled in order", lambda: handled(deployed) == expected)
        failed = FailedMessages(name="accounts", lake=Lake(root=f"{tmp_path}/lake"), pipeline="accounts")
        deployed.until("no failure is open", lambda: not failed.chosen_by_window())
    source.close()
