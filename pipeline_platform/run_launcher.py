"""The name that `dagster.yaml` files of earlier releases have for the launcher."""

from pipeline_platform.launcher.run_launcher import StandbyRunLauncher

__all__ = ["StandbyRunLauncher"]
