"""Draining: no new runs, and those under way give back what they have not begun; until nothing is under way."""

import time
from collections.abc import Callable
from datetime import UTC, datetime

from pipeline_platform.control.claims import Claim
from pipeline_platform.control.demand import count
from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.pipeline import Pipeline


def drain(
    store: ControlStore,
    pipeline: type[Pipeline],
    reason: str,
    producer: str = "",
    *,
    log: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Drain a pipeline or one of its producers, and wait until nothing is under way; it stays paused.

    Runs under way still begin messages for the pipeline's `shutdown`. One that has not claimed its room yet ends with
    nothing. A replay that is cut changes nothing, and the fast lane works to its end. Beside a drain of one producer,
    backfills and replays, which are of all, go on. `log` hears what is under way, each time that it changed.

    Returns:
        In words, what it came to.
    """
    key = pipeline.limits_key(producer)
    store.drain(key, reason, pipeline.shutdown)
    before = ""
    while live := under_way(store, key):
        now, stops_at = datetime.now(UTC), store.draining(key)
        if stops_at is None:
            return f"{key}: somebody resumed or paused it meanwhile, and {_held(live)} go on"
        until = f"begin messages for {(stops_at - now).total_seconds():.0f} s more" if now < stops_at else "begin none"
        if before != (before := f"{_held(live)}, which {until}"):
            log(f"{key}: {before}")
        sleep(1.0)
    if store.paused(key) is None:
        return f"{key}: nothing is under way, and somebody resumed it"
    store.pause(key, reason)
    dead = store.over(key)
    left = f"; {_held(dead)} died, and the next run after `resume` finishes what they left" if dead else ""
    return f"{key} is drained, and paused: {reason}{left}"


def under_way(store: ControlStore, key: str) -> list[Claim]:
    """The live claims of a pipeline with all its producers, or of one producer."""
    return store.in_flight(key, of_all="/" not in key)


def _held(claims: list[Claim]) -> str:
    runs = "1 run" if len(claims) == 1 else f"{len(claims)} runs"
    return f"{count(sum(claim.messages for claim in claims))} in {runs}"
