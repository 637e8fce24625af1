"""Fixtures of all tests: real servers, started on first use."""

import importlib.util
import os
import signal
import warnings
from pathlib import Path

import pytest
from hypothesis import settings

from pipeline_platform.lake.storage import Lake
from servers import sqs

pytest_plugins = [
    name
    for name in (
        "tests.fixtures.ending",
        "tests.fixtures.postgres",
        "tests.fixtures.servers",
        "tests.fixtures.s3",
        "tests.fixtures.kafka",
        "tests.fixtures.kafka_source",
        "tests.fixtures.kinesis",
        "tests.fixtures.rabbitmq",
        "tests.fixtures.rabbitmq_source",
        "tests.fixtures.pubsub",
        "tests.fixtures.spark",
        "tests.fixtures.flow",
        "tests.fixtures.dagster",
        "tests.fixtures.sensor",
        "tests.fixtures.table_queue",
        "tests.fixtures.control",
        "tests.fixtures.sqs_flow",
        "tests.fixtures.telemetry",
        "tests.fixtures.fake_schema_registry",
    )
    if importlib.util.find_spec(name)
]

# Before any server starts: tasks connect to local servers only, which check no credentials.
os.environ.update(sqs.ENVIRONMENT)
# Java's second compiler pays off in long processes only; without it Spark starts a fifth faster.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1")

# A slow machine must not fail a test. Faults of most properties are found by few examples.
settings.register_profile("unhurried", deadline=None, max_examples=40)
settings.register_profile("soak", deadline=None, max_examples=1_000)  # for properties without a number of their own
settings.load_profile("unhurried")

# Order of the first files: files with many forks while this process is small, because a fork copies its mapped memory;
# then the slowest files, because a slow file at the end would keep one process busy while the others have finished.
LONGEST = (
    "test_isolation.py", "test_parents.py", "test_plan.py",
    "test_source_contract.py", "test_demo.py", "test_run_launcher.py", "test_kafka_flow.py",
    "test_storms.py", "test_daemon.py", "test_faults.py", "test_quickstart.py",
    "test_rounds.py", "test_run_retention.py", "test_backfills.py", "test_assets.py", "test_flow.py",
    "test_reexecution.py", "test_coming_from_broadway.py",
    "test_pubsub_flow.py", "test_spark_resource.py", "test_sqs_runs.py", "test_kafka.py", "test_otlp.py",
    "test_spark_cluster.py", "test_spark_death.py",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that stop their own server as faults, and sort the slowest files first."""
    for item in items:
        if "own_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.faults)
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Make Ctrl-C raise in each test: an earlier test may have left a handler of Dagster, or a shell ignores it."""
    if (found := signal.getsignal(signal.SIGINT)) is not signal.default_int_handler:
        warnings.warn(f"{found} was left for SIGINT before {item.nodeid}", stacklevel=1)
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A new lake."""
    return Lake(root=str(tmp_path))
