"""Log lines for slow Spark tasks of a receive, from the REST API of the driver's UI.

Spark Connect does not report tasks. The result is only logged: if the UI does not answer, nothing is logged.
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
"""Seconds after which a running task is reported."""
EACH_S = 60.0
"""Seconds between two requests."""
_ANSWERS_WITHIN_S = 2.0
_NAMED = 3


@contextmanager
def naming_late_tasks(ui: str, receive_id: str, log: Callable[[str], object]) -> Iterator[None]:
    """Log slow tasks of a receive each minute, until the end of the block; nothing without a UI."""
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
    """Return a log line with the slow tasks of a receive and their hosts; empty if there are none or no answer."""
    tag, late, count = f"receive-{receive_id}", [], 0
    with suppress(OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError):
        application = f"{ui.rstrip('/')}/api/v1/applications"
        application = f"{application}/{_asked(application)[0]['id']}"
        jobs = [job for job in _asked(f"{application}/jobs?status=running") if _is_of(job, tag)]
        stages = {stage for job in jobs for stage in job["stageIds"]}
        for stage in _asked(f"{application}/stages?status=active&details=true&taskStatus=RUNNING") if stages else ():
            if stage["stageId"] in stages:
                count += stage["numTasks"]
                late += [(_age(task), task["index"], task["host"]) for task in stage["tasks"].values()]
    late = sorted((task for task in late if task[0] > LATE_S), reverse=True)
    if not late:
        return ""
    named = [f"task {index} on host {host}, {age:.0f} s" for age, index, host in late[:_NAMED]]
    named += [f"and {len(late) - _NAMED} more"] if len(late) > _NAMED else []
    return f"Slow Spark tasks: {len(late)} of {count} have run for more than {LATE_S:.0f} s: {'; '.join(named)}"


def _asked(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=_ANSWERS_WITHIN_S) as reply:  # noqa: S310 - configured by the deployment
        return json.load(reply)


def _is_of(job: dict[str, Any], tag: str) -> bool:
    return any(job_tag == tag or job_tag.endswith(f"_{tag}") for job_tag in job["jobTags"])


def _age(task: dict[str, Any]) -> float:
    launched = datetime.strptime(task["launchTime"].removesuffix("GMT"), "%Y-%m-%dT%H:%M:%S.%f").replace(tzinfo=UTC)
    return (datetime.now(UTC) - launched).total_seconds()
