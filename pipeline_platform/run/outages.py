"""Errors of a run when the lake or Spark is unavailable: the server, the time and the consequence."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline_platform.lake.object_stores import AWAY
from pipeline_platform.lake.storage import AWAY_S, Lake
from pipeline_platform.model.safe_text import redacted

_SPARK = re.compile(
    r"RESPONSE_ALREADY_RECEIVED|INVALID_HANDLE\.\w+|StatusCode\.UNAVAILABLE|failed to connect to all addresses"
)
_NEXT = "The next run publishes and acknowledges decided messages, and receives the others again"


class OutageError(Exception):
    """A server that a run needs was unavailable for longer than the run waits."""


def store_away(error: Exception) -> str | None:
    """Return the text of an error of PyArrow or delta-rs if the object store did not answer, otherwise None."""
    return redacted(found[0]) if (found := AWAY.search(str(error))) else None


@contextmanager
def naming_outages(lake: Lake, spark: str) -> Iterator[None]:
    """Replace errors about an unavailable lake or Spark server.

    Raises:
        OutageError: Names the server in a sentence. Replaces the error of a client after its own retries.
    """
    try:
        yield
    except Exception as error:
        if not lake.is_local and (reason := store_away(error)):
            outage = f"the lake {lake.root} did not answer for about {AWAY_S} s ({reason})"
            raise OutageError(f"{outage}. Check that the store is running. {_NEXT}") from error
        if spark.startswith("sc://") and (found := _SPARK.search(str(error))):
            outage = f"Spark at {spark} is unavailable, or was restarted during this run ({found[0]})"
            raise OutageError(f"{outage}. Check that the server is running. {_NEXT}") from error
        raise
