"""Failed steps with the reason as the first line of their error in Dagster."""

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg

from pipeline_platform.control.store import ControlStoreError
from pipeline_platform.lake.decisions.decision import FencedError, UnhandledError
from pipeline_platform.lake.decisions.ledger import ReceiveError
from pipeline_platform.lake.latest.latest import MergeError
from pipeline_platform.lake.tables import CommitError, LogExpiredError
from pipeline_platform.model.pipeline import PipelineError
from pipeline_platform.run.outages import OutageError
from pipeline_platform.source.contract import SourceError
from pipeline_platform.spark.jvm import JavaNotFoundError
from pipeline_platform.spark.server import SparkServerDiedError, SparkServerError

REASONS = (
    CommitError,
    ControlStoreError,
    FencedError,
    JavaNotFoundError,
    LogExpiredError,
    MergeError,
    OutageError,
    PipelineError,
    ReceiveError,
    SourceError,
    SparkServerDiedError,
    SparkServerError,
    UnhandledError,
)
"""Errors with a text for users. Dagster shows other errors with its stack, and their own text at the end."""


@contextmanager
def failing_with_reason() -> Iterator[None]:
    """Fail a step with its reason only, without Dagster's stack.

    Raises:
        dagster.Failure: Replaces an error of `REASONS`, and contains its class and text.
    """
    try:
        yield
    except REASONS as error:
        raise dg.Failure(f"{type(error).__name__}: {error}") from None
