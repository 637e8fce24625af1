"""Retry of more failures than fit into one receive: the run continues with further receives."""

import dagster as dg

from pipeline_platform.lake.decisions.ledger import Receive
from pipeline_platform.orchestration import reporting
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.orchestration.run_receive import working_step
from pipeline_platform.run import steps
from pipeline_platform.run.begin import begin
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import intake_of
from pipeline_platform.run.receive_state import Phase
from pipeline_platform.run.stopping import acknowledged, is_to_end


def further_retries(context: dg.AssetExecutionContext, flow: Flow, first: Receive, *, ignore_pause: bool) -> str | None:
    """Retry the failures that did not fit into the first receive of a run, each once, and report each receive.

    Returns:
        The reason why the run fails although its receives are published and acknowledged; None if it succeeds.
    """
    red, total, left = None, first.asked, intake_of(flow, first).left(first)
    # A message that fails again in this run is not retried once more.
    selection = first.selection.model_copy(update={"failed_before": first.started_at})
    while left and red is None:
        context.log.info(f"Retried {total - left:,} of {total:,} failures")
        if is_to_end():
            return f"The run was asked to stop: {left:,} open failures were not retried. Retry them again"
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
        )
        if not receive.demand:
            return f"{left:,} open failures were not retried, because the pipeline is paused"
        with working_step(flow, receive, context):
            steps.receive_messages(flow, receive)
            steps.advance(flow, receive, Phase.PUBLISHED)
            red = reporting.acknowledge_and_report(context, flow, receive, context.resources.acknowledger)
        acknowledged(receive)
        left -= receive.demand
        received = {RunTags.of(flow.pipeline).received: str(total - left)}
        context.instance.add_run_tags(context.run.run_id, received)
    return red
