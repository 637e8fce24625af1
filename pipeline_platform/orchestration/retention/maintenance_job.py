"""The job `<pipeline>_maintenance`, which compacts tables and deletes what is older than the pipeline's retention."""

import os

import dagster as dg

from pipeline_platform.lake.maintenance.maintenance import maintain
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.retention.run_retention import delete_old_runs, other_run_of_job


def maintenance_job(pipeline: type[Pipeline]) -> dg.JobDefinition:
    """Build the job `<pipeline>_maintenance`: compaction, and retention of windows and runs."""

    @dg.op(
        name=f"{pipeline.name}__maintain",
        description="Compacts every table, and drops what is older than `retention`.",
        required_resource_keys={"lake"},
        out=dg.Out(dg.Nothing),
    )
    def maintain_tables(context: dg.OpExecutionContext) -> None:
        report = maintain(Tables(context.resources.lake, pipeline), pipeline.retention, log=context.log.warning)
        context.add_output_metadata({table: dg.MetadataValue.json(done) for table, done in report.items()})

    @dg.op(
        name=f"{pipeline.name}__delete_runs",
        description="Deletes runs of the pipeline's own jobs that are older than `retention.runs`.",
        out=dg.Out(dg.Nothing),
    )
    def delete_runs(context: dg.OpExecutionContext) -> None:
        keep_for = pipeline.retention.runs
        if keep_for is None or "DAGSTER_CLOUD_DEPLOYMENT_NAME" in os.environ:
            return  # Dagster+ deletes runs by itself, and refuses to delete them on request
        if other := other_run_of_job(context.instance, context.run):
            context.log.info(f"Deleted no runs: run {other} of this job may be deleting them.")
            return
        freed = delete_old_runs(context.instance, pipeline, keep_for, context.run)
        if not freed.is_all:
            context.log.info(
                "Stopped deleting runs: the time limit of one maintenance has passed. The next maintenance continues."
            )
        context.add_output_metadata({"runs deleted": freed.runs, "bytes freed": freed.bytes})

    @dg.job(
        name=f"{pipeline.name}_maintenance",
        description="Compacts the tables, and deletes old windows and runs.",
        executor_def=dg.in_process_executor,
    )
    def job() -> None:
        maintain_tables.alias("maintain")()
        delete_runs.alias("delete_runs")()

    return job
