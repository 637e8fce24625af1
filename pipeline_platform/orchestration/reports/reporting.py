"""Reports of a run to Dagster: a materialisation per table and window, and the checks."""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from operator import itemgetter
from typing import Any

import dagster as dg

from pipeline_platform.control.store import ControlStoreError
from pipeline_platform.lake.decisions.ledger import Receive
from pipeline_platform.lake.failures.failed import NONE
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.replay import rows_by_window
from pipeline_platform.lake.task_report import SAMPLE, Totals
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.failure import by_cause
from pipeline_platform.orchestration.reports.backlog_check import look_at_backlog
from pipeline_platform.orchestration.reports.data_versions import VERSION, data_versions
from pipeline_platform.orchestration.reports.run_checks import (
    FITS,
    count_failures,
    evaluation,
    figures_of,
    judge_answer,
    judge_failures,
    table,
)
from pipeline_platform.orchestration.reports.stage_figures import StageFigures, metadata_of_stages, stages_of
from pipeline_platform.run import steps
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import intake_of
from pipeline_platform.run.lease import alive
from pipeline_platform.tasks.acknowledge.acknowledger import Acknowledger

_NAMED = 20
"""Maximum number of batch keys in metadata."""
_LEVELS = logging.getLevelNamesMapping()


def of_failures(totals: Totals) -> dict[str, Any]:
    """Return metadata about failures: counts, reasons, and a sample without payloads."""
    failed, returned = totals.failed.total(), totals.returned.total()
    if not failed + returned:
        return {}
    sample = [failure._asdict() for failure in totals.sample[:SAMPLE]]
    return {
        "failed": failed,
        **({"became dead": totals.dead} if totals.dead else {}),
        **({"held": totals.held} if totals.held else {}),
        "returned": returned,
        "reasons": _by_cause(totals.reasons),
        "failures": table(sample, "reason", "kind", "stage", "attempt", "message_id"),
    }


def _by_cause(reasons: Mapping[str, int]) -> Any:
    counts = by_cause(reasons).most_common(SAMPLE)
    return table([{"messages": count, "reason": cause} for cause, count in counts], "messages", "reason")


@dataclass
class Results:
    """Results of a receive, or of the rounds since the last report.

    Attributes:
        totals: Counts and samples.
        rows: Rows written, by table and window. For a batcher without a table, messages that it handled.
        last_receives: Last receive that wrote rows or handled messages, by table or batcher.
        stages: Figures by stage.
        latency: Messages by seconds from their publication to their acknowledgement.
    """

    totals: Totals = field(default_factory=Totals)
    rows: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    last_receives: dict[str, str] = field(default_factory=dict)
    stages: dict[str, StageFigures] = field(default_factory=lambda: defaultdict(StageFigures))
    latency: Counter[float] = field(default_factory=Counter)

    def add(
        self,
        receive: Receive,
        manifest: Manifest,
        stages: Mapping[str, StageFigures],
        answer: steps.Acknowledgement,
    ) -> None:
        """Add the results of a receive."""
        for stage, figures in stages.items():
            self.stages[stage].add(figures)
        self.latency.update(answer.latency)
        self.totals = Totals.of([self.totals, manifest.totals]).for_people()
        for file in manifest:
            self.rows[file.table][file.window] += file.rows
            self.last_receives[file.table] = receive.receive_id
        for batcher, handled in manifest.totals.effects.items():
            self.rows[batcher] += handled
            self.last_receives[batcher] = receive.receive_id


def acknowledge_and_report(
    context: dg.AssetExecutionContext, flow: Flow, receive: Receive | None, acknowledger: Acknowledger
) -> str | None:
    """Acknowledge, then report a materialisation of each table and window, with its own counts and running totals.

    Totals are included because the UI shows the newest materialisation only. If the run is to fail, tables get
    observations, so that their partitions do not turn green; `messages` is materialised in any case. The data version
    of a window changes with its rows: after an empty pull or a retry that changes no row, it stays the same.

    Returns:
        The reason for which the run is to fail although everything is published and acknowledged; None if it succeeds.
    """
    answer, results, red, run = None, Results(), None, {}
    if receive is not None:
        manifest, stages = flow.ledger.manifest(receive), stages_of(flow, receive)
        with alive(flow, receive):
            answer = steps.acknowledge(flow, receive, acknowledger)
        log_output(context, answer.not_taken.written)
        run = _of_run(receive, manifest)
        results.add(receive, manifest, stages, answer)
        red = intake_of(flow, receive).left_out(receive, manifest.totals) or failed_too_often(flow, manifest.totals)
    figures, tables = {**figures_of(answer), **run}, ["messages", *flow.pipeline.batchers, "failed"]
    replaces = receive.receive_id if receive is not None and receive.replaces else ""
    report(context, flow, results, figures, tables, is_red=red is not None, replaces=replaces)
    name = flow.pipeline.name
    context.log_event(evaluation(name, "messages", "acknowledged", judge_answer(answer)))
    return red


def failed_too_often(flow: Flow, totals: Totals) -> str | None:
    """Return why a run is to fail if more messages failed than `max_failed_share` allows; None if not."""
    failed, received = totals.failed.total() - totals.held, totals.received
    allowed = flow.pipeline.max_failed_share
    if allowed is None or failed <= allowed * received:
        return None
    bound = f"more than max_failed_share allows ({allowed})"
    return f"{failed:,} of {received:,} messages failed, {bound}. All outcomes are published and acknowledged."


def report_finished(context: dg.AssetExecutionContext, flow: Flow, receive: Receive) -> None:
    """Report a decided receive that its run left, so that the data versions of its windows change."""
    manifest, results = flow.ledger.manifest(receive), Results()
    results.add(receive, manifest, stages_of(flow, receive), steps.Acknowledgement(0, 0, 0, []))
    windows = [window for window in receive.windows if results.rows["messages"][window]]
    tables = ["messages", *flow.pipeline.batchers, "failed"]
    if not receive.replaces:
        tables = [name for name in tables if results.rows[name]]
    red = intake_of(flow, receive).left_out(receive, manifest.totals) or failed_too_often(flow, manifest.totals)
    replaces = receive.receive_id if receive.replaces else ""
    run = {
        "origin": receive.origin,
        "receive_id": receive.receive_id,
        "finished for run": dg.MetadataValue.dagster_run(receive.run_id),
    }
    by_run = context.run.run_id
    report(
        context, flow, results, run, tables, windows=windows, is_red=red is not None, replaces=replaces, by_run=by_run
    )


def _report_backlog(context: dg.AssetExecutionContext, producers: Iterable[BoundProducer]) -> None:
    """Report the checks `backlog`: after a materialisation, Dagster shows earlier evaluations as outdated."""
    for producer in producers:
        try:
            context.log_event(look_at_backlog(context, producer))
        except ControlStoreError as error:  # everything is acknowledged, and the sensor reports the check later
            context.log.warning(f"Could not report the check `backlog`: {error}")


def report(
    context: dg.AssetExecutionContext,
    flow: Flow,
    results: Results,
    run: Mapping[str, Any],
    tables: Sequence[str],
    *,
    windows: Sequence[str] | None = None,
    is_red: bool = False,
    replaces: str = "",
    by_run: str = "",
    of_rounds: bool = False,
) -> None:
    """Report a materialisation of tables for each window of a run, or of `windows`, and the checks that it outdates.

    `run` is metadata of the run, which fails if it `is_red`, and `replaces` the id of a receive that replaced rows.
    `by_run` is the run that finished a receive of another run. It is part of the data versions, because two runs may
    report the same receive, and an earlier data version would hide the rows between the two reports. `of_rounds` leaves
    out the backlogs of other producers.
    """
    windows = context.partition_keys if windows is None else windows
    batchers, totals = list(flow.pipeline.batchers), results.totals
    open_failures = count_failures(flow.pipeline, flow.lake)
    received, failures = results.rows["messages"], of_failures(totals)
    skipped = {"reasons of skipped messages": _by_cause(totals.skip_reasons)} if totals.skip_reasons else {}
    for name in tables:
        asset, rows = dg.AssetKey([flow.pipeline.name, name]), results.rows[name]
        stored_in = flow.tables[name] if name in flow.tables.names else None
        stored = Counter[str]() if stored_in is None else rows_by_window(stored_in, windows)
        failures_of = totals.failed_effects.get(name, Counter())
        unchanged = [] if replaces or is_red else [window for window in windows if not rows[window]]
        versions = data_versions(context.instance, asset, unchanged)
        # Handled messages have batch keys, failures have none.
        keys = _batch_keys(totals, {"messages": batchers, "failed": []}.get(name, [name]))
        for window in windows:
            still_open = open_failures.get(window, NONE).open
            share = {"failure share": round(totals.failed[window] / received[window], 4)} if received[window] else {}
            of_table = {
                "messages": {
                    "received": received[window],
                    **failures,  # totals of the run, overwritten below by counts of the window
                    "handled": totals.handled[window],
                    "skipped": totals.skipped[window],
                    **skipped,
                    "failed": totals.failed[window],
                    **share,
                    "returned": totals.returned[window],
                    "duplicates": totals.duplicates[window],
                    **run,
                    **metadata_of_stages(results.stages, results.latency),
                },
                "failed": {
                    "open": still_open,
                    "dead": open_failures.get(window, NONE).dead,
                    **failures,
                    "failed": totals.failed[window],
                },
            }
            receive_id = results.last_receives.get(name) or run.get("receive_id")
            metadata = {
                **of_table.get(name, {}),
                **(
                    {"messages": rows[window], "failed": failures_of[window]}
                    if stored_in is None
                    else {
                        "rows": rows[window],
                        # The table also has a row for each closed failure; users want to know the open ones.
                        "dagster/partition_row_count": still_open if name == "failed" else stored[window],
                        "dagster/uri": stored_in.uri,
                    }
                ),
                **({"batch keys": dg.MetadataValue.json(keys)} if keys else {}),
                **({"receive_id": receive_id} if receive_id else {}),
            }
            metadata = dict(sorted(metadata.items(), key=_is_table))
            if is_red and name != "messages":
                context.log_event(dg.AssetObservation(asset, partition=window, metadata=metadata))
            elif received[window] or (asset in context.selected_asset_keys and not is_red):
                version = versions.get(window) if window in unchanged else "-".join(filter(None, [receive_id, by_run]))
                tags = {VERSION: version} if version else None
                context.log_event(dg.AssetMaterialization(asset, partition=window, metadata=metadata, tags=tags))
    if "failed" in tables:
        context.log_event(evaluation(flow.pipeline.name, "failed", "open_failures", judge_failures(open_failures)))
    for batcher in (name for name in flow.pipeline.batchers_with_tables() if name in tables):
        context.log_event(evaluation(flow.pipeline.name, batcher, "columns", FITS))
    if "messages" in tables and not by_run:  # a run reports the backlog for itself
        # Between rounds, an unavailable source of another producer must not delay this one.
        _report_backlog(context, flow.producer.each if of_rounds else BoundProducer.all_of(flow.pipeline))


def _is_table(item: tuple[str, Any]) -> bool:
    """Return whether metadata is a table; tables are shown below figures."""
    return isinstance(item[1], dg.TableMetadataValue)


def _of_run(receive: Receive, manifest: Manifest) -> dict[str, Any]:
    seconds = (datetime.now(UTC) - receive.started_at).total_seconds()
    return {
        "demand": receive.demand,
        "batches": manifest.totals.batches,
        "messages per second": round(manifest.totals.received / seconds, 1) if seconds else 0.0,
        "seconds": round(seconds, 3),
        "origin": receive.origin,
        "receive_id": receive.receive_id,
        **({"producer": receive.producer} if receive.producer else {}),
    }


def _batch_keys(totals: Totals, batchers: Sequence[str]) -> dict[str, int]:
    """Return the number of messages by batch key, for the most frequent keys of some batchers."""
    keys = sum((totals.batch_keys.get(batcher, Counter()) for batcher in batchers), Counter[str]())
    return dict(keys.most_common(_NAMED))


def log_output(context: dg.AssetExecutionContext, manifest: Manifest) -> None:
    """Log the output of a step's callbacks, task by task.

    Each line is prefixed, so that output cannot imitate lines of the log.
    """
    for output in manifest.totals.output:
        more = f"{output.more:,} more lines are in Spark's log" if output.more else ""
        for level, lines in groupby(_levels(f"{output.text}{more}"), itemgetter(0)):
            context.log.log(level, "\n".join([f"Output of {output.author}:", *(f"| {line}" for _, line in lines)]))


def _levels(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line with its level: given by its first word, or for an indented line, by the line before it."""
    level = logging.INFO
    for line in text.removesuffix("\n").split("\n"):
        if not line.startswith("  "):
            level = _LEVELS.get(line.partition(" ")[0].partition(":")[0], logging.INFO)
        yield level, line
