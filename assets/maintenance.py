"""The job that keeps a pipeline's tables: compaction and retention."""

import dagster as dg

from pipeline_platform.lake.maintenance import maintain
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.pipeline import Pipeline


def maintenance_job(pipeline: type[Pipeline]) -> dg.JobDefinition:
    """Build the job `<pipeline>_maintenance`."""

    @dg.op(
        name=f"{pipeline.name}__maintain",
        description="Compacts every table, and drops what is older than `retention`.",
        required_resource_keys={"lake"},
        out=dg.Out(dg.Nothing),
    )
    def maintain_tables(context: dg.OpExecutionContext) -> None:
        report = maintain(Tables(context.resources.lake, pipeline), pipeline.retention, log=context.log.warning)
        context.add_output_metadata({table: dg.MetadataValue.json(done) for table, done in report.items()})

    @dg.job(name=f"{pipeline.name}_maintenance", description="Compacts the tables and drops old windows.")
    def job() -> None:
        maintain_tables.alias("maintain")()

    return job
