"""Runs on a time line, by their claims and acknowledged receives in the control store, and by Dagster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pipeline_platform.cli.dashboard.picture import TIME_LINE, RunLine, RunState, Work
from pipeline_platform.control.claims import Claim, Ended

if TYPE_CHECKING:
    import dagster as dg

    from pipeline_platform.orchestration.jobs import RunTags

_ACTIVE, _ENDED = 8, 3
"""Maximum number of runs of each kind on a time line."""
_STATES: dict[str, RunState] = {
    "QUEUED": "queued",
    "NOT_STARTED": "queued",
    "STARTING": "queued",
    "SUCCESS": "succeeded",
    "FAILURE": "failed",
    "CANCELED": "canceled",
}


def run_lines(
    live: Sequence[Claim],
    expired: Iterable[Claim],
    ended: Iterable[Ended],
    records: Iterable[dg.RunRecord],
    tags: RunTags,
    now: datetime,
) -> tuple[RunLine, ...]:
    """Return active runs, oldest first, then the last ended runs, latest first.

    Args:
        live: Claims of active runs.
        expired: Claims of crashed runs.
        ended: Acknowledged receives.
        records: Active and recent runs of the pipeline in Dagster; empty if Dagster is unknown.
        tags: Keys of the pipeline's tags.
        now: Time of the picture.
    """
    work: dict[str, list[Work]] = defaultdict(list)
    for receive in ended:
        work[receive.run_id].append(Work(receive.started_at, receive.ended_at))
    claims = defaultdict(list)
    for claim in live:
        claims[claim.run_id].append(claim)
        if not claim.is_stand_by:
            work[claim.run_id].append(Work(claim.started_at, now))
    crashed = {claim.run_id: claim for claim in expired}
    known = {record.dagster_run.run_id: record for record in records}
    lines = []
    for run_id in dict.fromkeys([*known, *claims, *crashed, *work]):
        record, began = known.get(run_id), min((each.began for each in work[run_id]), default=None)
        state = _state(record, claims.get(run_id, []), is_crashed=run_id in crashed)
        line = RunLine(run_id, state, began=began, work=tuple(sorted(work[run_id])))
        if messages := sum(claim.messages for claim in (*claims.get(run_id, []), *filter(None, [crashed.get(run_id)]))):
            line = line._replace(messages=messages)
        if record is not None:
            line = _of_dagster(line, record, tags)
        if not line.is_active:
            line = line._replace(ended=line.ended or max((each.ended for each in line.work), default=None))
        lines.append(line)
    active = sorted((line for line in lines if line.is_active), key=lambda line: line.began or now)
    over = [line for line in lines if line.ended is not None and line.ended >= now - TIME_LINE]
    over.sort(key=lambda line: line.ended or now, reverse=True)
    return (*active[:_ACTIVE], *over[:_ENDED])


def _state(record: dg.RunRecord | None, claims: Sequence[Claim], *, is_crashed: bool) -> RunState:
    if record is not None and (state := _STATES.get(record.dagster_run.status.value)):
        return state
    if claims:
        return "working" if not all(claim.is_stand_by for claim in claims) else "waiting"
    if is_crashed:
        return "crashed"
    return "ended" if record is None else "working"


def _of_dagster(line: RunLine, record: dg.RunRecord, tags: RunTags) -> RunLine:
    run, began, ended = record.dagster_run, record.start_time, record.end_time
    return line._replace(
        origin=run.tags.get(tags.origin, ""),
        rounds=int(run.tags.get(tags.rounds, 0)),
        began=line.began if began is None else datetime.fromtimestamp(began, UTC),
        ended=None if ended is None else datetime.fromtimestamp(ended, UTC),
        messages=line.messages or (int(run.tags.get(tags.demand, 0)) if line.state == "queued" else 0),
    )
