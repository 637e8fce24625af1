"""Values of the environment that Dagster must not display."""

import os
from typing import Any

import dagster as dg


def secret(variable: str, default: str | None = None) -> Any:
    """Return a reference to an environment variable, or the default if it is not set: Dagster displays other values."""
    return dg.EnvVar(variable) if os.environ.get(variable) else default
