"""What a run reports to Dagster: figures on every materialisation, window by window, and the checks."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import dagster as dg

from pipeline_platform.lake.failed import NONE, Counts, FailedMessages
from pipeline_platform.lake.ledger import Receive
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.run import steps
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import intake_of
from pipeline_platform.run.lease import alive
from pipeline_platform.run.steps import Acknowledgement
from pipeline_platform.tasks.acknowledge.acknowledger import Acknowledger

_NAMED = 20
"""Windows with open failures, and batch keys, that are named at the most."""
_OUTCOMES = ("handled", "failed", "returned", "duplicates")


def checks_of(pipeline: type[Pipeline]) -> tuple[dg.AssetCheckSpec, dg.AssetCheckSpec]:
    """The checks whose results each run of a pipeline reports."""
    return (
        dg.AssetCheckSpec(
            "acknowledged",
            asset=dg.AssetKey([pipeline.name, "messages"]),
            description="Every message that this run decided is acknowledged, and dead ones are sent to dead_letters.",
        ),
        dg.AssetCheckSpec(
            "no_open_failures",
            asset=dg.AssetKey([pipeline.name, "failed"]),
            description="No window has an open failure.",
        ),
    )


def report_received(context: dg.AssetExecutionContext, receive: Receive, manifest: Manifest) -> None:
    """Put figures on the materialisation of `messages`, for each window its own."""
    took, total = _took(manifest).get("receive", 0.0), manifest.total("received")
    figures = {
        "demand": receive.demand,
        "origin": receive.origin,
        "receive_id": receive.receive_id,
        **_producer_of(receive),
        "seconds": round(took, 3),
        **({"messages per second": round(total / took, 1)} if took and total else {}),
    }
    received = _rows_by_window(manifest.of_table("messages"))
    for window in receive.windows:
        asset = dg.AssetKey([receive.pipeline, "messages"])
        context.add_asset_metadata({**figures, "received": received[window]}, asset, window)


def of_failures(manifest: Manifest) -> dict[str, Any]:
    """Figures of what failed: the reasons, and a sample without payloads."""
    failed, returned = manifest.total("failed"), manifest.total("returned")
    if not failed + returned:
        return {}
    reasons: Counter[str] = Counter()
    for notes in manifest.notes:
        reasons.update(notes.get("reasons", {}))
    sample = [row for notes in manifest.notes for row in notes.get("sample", [])][:10]
    counts = [{"reason": reason, "messages": count} for reason, count in reasons.most_common(10)]
    return {
        "failed": failed,
        **({"became dead": dead} if (dead := manifest.total("dead")) else {}),
        "returned": returned,
        "reasons": _table(counts, "reason", "messages"),
        "failures": _table(sample, "message_id", "stage", "kind", "reason", "attempt"),
    }


def acknowledge(
    context: dg.AssetExecutionContext, flow: Flow, receive: Receive | None, acknowledger: Acknowledger
) -> tuple[str | None, list[dg.AssetCheckResult]]:
    """Acknowledge, then put figures on the materialisation of each table and window: its own counts and running totals.

    The newest materialisation hides the ones before it: hence the totals. They become observations of `messages`, which
    is materialised as soon as it is received, and of the tables of a red run, whose windows are not to be green.

    Returns:
        Why the run is to end red, although all is published and acknowledged, or None; and the results of its checks.
    """
    answer, manifest, run = None, Manifest(), {}
    if receive is not None:
        manifest = flow.ledger.manifest(receive)
        with alive(flow, receive):
            answer = steps.acknowledge(flow, receive, acknowledger)
        log_output(context, answer.not_taken.written)
        run = _of_run(receive, manifest)
    failed = FailedMessages(name=flow.source.name, lake=flow.lake, pipeline=flow.pipeline.name)
    open_failures, red = failed.by_window(), _red(flow, receive, manifest)
    _report(context, flow, manifest, {**_of_answer(answer), **run}, open_failures, is_red=red is not None)
    acknowledged, no_open_failures = checks_of(flow.pipeline)
    return red, [_check_answer(acknowledged, answer), check_open_failures(no_open_failures, open_failures)]


def _of_answer(answer: Acknowledgement | None) -> dict[str, Any]:
    answer = answer or Acknowledgement(0, 0, 0, [])
    counts = {"acknowledged": answer.acknowledged, "unacknowledged": answer.unacknowledged, "lost": answer.lost}
    letters, not_taken = answer.letters, answer.not_taken.messages
    sent = {"dead letters": letters.sent, "dead letters, unsent": letters.unsent} if any(letters) else {}
    return counts | sent | ({"not taken by acknowledge": not_taken} if not_taken else {})


def _check_answer(spec: dg.AssetCheckSpec, answer: Acknowledgement | None) -> dg.AssetCheckResult:
    if answer is None:
        return _result(spec, True, "Had nothing to acknowledge.", _of_answer(answer))
    errors = {"errors": dg.MetadataValue.json(answer.errors)} if answer.errors else {}
    text = "The next run acknowledges the rest." if answer.unacknowledged else "Acknowledged all."
    if answer.lost:
        text += f" {answer.lost} were not this run's any more: a later one finds them decided, or their queue is gone."
    if answer.letters.unsent:
        text += f" {answer.letters.unsent} dead letters are not sent: the next run sends them."
    passed = not answer.unacknowledged and not answer.letters.unsent
    return _result(spec, passed, text, {**_of_answer(answer), **errors})


def check_open_failures(spec: dg.AssetCheckSpec, waiting: Mapping[str, Counts]) -> dg.AssetCheckResult:
    """The result of `no_open_failures`, of all windows.

    A check shows its newest result alone: a run without failures would hide what an earlier one left.
    """
    messages, dead, windows = _sum(waiting, "open"), _sum(waiting, "dead"), len(waiting)
    if not messages:
        return _result(spec, True, "None waits.", {"open": 0, "dead": 0})
    them = "this window" if windows == 1 else f"these {windows} windows"
    also = f", {dead} of them dead" if dead else ""
    description = f"{messages} failed messages wait{also}; materialise {them} to retry them."
    if windows > _NAMED:
        description += f" The oldest {_NAMED} are named."
    named = [{"window": window, **waiting[window]._asdict()} for window in sorted(waiting)[:_NAMED]]
    table = _table(named, "window", "open", "dead")
    return _result(spec, False, description, {"open": messages, "dead": dead, "windows": table})


def _sum(waiting: Mapping[str, Counts], what: str) -> int:
    return sum(getattr(counts, what) for counts in waiting.values())


def _result(
    spec: dg.AssetCheckSpec, passed: bool, description: str, metadata: Mapping[str, Any]
) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        check_name=spec.name,
        asset_key=spec.asset_key,
        passed=passed,
        severity=dg.AssetCheckSeverity.WARN,
        description=description,
        metadata=metadata,
    )


def _report(
    context: dg.AssetExecutionContext,
    flow: Flow,
    manifest: Manifest,
    run: Mapping[str, Any],
    open_failures: Mapping[str, Counts],
    *,
    is_red: bool,
) -> None:
    windows, batchers = context.partition_keys, list(flow.pipeline.batchers)
    received, failures = _rows_by_window(manifest.of_table("messages")), of_failures(manifest)
    for name in ("messages", *batchers, "failed"):
        asset, table = dg.AssetKey([flow.pipeline.name, name]), flow.tables[name]
        with table.look() as handle:
            stored = _rows_by_window(table.files(handle, windows))
        rows = _rows_by_window(manifest.of_table(name))
        keys = _batch_keys(manifest, [name] if name in batchers else batchers)
        for window in windows:
            of_table = {
                "messages": {
                    "received": received[window],
                    **failures,  # of what it counts, a window has its own numbers
                    **{outcome: manifest.total(f"{outcome}@{window}") for outcome in _OUTCOMES},
                    **run,
                },
                "failed": {
                    **_of_window(open_failures.get(window, NONE)),
                    **failures,
                    "failed": manifest.total(f"failed@{window}"),
                },
            }
            metadata = {
                **of_table.get(name, {}),
                "rows": rows[window],
                "dagster/partition_row_count": stored[window],
                "dagster/uri": table.uri,
                **({"batch keys": dg.MetadataValue.json(keys)} if keys else {}),
                **({"receive_id": run["receive_id"]} if "receive_id" in run else {}),
            }
            if is_red or name == "messages":
                context.log_event(dg.AssetObservation(asset, partition=window, metadata=metadata))
            else:
                context.add_asset_metadata(metadata, asset, window)


def _of_window(counts: Counts) -> dict[str, int]:
    """Running totals of a window's failures."""
    return {"open": counts.open, "dead": counts.dead}


def _of_run(receive: Receive, manifest: Manifest) -> dict[str, Any]:
    """Figures of the whole run, not of a window."""
    seconds = (datetime.now(UTC) - receive.started_at).total_seconds()
    return {
        "batches": manifest.total("batches"),
        "messages per second": round(manifest.total("received") / seconds, 1) if seconds else 0.0,
        "seconds": round(seconds, 3),
        **{f"seconds: {step}": round(value, 3) for step, value in _took(manifest).items()},
        "origin": receive.origin,
        "receive_id": receive.receive_id,
        **_producer_of(receive),
    }


def _producer_of(receive: Receive) -> dict[str, str]:
    return {"producer": receive.producer} if receive.producer else {}


def _table(rows: Sequence[Mapping[str, Any]], *columns: str) -> dg.TableMetadataValue:
    """A table as the UI shows it."""
    records = [dg.TableRecord({name: row[name] for name in columns}) for row in rows]
    return dg.MetadataValue.table(records, dg.TableSchema([dg.TableColumn(name) for name in columns]))


def _rows_by_window(files: Sequence[Any]) -> Counter[str]:
    rows: Counter[str] = Counter()
    for file in files:
        rows[file.window] += file.rows
    return rows


def _took(manifest: Manifest) -> dict[str, float]:
    return {notes["step"]: notes["took"] for notes in manifest.notes if "step" in notes}


def _batch_keys(manifest: Manifest, batchers: Sequence[str]) -> dict[str, int]:
    """Messages by batch key, over some batchers; the most frequent keys."""
    keys: Counter[str] = Counter()
    for notes in manifest.notes:
        for batcher in batchers:
            keys.update(notes.get("keys", {}).get(batcher, {}))
    return dict(keys.most_common(_NAMED))


def _red(flow: Flow, receive: Receive | None, manifest: Manifest) -> str | None:
    """Why a run is to end red: a backfill left failures out, or more messages failed than the pipeline allows."""
    if receive and (left := intake_of(flow, receive).left_out(receive, manifest.total("given_back"))):
        return left
    failed, received, allowed = manifest.total("failed"), manifest.total("received"), flow.pipeline.fail_run_on
    if allowed == "never" or not failed or (allowed != "any" and failed <= allowed * received):
        return None
    bound = "and fail_run_on is 'any'" if allowed == "any" else f"more than fail_run_on allows ({allowed})"
    return f"{failed} of {received} messages failed, {bound}; all are published and acknowledged"


def log_output(context: dg.AssetExecutionContext, manifest: Manifest) -> None:
    """Log what the callbacks of a step said, task by task."""
    for notes in manifest.notes:
        if "said" in notes:
            more = f"and {notes['unsaid']} more lines, which are in Spark's log" if notes["unsaid"] else ""
            who = notes.get("who", f"callbacks of task {notes.get('task', '?')}")
            context.log.info(f"{who} said:\n{notes['said']}{more}".rstrip())
