"""What a run tells Dagster: figures on every materialisation, window by window, and the checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import dagster as dg

from pipeline_platform.lake.failed import FailedMessages
from pipeline_platform.lake.ledger import Receive
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.lease import alive
from pipeline_platform.run.steps import Acknowledgement

if TYPE_CHECKING:
    from pipeline_platform.model.pipeline import Pipeline
    from resources.acknowledger import Acknowledger

_KEYS = 20
_WINDOWS = 20
"""Named at most, of those with open failures."""
_OUTCOMES = ("handled", "failed", "returned", "duplicates")
_NOTHING = Acknowledgement(0, 0, 0, [])


@dataclass(frozen=True)
class Settled:
    """How a run ended.

    Attributes:
        answer: What the source was told; None where the run had nothing to tell it.
        open_failures: By window, in all of them: a check shows its newest result alone, and a run without failures
            would hide what an earlier one left.
        red: Why the run is to end as failed, although all is published and acknowledged; None if it is not.
    """

    answer: Acknowledgement | None
    open_failures: Mapping[str, int]
    red: str | None

    def checks(
        self, acknowledged: dg.AssetCheckSpec, open_failures: dg.AssetCheckSpec
    ) -> tuple[dg.AssetCheckResult, dg.AssetCheckResult]:
        """The results of the two checks."""
        answer = self.answer or _NOTHING
        said = "Told the source of all." if self.answer else "Had nothing to tell the source."
        told = {"acknowledged": answer.acknowledged, "unacknowledged": answer.unacknowledged, "lost": answer.lost}
        return (
            dg.AssetCheckResult(
                check_name=acknowledged.name,
                asset_key=acknowledged.asset_key,
                passed=not answer.unacknowledged,
                severity=dg.AssetCheckSeverity.WARN,
                description=said if not answer.unacknowledged else "The next run tells it again.",
                metadata={**told, **({"errors": dg.MetadataValue.json(answer.errors)} if answer.errors else {})},
            ),
            self._check_of_failures(open_failures),
        )

    def _check_of_failures(self, spec: dg.AssetCheckSpec) -> dg.AssetCheckResult:
        waiting, windows = sum(self.open_failures.values()), len(self.open_failures)
        named = [{"window": window, "open": count} for window, count in sorted(self.open_failures.items())[:_WINDOWS]]
        description = "None waits."
        if waiting:
            them = "this window" if windows == 1 else f"these {windows} windows"
            description = f"{waiting} failed messages wait; materialise {them} to drive them once more."
        if windows > _WINDOWS:
            description += f" The oldest {_WINDOWS} are named."
        return dg.AssetCheckResult(
            check_name=spec.name,
            asset_key=spec.asset_key,
            passed=not waiting,
            severity=dg.AssetCheckSeverity.WARN,
            description=description,
            metadata={"open": waiting, **({"windows": _table(named, ["window", "open"])} if named else {})},
        )


def tell_received(context: dg.AssetExecutionContext, receive: Receive, manifest: Manifest) -> None:
    """Put figures on the materialisation of `messages`, for each window its own."""
    figures, by_window = _of_receive(receive, manifest), _received_by_window(receive.windows, manifest)
    for window in receive.windows:
        received = {"received": by_window[window]}
        context.add_asset_metadata({**figures, **received}, dg.AssetKey([receive.pipeline, "messages"]), window)


def _of_receive(receive: Receive, manifest: Manifest) -> dict[str, Any]:
    took = _took(manifest).get("receive", 0.0)
    received = manifest.total("received")
    return {
        "demand": receive.demand,
        "origin": receive.origin,
        "receive_id": receive.receive_id,
        "seconds": round(took, 3),
        **({"messages per second": round(received / took, 1)} if took and received else {}),
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


def settle(
    context: dg.AssetExecutionContext, flow: Flow, receive: Receive | None, acknowledger: Acknowledger
) -> Settled:
    """Acknowledge, then put figures on the materialisation of each table and window: its own counts and running totals.

    The newest materialisation hides the ones before it: hence the totals. They become observations of `messages`, which
    is materialised as soon as it is received, and of the tables of a red run, whose windows are not to be green.
    """
    answer, manifest = None, Manifest()
    if receive is not None:
        manifest = flow.ledger.manifest(receive)
        with alive(flow, receive):
            answer = acknowledger.acknowledge(flow, receive)
    windows = tuple(context.partition_keys)
    run = {**_of_answer(answer or _NOTHING), **(_of_run(receive, manifest) if receive else {})}
    failed = FailedMessages(name=flow.source.name, lake=flow.lake, pipeline=flow.pipeline.name)
    waiting = failed.open_by_window()
    red = _left_out(receive) or _red(flow.pipeline, manifest)
    materialised = () if red else (*flow.pipeline.batchers, "failed")
    _tell_settled(context, flow, windows, manifest, run, waiting, materialised)
    return Settled(answer, waiting, red)


def _of_answer(answer: Acknowledgement) -> dict[str, Any]:
    return {"acknowledged": answer.acknowledged, "unacknowledged": answer.unacknowledged, "lost": answer.lost}


def _of_run(receive: Receive, manifest: Manifest) -> dict[str, Any]:
    """Figures that are the whole run's, not a window's."""
    seconds = (datetime.now(UTC) - receive.started_at).total_seconds()
    return {
        "batches": manifest.total("batches"),
        "messages per second": round(manifest.total("received") / seconds, 1) if seconds else 0.0,
        "seconds": round(seconds, 3),
        **{f"seconds: {step}": round(value, 3) for step, value in _took(manifest).items()},
        "origin": receive.origin,
        "receive_id": receive.receive_id,
    }


def _tell_settled(
    context: dg.AssetExecutionContext,
    flow: Flow,
    windows: Sequence[str],
    manifest: Manifest,
    run: Mapping[str, Any],
    waiting: Mapping[str, int],
    materialised: Sequence[str],
) -> None:
    received, failures = _received_by_window(windows, manifest), of_failures(manifest)
    for name in ("messages", *flow.pipeline.batchers, "failed"):
        asset = dg.AssetKey([flow.pipeline.name, name])
        table = flow.tables[name]
        stored = table.files(table.open(), windows)
        keys = _keys(manifest, *([name] if name in flow.pipeline.batchers else flow.pipeline.batchers))
        for window in windows:
            metadata = {
                **failures,  # first: of what it counts, a window has its own numbers
                "rows": sum(file.rows for file in manifest.of_table(name) if file.window == window),
                "dagster/row_count": sum(file.rows for file in stored if file.window == window),
                "received": received[window],
                **{outcome: manifest.total(f"{outcome}@{window}") for outcome in _OUTCOMES},
                **run,
                **({"batch keys": dg.MetadataValue.json(keys)} if keys else {}),
                **({"open": waiting.get(window, 0)} if name == "failed" else {}),
            }
            if name in materialised:
                context.add_asset_metadata(metadata, asset, window)
            else:
                context.log_event(dg.AssetObservation(asset, partition=window, metadata=metadata))


def _received_by_window(windows: Sequence[str], manifest: Manifest) -> dict[str, int]:
    """How many messages were received for each window of the run."""
    files = manifest.of_table("messages")
    return {window: sum(file.rows for file in files if file.window == window) for window in windows}


def _took(manifest: Manifest) -> dict[str, float]:
    return {notes["step"]: notes["took"] for notes in manifest.notes if "step" in notes}


def _keys(manifest: Manifest, *batchers: str) -> dict[str, int]:
    """How many messages each batch key has, over some batchers; the most frequent keys."""
    keys: Counter[str] = Counter()
    for notes in manifest.notes:
        for batcher in batchers:
            keys.update(notes.get("keys", {}).get(batcher, {}))
    return dict(keys.most_common(_KEYS))


def _left_out(receive: Receive | None) -> str | None:
    """Why a backfill is not what it was asked for: green windows would say that their failures were driven."""
    if receive is None or receive.origin != "failed" or receive.demand >= receive.asked:
        return None
    return (
        f"took on {receive.demand} of {receive.asked} open failures, which is what a run may, or what other runs left "
        "room for; what came of them is published. Materialise these windows again for the others"
    )


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
