"""Values of the environment that Dagster must not show."""

import os
from typing import Any

import dagster as dg


def secret(variable: str, default: str | None = None) -> Any:
    """A value of the environment, by its name where it is set: Dagster shows all that is in its configuration."""
    return dg.EnvVar(variable) if os.environ.get(variable) else default
