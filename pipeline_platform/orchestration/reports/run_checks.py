"""Checks that each run of a pipeline reports. Executed on their own, they read the lake without Spark."""

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from pipeline_platform.lake.failures.failed import Counts, FailedMessages
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.run.flow import looked_at
from pipeline_platform.run.receive_state import ReceiveState
from pipeline_platform.run.steps import Acknowledgement
from pipeline_platform.telemetry.spans import span

_NAMED = 20
"""Maximum number of windows or receives in the metadata of a check."""

FITS = dg.AssetCheckResult(passed=True, description="The model fits the table.")
"""Result of the check `columns` in each run. A run whose model does not fit the table is refused at its start."""


def run_checks(pipeline: type[Pipeline]) -> list[dg.AssetChecksDefinition]:
    """Build the checks `acknowledged`, `open_failures` and `columns` of a pipeline."""

    @dg.asset_check(
        asset=dg.AssetKey([pipeline.name, "messages"]),
        name="acknowledged",
        description="Passes if all decided messages are acknowledged, and all dead messages are sent to dead_letters.",
        required_resource_keys={"lake", "control"},
    )
    def acknowledged(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        return _look_at_receives(pipeline, context.resources)

    @dg.asset_check(
        asset=dg.AssetKey([pipeline.name, "failed"]),
        name="open_failures",
        description="Passes if no window has an open failure.",
        required_resource_keys={"lake"},
    )
    def open_failures(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        failed = FailedMessages(name=pipeline.name, lake=context.resources.lake, pipeline=pipeline.name)
        return judge_failures(failed.by_window())

    return [
        acknowledged,
        open_failures,
        *(_columns_check(pipeline, name) for name in pipeline.batchers_with_tables()),
    ]


def _columns_check(pipeline: type[Pipeline], batcher: str) -> dg.AssetChecksDefinition:
    @dg.asset_check(
        asset=dg.AssetKey([pipeline.name, batcher]),
        name="columns",
        description="The model fits the table: no field changed its type. Otherwise runs are refused.",
        required_resource_keys={"lake"},
    )
    def columns(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        refusal = Tables(context.resources.lake, pipeline).refusals().get(batcher)
        return FITS if refusal is None else dg.AssetCheckResult(passed=False, description=refusal)

    return columns


def evaluation(pipeline: str, table: str, name: str, result: dg.AssetCheckResult) -> dg.AssetCheckEvaluation:
    """Return a check's result as an event, for code outside the check's own step."""
    return dg.AssetCheckEvaluation(
        asset_key=dg.AssetKey([pipeline, table]),
        check_name=name,
        passed=result.passed,
        severity=result.severity,
        description=result.description,
        metadata=result.metadata,
    )


def _look_at_receives(pipeline: type[Pipeline], resources: Any) -> dg.AssetCheckResult:
    flow = looked_at(pipeline, resources.lake, resources.control)
    states = [ReceiveState(flow, receive_id) for receive_id in flow.ledger.unfinished()]
    left = [state.unfinished for state in states if state.unfinished and not state.is_live]
    if not left:
        return _result(True, "All decided messages are acknowledged.", {"unfinished receives": 0})
    named = [{"receive_id": receive.receive_id, "run": receive.run_id} for receive in left[:_NAMED]]
    metadata = {"unfinished receives": len(left), "receives": table(named, "receive_id", "run")}
    what = "1 decided receive is" if len(left) == 1 else f"{len(left):,} decided receives are"
    return _result(False, f"{what} not acknowledged yet. The next run finishes this.", metadata)


def judge_answer(answer: Acknowledgement | None) -> dg.AssetCheckResult:
    """Return the result of the check `acknowledged` for the answers of a source."""
    if answer is None:
        return _result(True, "Had nothing to acknowledge.", figures_of(answer))
    errors = {"errors": dg.MetadataValue.json(answer.errors)} if answer.errors else {}
    text = "All messages are acknowledged."
    if answer.unacknowledged:
        text = f"{_messages(answer.unacknowledged)} not acknowledged. The next run tries again."
    if answer.lost:
        text += f" {_messages(answer.lost)} no longer leased by this run, or their queue was deleted."
        text += " If they are redelivered, they are acknowledged as duplicates."
    if answer.letters.unsent:
        letters = "1 dead letter is" if answer.letters.unsent == 1 else f"{answer.letters.unsent:,} dead letters are"
        text += f" {letters} not sent. The next run tries again."
    passed = not answer.unacknowledged and not answer.letters.unsent
    return _result(passed, text, {**figures_of(answer), **errors})


def _messages(count: int) -> str:
    return "1 message is" if count == 1 else f"{count:,} messages are"


def figures_of(answer: Acknowledgement | None) -> dict[str, Any]:
    """Return the counts of an acknowledgement, as metadata."""
    answer = answer or Acknowledgement(0, 0, 0, [])
    counts = {"acknowledged": answer.acknowledged, "unacknowledged": answer.unacknowledged, "lost": answer.lost}
    letters, not_taken = answer.letters, answer.not_taken.messages
    sent = {"dead letters sent": letters.sent, "dead letters not sent": letters.unsent} if any(letters) else {}
    return counts | sent | ({"messages that acknowledge() failed for": not_taken} if not_taken else {})


def count_failures(pipeline: type[Pipeline], lake: Lake) -> dict[str, Counts]:
    """Return the numbers of failures of each window with open failures, and emit their sums."""
    with span("count_failures", pipeline) as event:
        counts = FailedMessages(name=pipeline.name, lake=lake, pipeline=pipeline.name).by_window()
        sums = {name: sum(getattr(each, name) for each in counts.values()) for name in ("open", "dead", "scheduled")}
        event.add(**sums)
    return counts


def judge_failures(waiting: Mapping[str, Counts]) -> dg.AssetCheckResult:
    """Return the result of the check `open_failures` over all windows.

    Dagster shows the newest result of a check, and a run without failures must not hide failures of earlier runs.
    """
    messages, dead = (sum(getattr(counts, what) for counts in waiting.values()) for what in ("open", "dead"))
    if not messages:
        return _result(True, "There are no open failures.", {"open": 0, "dead": 0})
    windows = len(waiting)
    open_failures = "1 open failure" if messages == 1 else f"{messages:,} open failures"
    where = f"window {next(iter(waiting))}" if windows == 1 else f"{windows:,} windows"
    also = f", {dead:,} of them dead" if dead else ""
    it = "the window" if windows == 1 else "the windows"
    description = f"{open_failures} in {where}{also}. To retry, materialise {it} of the asset `failed`."
    if windows > _NAMED:
        description += f" The table lists the oldest {_NAMED} windows."
    named = [{"window": window, **waiting[window]._asdict()} for window in sorted(waiting)[:_NAMED]]
    metadata = {"open": messages, "dead": dead, "windows": table(named, "window", "open", "dead")}
    return _result(False, description, metadata)


def _result(passed: bool, description: str, metadata: Mapping[str, Any]) -> dg.AssetCheckResult:
    warn = dg.AssetCheckSeverity.WARN
    return dg.AssetCheckResult(passed=passed, severity=warn, description=description, metadata=metadata)


def table(rows: Sequence[Mapping[str, Any]], *columns: str) -> dg.TableMetadataValue:
    """Return rows as table metadata for the UI."""
    records = [dg.TableRecord({name: row[name] for name in columns}) for row in rows]
    return dg.MetadataValue.table(records, dg.TableSchema([dg.TableColumn(name) for name in columns]))
