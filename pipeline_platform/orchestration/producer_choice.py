"""The producer of a run that pulls and names none."""

from collections.abc import Callable
from typing import Any

from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.resources.source_resources import source_of
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.contract import SourceError


def with_most_waiting(pipeline: type[Pipeline], resources: Any, log: Callable[[str], None]) -> str:
    """Return the name of the producer that has the most messages waiting; the first of equals.

    A source that does not report its backlog comes after those where messages wait.

    Raises:
        SourceError: No source answers.
    """
    found: dict[str, Backlog] = {}
    unanswered: dict[str, SourceError] = {}
    for name, options in pipeline.producers.items():
        try:
            found[name] = source_of(resources, options.source).backlog()
        except SourceError as error:
            unanswered[name] = error
    if not found:
        raise next(iter(unanswered.values()))
    chosen = max(found, key=lambda name: 0.5 if (waiting := found[name].messages) is None else waiting)
    seen = [*(f"{name}: {one}" for name, one in found.items()), *(f"{name}: no answer" for name in unanswered)]
    log(
        f"pulling from producer {chosen!r}, which has the most messages waiting ({'; '.join(seen)}). "
        "To pull from another, set `producer` in the config of receive_messages"
    )
    return chosen
