"""Fixtures of all tests: real servers, each started by the tests that use it."""

import importlib.util
import os

from pipelines.local_servers import sqs

pytest_plugins = [
    name
    for name in ("tests.postgres_fixtures", "tests.sqs_fixtures", "tests.spark_fixtures", "tests.dagster_fixtures")
    if importlib.util.find_spec(name)
]

# Before any server starts: tasks talk to local servers only, which look at no credentials.
os.environ.update(sqs.ENVIRONMENT)
# Java's second compiler pays in a long life, which a test's Spark has not; without it that starts a fifth sooner.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1")
