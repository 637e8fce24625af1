"""Choice of the producer for a pull without a producer."""

from collections.abc import Callable
from typing import Any

from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.resources.source_resources import source_of
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.contract import SourceError


def with_most_waiting(pipeline: type[Pipeline], resources: Any, log: Callable[[str], None]) -> BoundProducer:
    """Return the producer with the most waiting messages; of equal producers, the first.

    A source that does not report its backlog ranks below sources with waiting messages.

    Raises:
        SourceError: No source answers.
    """
    found: dict[BoundProducer, Backlog] = {}
    unanswered: dict[BoundProducer, SourceError] = {}
    for producer in BoundProducer.all_of(pipeline):
        try:
            found[producer] = source_of(resources, producer.source).backlog()
        except SourceError as error:
            unanswered[producer] = error
    if not found:
        raise next(iter(unanswered.values()))
    chosen = max(found, key=lambda producer: 0.5 if (waiting := found[producer].messages) is None else waiting)
    answers = {**found, **dict.fromkeys(unanswered, "no answer")}
    seen = [f"{producer.name}: {answer}" for producer, answer in answers.items()]
    log(
        f"Chose producer {chosen.name!r}, which has the largest backlog ({'; '.join(seen)}). "
        "To pull from another producer, set `producer` in the config of receive_messages."
    )
    return chosen
