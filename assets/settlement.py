"""What a run tells Dagster: figures on every materialisation, window by window, and the checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import dagster as dg

from pipeline_platform.flow import Acknowledgement, Flow
from pipeline_platform.lake.failed import FailedMessages
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.receives import Receive

if TYPE_CHECKING:
    from pipeline_platform.pipeline import Pipeline
    from resources.acknowledger import Acknowledger

_KEYS = 20
_OUTCOMES = ("handled", "failed", "returned", "duplicates")
_NOTHING = Acknowledgement(0, 0, 0, [])


@dataclass(frozen=True)
class Settled:
    """How a run ended.

    Attributes:
        answer: What the source was told.
        open_failures: By window, in the windows of the run.
        red: Why the run is to end as failed, although all is published and acknowledged; None if it is not.
    """

    answer: Acknowledgement
    open_failures: Mapping[str, int]
    red: str | None

    def checks(
        self, acknowledged: dg.AssetCheckSpec, open_failures: dg.AssetCheckSpec
    ) -> tuple[dg.AssetCheckResult, dg.AssetCheckResult]:
        """The results of the two checks."""
        answer, waiting = self.answer, sum(self.open_failures.values())
        told = {"acknowledged": answer.acknowledged, "unacknowledged": answer.unacknowledged, "lost": answer.lost}
        return (
            dg.AssetCheckResult(
                check_name=acknowledged.name,
                asset_key=acknowledged.asset_key,
                passed=not answer.unacknowledged,
                severity=dg.AssetCheckSeverity.WARN,
                description="Told the source of all." if not answer.unacknowledged else "The next run tells it again.",
                metadata={**told, **({"errors": dg.MetadataValue.json(answer.errors)} if answer.errors else {})},
            ),
            dg.AssetCheckResult(
                check_name=open_failures.name,
                asset_key=open_failures.asset_key,
                passed=not waiting,
                severity=dg.AssetCheckSeverity.WARN,
                description=f"{waiting} failed messages wait; materialise these windows to drive them once more."
                if waiting
                else "None waits.",
                metadata={"open": waiting, "by window": dg.MetadataValue.json(dict(self.open_failures))},
            ),
        )


def of_receive(receive: Receive, manifest: Manifest) -> dict[str, Any]:
    """Figures of the asset `messages`."""
    took = _took(manifest).get("receive", 0.0)
    received = manifest.total("received")
    return {
        "received": received,
        "demand": receive.demand,
        "origin": receive.origin,
        "receive_id": receive.receive_id,
        "seconds": round(took, 3),
        **({"messages per second": round(received / took)} if took and received else {}),
    }


def of_failures(manifest: Manifest) -> dict[str, Any]:
    """Figures of what failed: why, and a sample; no payloads."""
    failed, returned = manifest.total("failed"), manifest.total("returned")
    if not failed + returned:
        return {}
    reasons: dict[str, int] = {}
    for notes in manifest.notes:
        for reason, count in notes.get("reasons", {}).items():
            reasons[reason] = reasons.get(reason, 0) + count
    sample = [row for notes in manifest.notes for row in notes.get("sample", [])][:10]
    columns = [{"reason": reason, "messages": count} for reason, count in sorted(reasons.items(), key=_by_count)[:10]]
    return {
        "failed": failed,
        "returned": returned,
        "reasons": _table(columns, ["reason", "messages"]),
        "failures": _table(sample, ["message_id", "stage", "kind", "reason", "attempt"]),
    }


def _by_count(item: tuple[str, int]) -> int:
    return -item[1]


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> dg.TableMetadataValue:
    """A table as the UI shows it."""
    records = [dg.TableRecord({name: row[name] for name in columns}) for row in rows]
    return dg.MetadataValue.table(records, dg.TableSchema([dg.TableColumn(name) for name in columns]))


def settle(context: dg.OpExecutionContext, flow: Flow, receive: Receive | None, acknowledger: Acknowledger) -> Settled:
    """Acknowledge, then log one materialisation for each window and table, with its own counts and running totals.

    The newest materialisation hides the ones before it: hence the totals.
    """
    answer, manifest = _NOTHING, Manifest()
    if receive is not None:
        manifest = flow.receives.manifest(receive.receive_id)
        answer = acknowledger.acknowledge(flow, receive)
        _log_settled(context, flow, receive, manifest, answer)
    waiting = FailedMessages(
        name=flow.source.name, lake=flow.lake, pipeline=flow.pipeline.name, windows=tuple(context.partition_keys)
    )
    return Settled(answer, waiting.open_by_window(), _red(flow.pipeline, manifest))


def _log_settled(
    context: dg.OpExecutionContext, flow: Flow, receive: Receive, manifest: Manifest, answer: Acknowledgement
) -> None:
    took = _took(manifest)
    seconds = (datetime.now(UTC) - receive.started_at).total_seconds()
    received = manifest.total("received")
    by_window = received_by_window(receive, manifest)
    run: dict[str, Any] = {
        "batches": manifest.total("batches"),
        "acknowledged": answer.acknowledged,
        "unacknowledged": answer.unacknowledged,
        "messages per second": round(received / seconds) if seconds else 0,
        "seconds": round(seconds, 3),
        **{f"seconds: {step}": round(value, 3) for step, value in took.items()},
        "origin": receive.origin,
        "receive_id": receive.receive_id,
    }
    failures = of_failures(manifest)
    for name in (*flow.pipeline.batchers, "failed"):
        table = flow.tables[name]
        files = table.files(table.open(), receive.windows)
        keys = _keys(manifest, name)
        for window in receive.windows:
            rows = sum(file.rows for file in manifest.of_table(name) if file.window == window)
            metadata = {
                "rows": rows,
                "dagster/row_count": sum(file.rows for file in files if file.window == window),
                "received": by_window[window],
                **{outcome: manifest.total(f"{outcome}@{window}") for outcome in _OUTCOMES},
                **run,
                **({"batch keys": dg.MetadataValue.json(keys)} if keys else {}),
                **(failures if name == "failed" else {}),
            }
            key = dg.AssetKey([flow.pipeline.name, name])
            context.log_event(dg.AssetMaterialization(key, partition=window, metadata=metadata))


def received_by_window(receive: Receive, manifest: Manifest) -> dict[str, int]:
    """How many messages were received for each window of the run."""
    files = manifest.of_table("messages")
    return {window: sum(file.rows for file in files if file.window == window) for window in receive.windows}


def log_windows(context: dg.OpExecutionContext, receive: Receive, rows: Mapping[str, Mapping[str, int]]) -> None:
    """Log a materialisation for each window where a run has several: Dagster would stamp the sum on each."""
    if len(receive.windows) < 2:
        return
    for table, by_window in rows.items():
        for window, count in by_window.items():
            key = dg.AssetKey([receive.pipeline, table])
            metadata = {"received": count, "origin": receive.origin, "receive_id": receive.receive_id}
            context.log_event(dg.AssetMaterialization(key, partition=window, metadata=metadata))


def _took(manifest: Manifest) -> dict[str, float]:
    return {notes["step"]: notes["took"] for notes in manifest.notes if "step" in notes}


def _keys(manifest: Manifest, batcher: str) -> dict[str, int]:
    keys: dict[str, int] = {}
    for notes in manifest.notes:
        for key, count in notes.get("keys", {}).get(batcher, {}).items():
            keys[key] = keys.get(key, 0) + count
    return dict(sorted(keys.items(), key=_by_count)[:_KEYS])


def _red(pipeline: type[Pipeline], manifest: Manifest) -> str | None:
    failed, received = manifest.total("failed"), manifest.total("received")
    if pipeline.fail_run_on == "never" or not failed:
        return None
    if pipeline.fail_run_on == "any":
        return f"{failed} of {received} messages failed, and fail_run_on is 'any'; all are published and acknowledged"
    if failed > pipeline.fail_run_on * received:
        return (
            f"{failed} of {received} messages failed, more than fail_run_on allows ({pipeline.fail_run_on}); "
            "all are published and acknowledged"
        )
    return None
