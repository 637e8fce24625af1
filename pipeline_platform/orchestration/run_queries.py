"""Queries for a pipeline's runs that read few rows, independent of the number of runs.

All runs of a pipeline have its tags. SQLite searches a filter with tags by the index of tags, and so reads every run of
the pipeline. Therefore the database selects by status, time or job, and tags are compared here.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime

import dagster as dg

_ENDED = 100
"""Maximum number of runs to read that ended since a time."""
_PAGES = 10
"""Maximum number of queries for the runs of one of several producers, which have a job in common."""

Tags = Mapping[str, str | Sequence[str]]
"""Tags of runs. If a tag has several values, each of them matches."""


def runs_with(
    instance: dg.DagsterInstance,
    statuses: Sequence[dg.DagsterRunStatus],
    tags: Tags,
    since: datetime | None = None,
) -> list[dg.RunRecord]:
    """Return the runs with one of the statuses, newest first: unfinished runs, or runs updated since a time."""
    found = dg.RunsFilter(statuses=list(statuses), updated_after=since)
    return _tagged(instance.get_run_records(found, limit=None if since is None else _ENDED), tags)


def newest_runs(
    instance: dg.DagsterInstance, job: str, statuses: Collection[dg.DagsterRunStatus], tags: Tags, most: int
) -> list[dg.RunRecord]:
    """Return the newest runs of a job, newest first.

    Runs of other jobs with the tags, such as manual materialisations, are among them if they are among the newest runs
    of all jobs.
    """
    of_all = instance.get_run_records(limit=2 * most) if tags else []
    found = {record.storage_id: record for record in _tagged(of_all, tags) if record.dagster_run.status in statuses}
    of_job, cursor = dg.RunsFilter(job_name=job, statuses=list(statuses)), None
    for _ in range(_PAGES):
        page = instance.get_run_records(of_job, limit=most, cursor=cursor)
        found |= {record.storage_id: record for record in _tagged(page, tags)}
        if len(found) >= most or len(page) < most:
            break
        cursor = page[-1].dagster_run.run_id
    return [found[storage_id] for storage_id in sorted(found, reverse=True)[:most]]


def _tagged(records: Iterable[dg.RunRecord], tags: Tags) -> list[dg.RunRecord]:
    wanted = {key: (value,) if isinstance(value, str) else value for key, value in tags.items()}

    def has_tags(run: dg.DagsterRun) -> bool:
        return all(run.tags.get(key) in values for key, values in wanted.items())

    return [record for record in records if has_tags(record.dagster_run)]
