"""Executors that a run may have if its steps share a connection."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from pipeline_platform.connectors.rabbitmq import RabbitmqSource
from pipeline_platform.control.store import ControlStore
from pipeline_platform.launcher.run_process import end_claims
from pipeline_platform.orchestration.deployment import platform_definitions
from pipeline_platform.orchestration.resources.source_resources import source_resource
from pipeline_platform.orchestration.runs.run_receive import has_one_process
from pipeline_platform.run import lease
from tests.fixtures.dagster import ROOT, WINDOW
from tests.fixtures.jobs_under_test import resources_at
from tests.fixtures.pipelines_under_test import Told

EXECUTORS = {
    "in_process": dg.in_process_executor,
    "multiprocess": dg.multiprocess_executor,
    "either": dg.multi_or_in_process_executor,
}
REFUSED = "gives each step of a run a process of its own"
AWAY = "127.0.0.1:1 does not answer"


def job_with(executor: str, root: str) -> dg.JobDefinition:
    """The pull of a pipeline over RabbitMQ, without a server."""
    queue = source_resource(RabbitmqSource)(name="queue", url="amqp://127.0.0.1:1", queue="told", backoff_type="stop")
    resources = {**resources_at(root, root), "queue": queue}
    return platform_definitions([Told], resources).resolve_job_def("told_pull").with_executor_def(EXECUTORS[executor])


@pytest.mark.parametrize(
    ("executor", "config", "expected"),
    [
        ("in_process", {}, True),
        ("either", {"in_process": {}}, True),
        ("either", {}, False),
        ("multiprocess", {}, False),
    ],
)
def test_steps_share_a_process_by_the_executor_or_its_config(executor, config, expected):
    job = SimpleNamespace(executor_def=EXECUTORS[executor])
    run = dg.DagsterRun("any", run_config={"execution": {"config": config}} if config else {})
    context: Any = SimpleNamespace(job_def=job, run=run)
    assert has_one_process(context) == expected


def test_a_run_whose_steps_would_not_share_a_connection_is_refused_before_it_asks_the_source(location):
    given = {"executor": "multiprocess", "root": str(location.root)}
    job = dg.build_reconstructable_job(__name__, "job_with", (), given, str(ROOT))

    result = dg.execute_job(job, location.instance, tags={"dagster/partition": WINDOW})

    log = location.log(location.stored(result.run_id))
    assert REFUSED in log
    assert AWAY not in log


def pull_with(executor: str, root: str, spark_folder: str) -> dg.JobDefinition:
    """The pull of a pipeline over a table queue."""
    defined = platform_definitions([Told], resources_at(root, spark_folder))
    return defined.resolve_job_def("told_pull").with_executor_def(EXECUTORS[executor])


def test_what_a_run_claimed_is_released_with_the_run(location):
    location.queue.send([b"1", b"2"])
    arguments = {"executor": "in_process", "root": str(location.root), "spark_folder": str(location.spark_folder)}
    job = dg.build_reconstructable_job(__name__, "pull_with", (), arguments, str(ROOT))
    options: dict[str, Any] = {"tags": {"dagster/partition": WINDOW}, "op_selection": ["told.receive_messages"]}
    dg.execute_job(job, location.instance, **options)
    assert location.control.in_flight("told") == []


SHORT_S = 4.0


def pull_with_slow_steps(root: str, spark_folder: str) -> dg.JobDefinition:
    """The pull of a pipeline whose claims expire soon. The process of the step after the receive starts late."""
    lease.CLAIM_S, was_late = SHORT_S, Path(root, "late")
    if ControlStore(f"sqlite:///{root}/control.sqlite").in_flight("told") and not was_late.exists():
        was_late.touch()
        time.sleep(2 * SHORT_S)
    return pull_with("multiprocess", root, spark_folder)


def test_a_claim_outlives_the_time_between_two_steps(location, monkeypatch):
    """A retry from an asset's page failed if a step took longer to start than a claim lasted."""
    monkeypatch.setattr(lease, "CLAIM_S", SHORT_S)
    location.queue.send([b"1", b"2"])
    arguments = {"root": str(location.root), "spark_folder": str(location.spark_folder)}
    job = dg.build_reconstructable_job(__name__, "pull_with_slow_steps", (), arguments, str(ROOT))
    expired, ended = [], threading.Event()

    def look() -> None:
        while not ended.wait(0.2):
            end_claims(location.instance, location.control, "told")
            over = location.control.over("told")
            # A claim also ends with its run.
            expired.extend(claim for claim in over if not location.stored(claim.run_id).is_finished)

    looking = threading.Thread(target=look)
    looking.start()
    steps = ["told.receive_messages", "told.handle_messages"]
    result = dg.execute_job(job, location.instance, tags={"dagster/partition": WINDOW}, op_selection=steps)
    ended.set()
    looking.join()

    assert result.success
    assert (location.root / "late").exists(), "the claim is not released with the process of a step"
    assert expired == []
    end_claims(location.instance, location.control, "told")
    assert [claim.run_id for claim in location.control.over("told")] == [result.run_id], "the run is finished"
