"""Draining: a pipeline starts no new runs, and current runs release the messages that they have not started."""

import time
from collections.abc import Callable
from datetime import UTC, datetime

from pipeline_platform.control.claims import Claim, count_runs
from pipeline_platform.control.demand import count
from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.strict_options import PipelineError


class DrainCancelledError(PipelineError):
    """A pipeline was resumed or paused during its drain, so that its runs may still be active."""


def drain(
    store: ControlStore,
    producer: BoundProducer,
    reason: str,
    *,
    log: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Drain a pipeline or one of its producers, and wait until its runs have ended. It stays paused.

    Current runs start further messages for the pipeline's `shutdown` time. A run that has no claim yet ends without
    messages. A replay that is cut short changes nothing, and the Spark lane is not interrupted. A drain of one producer
    does not affect retries and replays, which belong to the whole pipeline. `log` gets the current runs each
    time that they change.

    Returns:
        The result in words.

    Raises:
        DrainCancelledError: The pipeline was resumed or paused meanwhile.
    """
    key = producer.key
    store.drain(key, reason, producer.pipeline.shutdown)
    before = ""
    while live := under_way(store, key):
        now, stops_at = datetime.now(UTC), store.draining(key)
        if stops_at is None:
            raise DrainCancelledError(
                f"{key}: the drain was cancelled by a resume or a pause; {_held(live)} still active. Drain it again"
            )
        remaining_s = (stops_at - now).total_seconds()
        until = f"may start messages for {remaining_s:.0f} s more" if remaining_s > 0 else "may start no more messages"
        if before != (before := f"{_held(live)}; they {until}"):
            log(f"Draining {key}: {before}")
        sleep(1.0)
    if store.paused(key) is None:
        raise DrainCancelledError(f"{key}: no active runs, but it was resumed during the drain. Drain it again")
    store.pause(key, reason)
    crashed = store.over(key, of_all="/" not in key)
    left = f"; {_held(crashed)} crashed; the first run after `resume` finishes their receives" if crashed else ""
    return f"{key} is drained and paused: {reason}{left}"


def under_way(store: ControlStore, key: str) -> list[Claim]:
    """Return the live claims of a pipeline with all its producers, or of one producer."""
    return store.in_flight(key, of_all="/" not in key)


def _held(claims: list[Claim]) -> str:
    runs = "1 run" if (number := count_runs(claims)) == 1 else f"{number} runs"
    return f"{count(sum(claim.messages for claim in claims))} in {runs}"
