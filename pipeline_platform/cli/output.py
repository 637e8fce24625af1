"""Base class of the output of `--json`. `docs/reference/json.md` describes the fields of its subclasses."""

import json
import math
from datetime import UTC
from typing import Annotated, Any

import typer
from pydantic import AfterValidator, AwareDatetime, BaseModel

Time = Annotated[AwareDatetime, AfterValidator(lambda time: time.astimezone(UTC))]
"""A time, in UTC: `2026-11-20T10:03:00Z` in JSON."""


class Output(BaseModel, frozen=True, extra="forbid", ser_json_bytes="base64", ser_json_timedelta="float"):
    """Data that a command prints. Each field has a description, for the reference."""


def print_json(output: Output) -> None:
    """Print data as JSON on one line, in ASCII: characters that control a terminal are escaped."""
    typer.echo(json.dumps(_finite(output.model_dump(mode="json")), allow_nan=False))


def _finite(value: Any) -> Any:
    """Return JSON data without numbers that JSON cannot represent: rows of tables may contain them."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
