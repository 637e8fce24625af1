"""Choice of the producer for a pull that names none."""

from collections.abc import Callable
from typing import Any

from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.resources.source_resources import source_of
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.contract import SourceError


def with_most_waiting(pipeline: type[Pipeline], resources: Any, log: Callable[[str], None]) -> str:
    """Return the name of the producer with the most waiting messages; of equals, the first.

    A source that does not report its backlog ranks below sources with waiting messages.

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
    seen = [*(f"{name}: {backlog}" for name, backlog in found.items()), *(f"{name}: no answer" for name in unanswered)]
    log(
        f"Chose producer {chosen!r}, which has the largest backlog ({'; '.join(seen)}). "
        "To pull from another producer, set `producer` in the config of receive_messages."
    )
    return chosen
