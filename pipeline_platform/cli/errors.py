"""Errors of a deployment, each reported in one line; and the exit codes of the command line."""

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline_platform.cli.loading import SetUpError
from pipeline_platform.cli.terminal import say
from pipeline_platform.control.store import ControlStoreError
from pipeline_platform.lake.decisions.ledger import ReceiveError
from pipeline_platform.lake.storage import AWAY_S
from pipeline_platform.model.strict_options import PipelineError
from pipeline_platform.run.outages import store_away
from pipeline_platform.source.contract import SourceError
from pipeline_platform.spark.jvm import JavaNotFoundError
from pipeline_platform.spark.server import SparkServerError

FAILED, BROKEN, INTERRUPTED = 1, 2, 130
EXIT_CODES = {
    0: ("the command succeeded", "all pipelines are healthy", "all checks are ok"),
    FAILED: ("the command failed, or a run that it waited for", "a pipeline is behind or failing", "a warning"),
    BROKEN: ("an argument or an option is not valid", "a pipeline is broken, or its state is unknown", "an error"),
    INTERRUPTED: ("interrupted by Ctrl-C", "", "interrupted by Ctrl-C"),
}
"""Meaning of each exit code: in general, of `status`, and of `doctor`."""

_ERRORS = (
    SetUpError,
    ControlStoreError,
    JavaNotFoundError,
    PipelineError,
    ReceiveError,
    SourceError,
    SparkServerError,
)


def line_of(error: Exception) -> str | None:
    """Return an error of the deployment as one line; None for any other error."""
    if isinstance(error, _ERRORS):
        return str(error)
    if (said := store_away(error)) is None:
        return None
    return f"The lake did not answer for about {AWAY_S} s ({said}). Check that the store is running."


@contextmanager
def exiting_with(code: int) -> Iterator[None]:
    """Print an error of the deployment in one line, and exit with this code."""
    try:
        yield
    except Exception as error:
        if (line := line_of(error)) is None:
            raise
        say(*line.split("\n"), err=True)
        raise SystemExit(code) from None
