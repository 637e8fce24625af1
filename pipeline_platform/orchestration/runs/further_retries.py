"""Retry of more failures than fit into one receive: the run continues with further receives."""

from functools import partial

import dagster as dg

from pipeline_platform.lake.decisions.ledger import Receive
from pipeline_platform.model.pipeline import PipelineError
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.orchestration.reports import reporting
from pipeline_platform.orchestration.runs.run_receive import working_step
from pipeline_platform.run import steps
from pipeline_platform.run.begin import begin
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import intake_of
from pipeline_platform.run.receive_state import Phase
from pipeline_platform.run.stopping import acknowledged, is_to_end


def further_retries(
    context: dg.AssetExecutionContext, flow: Flow, first: Receive, red: str | None, *, ignore_pause: bool
) -> str | None:
    """Retry the failures that did not fit into the first receive of a run, each once, and report each receive.

    A receive for which the run fails is the last. `red` is the reason of the first receive.

    Returns:
        The reason why the run fails although its receives are published and acknowledged; None if it succeeds.
    """
    done, left = first.demand, intake_of(flow, first).left(first)
    # A message that fails again in this run is not retried once more.
    selection = first.selection.model_copy(update={"failed_before": first.started_at})
    while left and not red:
        context.log.info(f"Retried {done:,} of {done + left:,} failures")
        not_retried = f"{left:,} open failures were not retried"
        if is_to_end():
            return f"The run was asked to stop: {not_retried}. Retry them again"
        try:
            receive = begin(
                flow,
                origin=first.origin,
                run_id=context.run.run_id,
                windows=first.windows,
                demand=left,
                context=first.context,
                selection=selection,
                ignore_pause=ignore_pause,
                is_further=True,
                log=context.log.info,
                report=partial(reporting.report_finished, context, flow),
            )
        except PipelineError as error:  # other runs use the capacity, or the pipeline is drained
            return f"{not_retried}: {error}"
        if not receive.demand:  # unless paused, others closed or retried them meanwhile
            is_paused = not ignore_pause and flow.control.paused(flow.quota.key) is not None
            return f"{not_retried}, because the pipeline is paused" if is_paused else None
        with working_step(flow, receive, context):
            steps.receive_messages(flow, receive)
            steps.advance(flow, receive, Phase.PUBLISHED)
            red = reporting.acknowledge_and_report(context, flow, receive, context.resources.acknowledger)
        acknowledged(receive)
        done, left = done + receive.demand, receive.asked - receive.demand
        context.instance.add_run_tags(context.run.run_id, {RunTags.of(flow.pipeline).received: str(done)})
    return f"{red.rstrip('.')}. {left:,} open failures were not retried. Retry them again" if red and left else red
