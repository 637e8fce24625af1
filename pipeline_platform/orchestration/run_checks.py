"""The checks that each run of a pipeline reports. Executed alone they look at the lake, and start no Spark."""

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from pipeline_platform.lake.failed import Counts, FailedMessages
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.run.flow import looked_at
from pipeline_platform.run.receive_state import ReceiveState
from pipeline_platform.run.steps import Acknowledgement

_NAMED = 20
"""Windows with open failures, and receives, that are named at the most."""

FITS = dg.AssetCheckResult(passed=True, description="The model fits the table.")
"""The result of `columns` of each run: one whose model does not fit is refused as it begins."""


def run_checks(pipeline: type[Pipeline]) -> list[dg.AssetChecksDefinition]:
    """Build `acknowledged` of a pipeline's messages, and `no_open_failures` of its failures."""

    @dg.asset_check(
        asset=dg.AssetKey([pipeline.name, "messages"]),
        name="acknowledged",
        description="Every message that was decided is acknowledged, and dead ones are sent to dead_letters.",
        required_resource_keys={"lake", "control"},
    )
    def acknowledged(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        return _look_at_receives(pipeline, context.resources)

    @dg.asset_check(
        asset=dg.AssetKey([pipeline.name, "failed"]),
        name="no_open_failures",
        description="No window has an open failure.",
        required_resource_keys={"lake"},
    )
    def no_open_failures(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        failed = FailedMessages(name=pipeline.name, lake=context.resources.lake, pipeline=pipeline.name)
        return judge_failures(failed.by_window())

    return [acknowledged, no_open_failures, *(_columns_check(pipeline, name) for name in pipeline.batchers)]


def _columns_check(pipeline: type[Pipeline], batcher: str) -> dg.AssetChecksDefinition:
    """Build the check `columns` of a batcher's table."""

    @dg.asset_check(
        asset=dg.AssetKey([pipeline.name, batcher]),
        name="columns",
        description="The model fits the table: no field has changed its type. Where one has, runs are refused.",
        required_resource_keys={"lake"},
    )
    def columns(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        refusal = Tables(context.resources.lake, pipeline).refusals().get(batcher)
        return FITS if refusal is None else dg.AssetCheckResult(passed=False, description=refusal)

    return columns


def evaluation(pipeline: str, table: str, name: str, result: dg.AssetCheckResult) -> dg.AssetCheckEvaluation:
    """A check's result as an event, for those who are not the check's own step."""
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
        return _result(True, "Nothing that was decided is left to acknowledge.", {"unfinished receives": 0})
    named = [{"receive_id": one.receive_id, "run": one.run_id} for one in left[:_NAMED]]
    metadata = {"unfinished receives": len(left), "receives": table(named, "receive_id", "run")}
    what = "1 receive is not acknowledged" if len(left) == 1 else f"{len(left)} receives are not acknowledged"
    return _result(False, f"{what}: the next run makes up for it.", metadata)


def judge_answer(answer: Acknowledgement | None) -> dg.AssetCheckResult:
    """The result of `acknowledged`, by what the source answered."""
    if answer is None:
        return _result(True, "Had nothing to acknowledge.", figures_of(answer))
    errors = {"errors": dg.MetadataValue.json(answer.errors)} if answer.errors else {}
    text = "The next run acknowledges the rest." if answer.unacknowledged else "Acknowledged all."
    if answer.lost:
        text += f" {answer.lost} were not this run's any more: a later one finds them decided, or their queue is gone."
    if answer.letters.unsent:
        text += f" {answer.letters.unsent} dead letters are not sent: the next run sends them."
    passed = not answer.unacknowledged and not answer.letters.unsent
    return _result(passed, text, {**figures_of(answer), **errors})


def figures_of(answer: Acknowledgement | None) -> dict[str, Any]:
    """What the source answered, in figures."""
    answer = answer or Acknowledgement(0, 0, 0, [])
    counts = {"acknowledged": answer.acknowledged, "unacknowledged": answer.unacknowledged, "lost": answer.lost}
    letters, not_taken = answer.letters, answer.not_taken.messages
    sent = {"dead letters": letters.sent, "dead letters, unsent": letters.unsent} if any(letters) else {}
    return counts | sent | ({"not taken by acknowledge": not_taken} if not_taken else {})


def judge_failures(waiting: Mapping[str, Counts]) -> dg.AssetCheckResult:
    """The result of `no_open_failures`, of all windows.

    A check shows its newest result alone: a run without failures would hide what an earlier one left.
    """
    messages, dead = (sum(getattr(counts, what) for counts in waiting.values()) for what in ("open", "dead"))
    if not messages:
        return _result(True, "None waits.", {"open": 0, "dead": 0})
    windows = len(waiting)
    them = "this window" if windows == 1 else f"these {windows} windows"
    also = f", {dead} of them dead" if dead else ""
    description = f"{messages} failed messages wait{also}; materialise {them} to retry them."
    if windows > _NAMED:
        description += f" The oldest {_NAMED} are named."
    named = [{"window": window, **waiting[window]._asdict()} for window in sorted(waiting)[:_NAMED]]
    metadata = {"open": messages, "dead": dead, "windows": table(named, "window", "open", "dead")}
    return _result(False, description, metadata)


def _result(passed: bool, description: str, metadata: Mapping[str, Any]) -> dg.AssetCheckResult:
    warn = dg.AssetCheckSeverity.WARN
    return dg.AssetCheckResult(passed=passed, severity=warn, description=description, metadata=metadata)


def table(rows: Sequence[Mapping[str, Any]], *columns: str) -> dg.TableMetadataValue:
    """A table as the UI shows it."""
    records = [dg.TableRecord({name: row[name] for name in columns}) for row in rows]
    return dg.MetadataValue.table(records, dg.TableSchema([dg.TableColumn(name) for name in columns]))
