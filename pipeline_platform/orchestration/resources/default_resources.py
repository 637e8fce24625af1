"""Default resources of a deployment: lake, control store and Spark."""

import os
from typing import Any

import dagster as dg

from pipeline_platform.home import home
from pipeline_platform.orchestration.resources.lake_resources import ControlResource, LakeResource
from pipeline_platform.orchestration.resources.spark_resource import WARM, SparkResource


def default_resources() -> dict[str, Any]:
    """Return resources for `lake`, `control` and `spark`, configured by environment variables.

    The variables are `PIPELINE_PLATFORM_LAKE`, `_CONTROL`, `_SPARK`, `_SPARK_TOKEN` and `_SPARK_UI`. By default the
    lake and the control store are in `pipeline_platform.home.home`, and Spark is the warm server, or a session of the
    run's own if there is no warm server.
    """
    variables = {name: f"PIPELINE_PLATFORM_{name}" for name in ("LAKE", "CONTROL", "SPARK", "SPARK_TOKEN")}
    named = {name: dg.EnvVar(variable) for name, variable in variables.items() if os.environ.get(variable)}
    return {
        "lake": LakeResource(root=named.get("LAKE", str(home() / "lake"))),
        "control": ControlResource(url=named.get("CONTROL", f"sqlite:///{home()}/control.sqlite")),
        "spark": SparkResource(
            remote=os.environ.get(variables["SPARK"], WARM),
            token=named.get("SPARK_TOKEN"),
            ui=os.environ.get("PIPELINE_PLATFORM_SPARK_UI", ""),
        ),
    }
