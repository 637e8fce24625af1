"""What a run says when the lake or Spark stayed away: which of them, for how long, and what happens next."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline_platform.lake.storage import AWAY_S, Lake
from pipeline_platform.model.safe_text import redacted

_STORE = re.compile(
    r"AWS Error (?:NETWORK_CONNECTION|REQUEST_TIMEOUT|SERVICE_UNAVAILABLE|SLOW_DOWN|INTERNAL_FAILURE).*|"
    r"Generic \w+ error(?=[\s\S]*(?:error sending request|after \d+ retries))"
)
"""What PyArrow and delta-rs say, each after it tried again, also as part of a task's traceback."""
_SPARK = re.compile(
    r"RESPONSE_ALREADY_RECEIVED|INVALID_HANDLE\.\w+|StatusCode\.UNAVAILABLE|failed to connect to all addresses"
)
_NEXT = "The next run finishes what this one decided, and receives the rest again"


class OutageError(Exception):
    """A server that a run needs was away for longer than the run waits."""


def store_away(error: Exception) -> str | None:
    """What PyArrow or delta-rs said of an object store that did not answer; None where that is not what went wrong."""
    return redacted(found[0]) if (found := _STORE.search(str(error))) else None


@contextmanager
def naming_outages(lake: Lake, spark: str) -> Iterator[None]:
    """Say in one sentence that the lake, or Spark at an address, was away.

    Raises:
        OutageError: In place of what a client raised after it had tried again.
    """
    try:
        yield
    except Exception as error:
        said = str(error)
        if not lake.is_local and (store_said := store_away(error)):
            away = f"the lake {lake.root} did not answer for about {AWAY_S} s ({store_said})"
            raise OutageError(f"{away}: see that the store runs. {_NEXT}") from error
        if spark.startswith("sc://") and (found := _SPARK.search(said)):
            away = f"Spark at {spark} is away, or was started anew in the middle of this run ({found[0]})"
            raise OutageError(f"{away}: see that the server runs. {_NEXT}") from error
        raise
