"""Folder of a deployment on this machine."""

import os
from pathlib import Path


def home() -> Path:
    """Return the default folder of the lake, the control store and the state of the Spark server.

    `$PIPELINE_PLATFORM_HOME` if set, else `pipeline_platform` in `$DAGSTER_HOME` if set, else `.pipeline_platform` in
    the working directory. Runs, sensors and the command line must see the same folder.

    Returns:
        An absolute path; the folder need not exist.
    """
    if named := os.environ.get("PIPELINE_PLATFORM_HOME"):
        return Path(named).expanduser().resolve()
    if dagster := os.environ.get("DAGSTER_HOME"):
        return Path(dagster).expanduser().resolve() / "pipeline_platform"
    return Path(".pipeline_platform").resolve()
