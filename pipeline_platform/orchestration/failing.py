"""The reason of a failed step, as the first line of its error in Dagster."""

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg

from pipeline_platform.control.store import ControlStoreError
from pipeline_platform.lake.decision import FencedError, UnhandledError
from pipeline_platform.lake.ledger import ReceiveError
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
    OutageError,
    PipelineError,
    ReceiveError,
    SourceError,
    SparkServerDiedError,
    SparkServerError,
    UnhandledError,
)
"""Errors whose text is written for users. Others are shown with Dagster's stack, and end with their own text."""


@contextmanager
def failing_with_reason() -> Iterator[None]:
    """Fail a step by its reason alone: Dagster shows another exception below the stack of its own frames.

    Raises:
        dagster.Failure: In place of an error of `REASONS`, with its class and text.
    """
    try:
        yield
    except REASONS as error:
        raise dg.Failure(f"{type(error).__name__}: {error}") from None
