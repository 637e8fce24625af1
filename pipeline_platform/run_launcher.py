"""Former module of the launcher, for `dagster.yaml` files of earlier releases."""

from pipeline_platform.launcher.run_launcher import StandbyRunLauncher

__all__ = ["StandbyRunLauncher"]
