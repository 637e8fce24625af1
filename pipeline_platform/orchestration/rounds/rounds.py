"""Rounds: a run of a producer with `idle_timeout` continues after its first receive, with one receive per round."""

import logging
import math
import sys
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import dagster as dg

from pipeline_platform.control import demand
from pipeline_platform.lake.log_length import limit_log
from pipeline_platform.lake.maintenance.compaction import UnreadableFileError, compact_window
from pipeline_platform.lake.maintenance.maintenance import CROWDED
from pipeline_platform.lake.task_report import Totals
from pipeline_platform.model.retry import Backoff
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.orchestration.reports.reporting import (
    Results,
    failed_too_often,
    log_output,
    report,
    report_finished,
)
from pipeline_platform.orchestration.reports.run_checks import evaluation, figures_of, judge_answer
from pipeline_platform.orchestration.reports.stage_figures import stages_of
from pipeline_platform.orchestration.rounds.rounds_end import RoundsEnd
from pipeline_platform.orchestration.rounds.rounds_plot import RoundsPlot
from pipeline_platform.orchestration.runs.run_receive import working_step
from pipeline_platform.orchestration.sensors.runs_under_way import in_flight, limits
from pipeline_platform.run import steps
from pipeline_platform.run.begin import begin
from pipeline_platform.run.finish import finish_others
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.lease import alive, ended, standing_by
from pipeline_platform.run.receive_state import Phase
from pipeline_platform.run.stopping import acknowledged
from pipeline_platform.source.contract import SourceError

_LOG = logging.getLogger(__name__)
_LOOK_S = 1.0
"""Longest wait for a message before the run checks whether it is to end."""
_AFTER_EMPTY = Backoff(first=timedelta(seconds=1), most=timedelta(seconds=5))
"""Pauses after rounds without messages: the source does not report its backlog, or does not deliver it."""
_FINISH_EVERY_S = 30.0
"""Time between two attempts to finish receives of crashed runs, and of rounds whose acknowledgement was refused."""
_REPORTS = Backoff(first=timedelta(seconds=5), most=timedelta(minutes=1))
"""Pauses between reports: Dagster keeps about six rows of each."""


@dataclass
class Rounds:
    """The rounds of a run, after its first receive.

    Attributes:
        context: Of the op.
        flow: The producer and its resources.
        overrides: Overridden fields of the pipeline's context.
        done: Number of rounds.
    """

    context: dg.AssetExecutionContext
    flow: Flow
    overrides: dict[str, Any]
    done: int = 0
    _plot: RoundsPlot = field(default_factory=RoundsPlot)
    _totals: Totals = field(default_factory=Totals)
    _unreported: Results = field(default_factory=Results)
    _acknowledged: int = 0
    _answer: steps.Acknowledgement | None = None
    _reports: int = 0
    _reported: float = field(default_factory=time.monotonic)
    _waiting_since: float | None = None
    _empty: int = 0
    _hindered: int = 0
    _again_at: float = 0.0
    _finished: float = -math.inf
    _filled: bool = False

    def perform(self) -> str | None:
        """Perform rounds until the run is to end.

        Returns:
            The reason for which the run is to fail although everything is published and acknowledged, or None.
        """
        end = RoundsEnd(self.context, self.flow)
        with standing_by(self.flow, self.context.run.run_id):
            try:
                red, reason = self._perform_until(end)
            except BaseException:  # their rows are published: downstream assets must see another data version
                self._report_before_error()
                raise
            red = red or self._report()
            self.context.log.info(f"Ended after {self.done} rounds: {red or reason}")
            return red

    def _perform_until(self, end: RoundsEnd) -> tuple[str | None, str | None]:
        """Perform rounds; return the reason for which the run is to fail, or the reason for which the rounds end."""
        red = None
        while red is None and (reason := end.reason()) is None:
            if time.monotonic() - self._finished >= _FINISH_EVERY_S:
                self._finish_others()
            if ask := self._ask(end):
                self._perform(ask)
                if not self._empty:
                    end.defer()
            if time.monotonic() - self._reported >= _REPORTS.before(self._reports + 2).total_seconds():
                red = self._report()
        return red, reason

    def _finish_others(self) -> None:
        self._finished = time.monotonic()
        try:
            self.flow.source.check_ready()
        except SourceError:  # the claims of unacknowledged receives stay, so that sensors request a run for them
            return
        finish_others(self.flow, self.context.log.info, partial(report_finished, self.context, self.flow))

    def _ask(self, end: RoundsEnd) -> int:
        """Return the demand of a round, or 0 after a short wait."""
        producer, control, source = self.flow.producer, self.flow.control, self.flow.source
        if (pause := self._again_at - time.monotonic()) > 0:
            if self._hindered:
                end.defer()
            time.sleep(min(pause, _LOOK_S))
            return 0
        try:
            if self._waiting_since is None and not source.wait(_LOOK_S):
                return 0
            bounds = limits(producer, control, datetime.now(UTC), of_round=True)
            # Without the number of other runs: if they are too many, the newest run ends.
            others = replace(in_flight(producer, None, control, but=self.context.run.run_id), runs=0)
            backlog = source.backlog_up_to(demand.of_use(bounds, others))
        except SourceError as error:
            self.context.log.info(f"{producer.source} {error.summary}: {error}")
            time.sleep(_LOOK_S)
            return 0
        if backlog.messages == 0:
            self._waiting_since = None
            return 0
        if backlog.messages:
            end.defer()
        now = time.monotonic()
        waited = None if self._waiting_since is None else timedelta(seconds=now - self._waiting_since)
        self._waiting_since = now if self._waiting_since is None else self._waiting_since
        bounds = replace(bounds, empty_runs=self._empty, filled=self._filled)
        ask = demand.next_ask(backlog, bounds, others, waited)
        left = (bounds.patience - (waited or timedelta(0))).total_seconds()
        self._hindered = self._hindered + 1 if not ask.demand and left <= 0 else 0
        if self._hindered:  # the messages wait for capacity or permits: a look at the source may cost a paid call
            again = source.poll_pauses.before(self._hindered + 1)
            if bounds.permits_at:
                again = min(again, bounds.permits_at - datetime.now(UTC))
            self._again_at = now + again.total_seconds()
        elif not ask.demand:
            time.sleep(min(max(left, 0.01), _LOOK_S))
        return ask.demand

    def _perform(self, wanted: int) -> None:
        context, flow, began = self.context, self.flow, time.monotonic()
        receive = begin(
            flow,
            origin="source",
            run_id=context.run.run_id,
            windows=context.partition_keys,
            demand=wanted,
            context=self.overrides,
            is_further=True,
            log=context.log.info,
            report=partial(report_finished, context, flow),
        )
        with working_step(flow, receive, context):
            steps.receive_messages(flow, receive)
            steps.advance(flow, receive, Phase.PUBLISHED)
            manifest, stages = flow.ledger.manifest(receive), stages_of(flow, receive)
            with alive(flow, receive):
                self._answer = steps.acknowledge(flow, receive, context.resources.acknowledger)
        acknowledged(receive)
        ended(flow, receive)
        log_output(context, manifest)
        totals, seconds = manifest.totals, time.monotonic() - began
        self._waiting_since = None
        self._empty, self._filled = 0 if totals.received else self._empty + 1, totals.received >= wanted
        if not totals.received:
            self._again_at = time.monotonic() + _AFTER_EMPTY.before(self._empty + 1).total_seconds()
            return
        self.done += 1
        self._acknowledged += self._answer.acknowledged
        self._unreported.add(receive, manifest, stages, self._answer)
        self._totals = Totals.of([self._totals, totals]).for_people()
        self._plot.add(totals.received, seconds)
        if self.done % CROWDED == 0:
            self._compact()
        failed = totals.failed.total()
        # To the captured output of the step: Dagster keeps each line of its log as an event.
        print(f"Round {self.done}: {totals.received} messages, {failed} failed, {seconds:.2f} s", file=sys.stderr)  # noqa: T201

    def _compact(self) -> None:
        """Compact the files of the window, and limit the log: each round adds one to each, which slows down commits."""
        under_way, _ = self.flow.ledger.under_way()
        needed = {"outcomes": min((receive.base for receive in under_way), default=None)}
        for table in map(self.flow.tables.__getitem__, self.flow.tables.names):
            try:
                compact_window(table, self.context.partition_keys[-1])
            except UnreadableFileError as error:  # maintenance reports it
                self.context.log.warning(str(error))
            limit_log(table, needed.get(table.name))

    def _report_before_error(self) -> None:
        try:
            self._report()
        except Exception:  # the error that ends the rounds is the one to raise
            _LOG.exception("Could not report the last rounds of run %s to Dagster", self.context.run.run_id)

    def _report(self) -> str | None:
        """Report the rounds since the last report to Dagster; return the reason for which the run is to fail."""
        self._reports, self._reported = self._reports + 1, time.monotonic()
        results = self._unreported
        if not results.totals.received:
            return None
        context, flow, pipeline = self.context, self.flow, self.flow.pipeline
        red = failed_too_often(flow, self._totals)
        figures = {
            **figures_of(self._answer),
            "acknowledged": self._acknowledged,
            "rounds": self.done,
            "rounds of the last hour": dg.MetadataValue.md(self._plot.markdown()),
            "receive_id": results.last_receives["messages"],
        }
        changed = [name for name in ("messages", *pipeline.batchers, "failed") if results.rows[name]]
        report(context, flow, results, figures, changed, is_red=red is not None, of_rounds=True)
        context.log_event(evaluation(pipeline.name, "messages", "acknowledged", judge_answer(self._answer)))
        context.instance.add_run_tags(context.run.run_id, {RunTags.of(pipeline).rounds: str(self.done)})
        self._unreported, self._acknowledged = Results(), 0
        return red
