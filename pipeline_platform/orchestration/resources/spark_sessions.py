"""Spark sessions, opened and closed independently of the process's environment variables for Spark."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg
from tenacity import retry, retry_if_exception_message, stop_after_attempt

from pipeline_platform.imports import import_apart

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.client.retries import RetryPolicy

_OUTAGE_S = 60.0
"""Seconds that a client retries to reach a server, over all calls. Spark's default is ten minutes for each call."""
_CALM_S = 30.0
"""Seconds without an error that end an outage."""
_CLIENT_MARK = "SPARK_CONNECT_MODE_ENABLED"
_CONNECT = ("pyspark.sql.connect.session", "pyspark.sql.connect.window")
_CLASSIC = ("pandas", "pyspark.sql.classic.dataframe", "pyspark.sql.classic.window")
"""Modules that sessions of either kind load at some point."""


def open_session(settings: dict[str, str]) -> SparkSession:
    """Create a session through dagster-pyspark, with Spark's environment variables ignored."""
    # Set by an earlier client. Spark's functions use it to choose the type of columns.
    os.environ.pop(_CLIENT_MARK, None)
    # gRPC would use the proxy of the environment even for addresses of this machine.
    given = os.environ.get("no_grpc_proxy", os.environ.get("no_proxy"))  # noqa: SIM112 - as gRPC spells it
    direct = ",".join(filter(None, [given, "localhost"]))
    settled = changed_environment(SPARK_REMOTE=None, SPARK_LOCAL_REMOTE=None, no_grpc_proxy=direct)
    with warnings.catch_warnings(), settled:
        warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")
        import_apart("dagster_pyspark", *(_CONNECT if "spark.remote" in settings else _CLASSIC))
        from dagster_pyspark import LazyPySparkResource

        return LazyPySparkResource(spark_config=settings).spark_session


def retry_policy(address: str, expect_alive: Callable[[], None]) -> RetryPolicy:
    """Build a policy that retries for `_OUTAGE_S` seconds, as long as the server process is alive."""
    log = dg.get_dagster_logger("spark")
    from pyspark.sql.connect.client.retries import DefaultPolicy

    class WhileAlive(DefaultPolicy):  # type: ignore[misc, unused-ignore]
        began = seen = float("-inf")

        def can_retry(self, e: BaseException) -> bool:
            if not super().can_retry(e):
                return False
            expect_alive()
            now = time.monotonic()
            if now - self.seen > _CALM_S:
                self.began = now
                log.warning(f"Spark at {address} does not answer. Retrying for {_OUTAGE_S:g} s: {e}")
            self.seen = now
            # Over all calls: further calls of a failed step must not wait as long again.
            return now - self.began < _OUTAGE_S

    return WhileAlive(max_backoff=5_000)


# Two processes may send the same file at the same time. The later process finds identical bytes on its retry.
@retry(retry=retry_if_exception_message(match=r"(?is).*already_?exists"), stop=stop_after_attempt(3), reraise=True)
def ship(session: SparkSession, code: Path) -> None:
    """Send the project's code to the workers of a session."""
    path = list(sys.path)
    try:
        session.addArtifacts(str(code), pyfile=True)
    finally:
        sys.path[:] = path  # Spark also adds the code to this process's path, where it would hide later edits


def leave(session: SparkSession) -> None:
    """Close the client but not the session: `stop` would end the session for all runs."""
    session.client.close()
    os.environ.pop(_CLIENT_MARK, None)
    # As `stop` does: otherwise a later session never becomes the default session, which `udf` and others use.
    if type(session)._default_session is session:
        type(session)._default_session = None


@contextmanager
def changed_environment(**changes: str | None) -> Iterator[None]:
    """Set environment variables within a block; None removes a variable."""
    before = {name: os.environ.pop(name, None) for name in changes}
    os.environ.update({name: value for name, value in changes.items() if value is not None})
    try:
        yield
    finally:
        for name in changes:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})
