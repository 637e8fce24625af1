"""The code location of the pipelines under test."""

from typing import Any

import dagster as dg

from pipeline_platform.deployment import platform_definitions
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.spark.shipping import PACKAGES
from resources.lake import ControlResource, LakeResource
from resources.source import source_resource
from resources.spark import WARM, SparkResource
from tests.pipelines_under_test import PIPELINES, Beside, Changed, MoodyQueue, Told, Widened, told_with


def resources_at(root: str, spark_folder: str, **queue: Any) -> dict[str, Any]:
    """The resources of a location whose data lies in one folder."""
    moody = source_resource(MoodyQueue)
    return {
        "lake": LakeResource(root=f"{root}/lake"),
        "control": ControlResource(url=f"sqlite:///{root}/control.sqlite"),
        "spark": SparkResource(remote=WARM, state_folder=spark_folder, packages=[*PACKAGES, "tests"]),
        "queue": moody(
            **{"name": "queue", "url": f"sqlite:///{root}/queue.sqlite", "created_column": "created_at", **queue}
        ),
        "beside_queue": moody(name="beside_queue", url=f"sqlite:///{root}/beside.sqlite"),
    }


def job_at(name: str, root: str, spark_folder: str, queue_url: str = "", edit: str = "") -> dg.JobDefinition:
    """One job of the location, for Dagster to build again from its arguments.

    Args:
        name: Of the job.
        root: Folder of the data.
        spark_folder: State folder of warm Spark.
        queue_url: Of the queue, if it is another; `env:<name>` leaves it to an environment variable.
        edit: `widened` or `changed`: what was edited in the model of `told/lines`.
    """
    edits: dict[str, type[Pipeline]] = {"widened": told_with(Widened), "changed": told_with(Changed)}
    pipeline = edits[edit] if edit else PIPELINES[name.partition("_")[0]]
    url = dg.EnvVar(queue_url.removeprefix("env:")) if queue_url.startswith("env:") else queue_url
    resources = resources_at(root, spark_folder, **({"url": url} if url else {}))
    return platform_definitions([pipeline], resources).resolve_job_def(name)


def both_at(root: str, spark_folder: str) -> dg.JobDefinition:
    """What "Materialize all" runs, where two pipelines have equal partitions: the assets of both, in one run."""
    both = dg.Definitions(jobs=[dg.define_asset_job("both", selection=dg.AssetSelection.all())])
    pipelines = platform_definitions([Told, Beside], resources_at(root, spark_folder))
    return dg.Definitions.merge(pipelines, both).resolve_job_def("both")
