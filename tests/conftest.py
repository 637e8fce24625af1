"""Fixtures of all tests: real servers, each started by the tests that use it."""

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
        "tests.fixtures.sqs",
        "tests.fixtures.s3",
        "tests.fixtures.kafka",
        "tests.fixtures.kafka_source",
        "tests.fixtures.rabbitmq",
        "tests.fixtures.rabbitmq_source",
        "tests.fixtures.pubsub",
        "tests.fixtures.spark",
        "tests.fixtures.spark_cluster",
        "tests.fixtures.flow",
        "tests.fixtures.dagster",
        "tests.fixtures.sensor",
        "tests.fixtures.table_queue",
        "tests.fixtures.control",
        "tests.fixtures.sqs_flow",
        "tests.fixtures.telemetry",
    )
    if importlib.util.find_spec(name)
]

# Before any server starts: tasks talk to local servers only, which look at no credentials.
os.environ.update(sqs.ENVIRONMENT)
# Java's second compiler pays in a long life, which a test's Spark has not; without it that starts a fifth sooner.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1")

settings.register_profile("unhurried", deadline=None)  # a busy machine is no fault
settings.load_profile("unhurried")

# In this order: files that fork for each message while this process is small, for a fork copies what it has mapped; and
# a file that takes minutes, begun last, would keep one process busy while the others have nothing left.
LONGEST = (
    "test_isolation.py", "test_parents.py", "test_plan.py",
    "test_source_contract.py", "test_demo.py", "test_run_launcher.py", "test_kafka_flow.py",
    "test_storms.py", "test_daemon.py", "test_faults.py", "test_quickstart.py",
    "test_backfills.py", "test_assets.py", "test_flow.py", "test_reexecution.py", "test_coming_from_broadway.py",
    "test_pubsub_flow.py", "test_spark_resource.py", "test_sqs_runs.py", "test_kafka.py", "test_otlp.py",
    "test_spark_cluster.py", "test_spark_death.py", "test_spark_death_in_dagster.py",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take each test that stops a server of its own for one of faults; begin with the files that take longest."""
    for item in items:
        if "own_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.faults)
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have Ctrl-C raise in each test: an earlier one may have left a handler of Dagster's, or a shell ignores it."""
    if (found := signal.getsignal(signal.SIGINT)) is not signal.default_int_handler:
        warnings.warn(f"{found} was left for SIGINT before {item.nodeid}", stacklevel=1)
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A lake of the test's own."""
    return Lake(root=str(tmp_path))
