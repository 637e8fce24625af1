"""Fixtures of all tests: real servers, each started by the tests that use it."""

import importlib.util

pytest_plugins = [
    name
    for name in ("tests.postgres_fixtures", "tests.sqs_fixtures", "tests.spark_fixtures")
    if importlib.util.find_spec(name)
]
