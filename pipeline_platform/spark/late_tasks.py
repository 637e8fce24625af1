"""Which tasks of a receive take long, and on which host: Spark Connect names no task, the driver's UI does.

The UI is asked by its REST API, and only for words to people: where it does not answer, nothing is said.
"""

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from http.client import HTTPException
from typing import Any

LATE_S = 60.0
"""Seconds after which a task that runs is named."""
EACH_S = 60.0
"""Seconds between two looks."""
_ANSWERS_WITHIN_S = 2.0
_NAMED = 3


@contextmanager
def naming_late_tasks(ui: str, receive_id: str, log: Callable[[str], object]) -> Iterator[None]:
    """Log each minute, until the end of the block, which tasks of a receive take long; nothing without a UI."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(EACH_S):
            if (late := late_tasks(ui, receive_id)) and not ended.is_set():
                log(late)

    if ui:
        threading.Thread(target=look, name="late-tasks", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def late_tasks(ui: str, receive_id: str) -> str:
    """Say which tasks of a receive take long, and on which host; empty if none, or if the UI does not answer."""
    tag, late, count = f"receive-{receive_id}", [], 0
    with suppress(OSError, HTTPException, ValueError, KeyError):
        application = f"{ui.rstrip('/')}/api/v1/applications"
        application = f"{application}/{_asked(application)[0]['id']}"
        jobs = [job for job in _asked(f"{application}/jobs?status=running") if _is_of(job, tag)]
        stages = {stage for job in jobs for stage in job["stageIds"]}
        for stage in _asked(f"{application}/stages?status=active&details=true&taskStatus=RUNNING") if stages else ():
            if stage["stageId"] in stages:
                count += stage["numTasks"]
                late += [(_age(task), task["index"], task["host"]) for task in stage["tasks"].values()]
    late = sorted((one for one in late if one[0] > LATE_S), reverse=True)
    if not late:
        return ""
    named = [f"task {index} on host {host}, {age:.0f} s" for age, index, host in late[:_NAMED]]
    named += [f"and {len(late) - _NAMED} more"] if len(late) > _NAMED else []
    return f"{len(late)} of {count} Spark tasks run for longer than {LATE_S:.0f} s: {'; '.join(named)}"


def _asked(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=_ANSWERS_WITHIN_S) as reply:  # noqa: S310 - whoever deploys names the address
        return json.load(reply)


def _is_of(job: dict[str, Any], tag: str) -> bool:
    return any(one == tag or one.endswith(f"_{tag}") for one in job["jobTags"])


def _age(task: dict[str, Any]) -> float:
    """Seconds since a task that runs was launched."""
    launched = datetime.strptime(task["launchTime"].removesuffix("GMT"), "%Y-%m-%dT%H:%M:%S.%f").replace(tzinfo=UTC)
    return (datetime.now(UTC) - launched).total_seconds()
