"""Opening and closing a Spark session, whatever the environment of the process says about another Spark."""

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
"""Seconds that a client tries to reach a server, over all calls; Spark's own client tries ten minutes in each call."""
_CALM_S = 30.0
"""Seconds without an error after which the next one begins another outage."""
_CLIENT_MARK = "SPARK_CONNECT_MODE_ENABLED"
_CONNECT = ("pyspark.sql.connect.session", "pyspark.sql.connect.window")
_CLASSIC = ("pandas", "pyspark.sql.classic.dataframe", "pyspark.sql.classic.window")
"""What sessions of either kind load sooner or later."""


def open_session(settings: dict[str, str]) -> SparkSession:
    """Have dagster-pyspark make a session, whatever the environment says about Spark."""
    # Left by a client before this one; Spark's functions look at it to know which kind of column to make.
    os.environ.pop(_CLIENT_MARK, None)
    # gRPC reads the proxy of the environment as it opens a channel, for this machine's own addresses too.
    given = os.environ.get("no_grpc_proxy", os.environ.get("no_proxy"))  # noqa: SIM112 - as gRPC spells it
    direct = ",".join(filter(None, [given, "localhost"]))
    settled = changed_environment(SPARK_REMOTE=None, SPARK_LOCAL_REMOTE=None, no_grpc_proxy=direct)
    with warnings.catch_warnings(), settled:
        warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")
        import_apart("dagster_pyspark", *(_CONNECT if "spark.remote" in settings else _CLASSIC))
        from dagster_pyspark import LazyPySparkResource

        return LazyPySparkResource(spark_config=settings).spark_session


def retry_policy(address: str, expect_alive: Callable[[], None]) -> RetryPolicy:
    """Build a retry policy that tries again for `_OUTAGE_S`, while the server lives."""
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
                log.warning(f"Spark at {address} does not answer, and is asked again for {_OUTAGE_S:g} s: {e}")
            self.seen = now
            # Over all calls: what a failed step still has to ask of the server must not wait as long again.
            return now - self.began < _OUTAGE_S

    return WhileAlive(max_backoff=5_000)


# Two processes that see no file yet both send theirs; the later one finds the very same bytes the next time.
@retry(retry=retry_if_exception_message(match=r"(?is).*already_?exists"), stop=stop_after_attempt(3), reraise=True)
def ship(session: SparkSession, code: Path) -> None:
    """Send the project's code to the workers of a session."""
    path = list(sys.path)
    try:
        session.addArtifacts(str(code), pyfile=True)
    finally:
        sys.path[:] = path  # Spark puts the code on this process's path too, where it would outlive an edit


def leave(session: SparkSession) -> None:
    """Close the client and not the session: `stop` would end it for all."""
    session.client.close()
    os.environ.pop(_CLIENT_MARK, None)
    # As `stop` does: else no later session is ever the default one, which functions such as `udf` ask for.
    if type(session)._default_session is session:
        type(session)._default_session = None


@contextmanager
def changed_environment(**changes: str | None) -> Iterator[None]:
    """Set variables of this process until the end of the block, or remove those that are None."""
    before = {name: os.environ.pop(name, None) for name in changes}
    os.environ.update({name: value for name, value in changes.items() if value is not None})
    try:
        yield
    finally:
        for name in changes:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})
