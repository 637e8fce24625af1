"""Dagster's own retries of a run (`dagster/max_retries`) under the real daemon, by both strategies."""

import json
from collections import Counter
from typing import Any

import dagster as dg
import polars as pl
import pytest

from pipeline_platform.control.store import ControlStore
from tests.deployment.test_daemon import deployment

LOCATION = """
from pathlib import Path

from handling import Numbers
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.orchestration import ControlResource, LakeResource, SparkResource
from pipeline_platform.orchestration import platform_definitions, source_resource
from pipeline_platform.run import steps


def failing_once(name):
    step, gate = getattr(steps, name), Path("{folder}", name)

    def fail_or_work(flow, receive):
        if gate.exists():
            gate.unlink()
            raise RuntimeError("scripted failure")
        return step(flow, receive)

    setattr(steps, name, fail_or_work)


failing_once("decide")
failing_once("publish")
RESOURCES = {{
    "lake": LakeResource(root="{folder}/lake"),
    "control": ControlResource(url="sqlite:///{folder}/control.sqlite"),
    "spark": SparkResource(remote="warm", state_folder="{spark}"),
    "queue": source_resource(TableQueue)(
        name="queue", url="sqlite:///{folder}/queue.sqlite", created_column="created_at"
    ),
}}
defs = platform_definitions([Numbers], RESOURCES)
"""
HANDLING = """
from datetime import UTC, datetime

from pydantic import BaseModel

from pipeline_platform import Pipeline, Producer, TableBatcher


class Line(BaseModel):
    text: str


class Numbers(Pipeline):
    name = "numbers"
    producer = Producer(source="queue")
    first_window = datetime(2025, 3, 1, tzinfo=UTC)
    batchers = {{"lines": TableBatcher(schema=Line)}}

    def handle_message(self, message, context):
        with open("{folder}/diary", "a") as diary:
            diary.write(message.data.decode() + "\\n")
        return message.put(Line(text=message.data.decode()), batcher="lines")
"""
WINDOW = "2025-03-01T0000"


@pytest.fixture(scope="module")
def retrying(tmp_path_factory, warm_spark):
    """Yield a deployment whose daemon retries runs, and whose sensor is paused."""
    folder = tmp_path_factory.mktemp("retrying")
    place: dict[str, Any] = {"folder": folder, "spark": warm_spark.folder}
    location = folder / "numbers" / "location.py"
    location.parent.mkdir()
    location.write_text(LOCATION.format(**place))
    location.with_name("handling.py").write_text(HANDLING.format(**place))
    ControlStore(f"sqlite:///{folder}/control.sqlite").pause("numbers", "the tests start its runs")
    settings = "\nrun_retries:\n  enabled: true\n"
    with deployment(folder, warm_spark.folder, files=[location], settings=settings) as deployed:
        yield deployed


@pytest.mark.faults
@pytest.mark.parametrize(("strategy", "failing", "calls"), [("FROM_FAILURE", "publish", 1), ("ALL_STEPS", "decide", 2)])
def test_a_run_that_dagster_retries_loses_and_doubles_no_message(retrying, strategy, failing, calls):
    case = f"{failing} {strategy}"
    texts = [f"{case} {number}" for number in range(20)]
    retrying.queue.enqueue(text.encode() for text in texts)
    (retrying.folder / failing).touch()
    config = {"ops": {"numbers": {"ops": {"receive_messages": {"config": {"ignore_pause": True}}}}}}
    windows = {f"dagster/asset_partition_range_{end}": WINDOW for end in ("start", "end")}
    tags = {"case": case, "dagster/max_retries": "1", "dagster/retry_strategy": strategy, **windows}

    launch = ("--job", "numbers_pull", "--config-json", json.dumps(config), "--tags", json.dumps(tags))
    retrying.call("job", "launch", *launch)

    def ended() -> Any:
        runs = retrying.instance.get_runs(dg.RunsFilter(tags={"case": case}))
        return runs if len(runs) == 2 and all(run.is_finished for run in runs) else None

    again, first = retrying.until("the run and its retry have ended", ended, within_s=550)
    assert (first.status, again.status) == (dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.SUCCESS)
    assert again.parent_run_id == first.run_id
    steps = {step.step_key for step in retrying.instance.get_run_step_stats(again.run_id)}
    assert ("numbers.receive_messages" in steps) == (strategy == "ALL_STEPS")
    assert retrying.left() == 0
    stored = pl.read_delta(f"{retrying.folder}/lake/numbers/lines")["text"].to_list()
    assert sorted(text for text in stored if text.startswith(case)) == sorted(texts)
    called = Counter((retrying.folder / "diary").read_text().splitlines())
    assert [called[text] for text in texts] == [calls] * 20
