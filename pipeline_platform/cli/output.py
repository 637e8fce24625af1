"""Base class of the output of `--json`. `docs/reference/json.md` describes the fields of its subclasses."""

from datetime import UTC
from typing import Annotated

import typer
from pydantic import AfterValidator, AwareDatetime, BaseModel

Time = Annotated[AwareDatetime, AfterValidator(lambda time: time.astimezone(UTC))]
"""A time, in UTC: `2026-11-20T10:03:00Z` in JSON."""


class Output(BaseModel, frozen=True, extra="forbid", ser_json_bytes="base64", ser_json_timedelta="float"):
    """Data that a command prints. Each field has a description, for the reference."""


def print_json(output: Output) -> None:
    """Print data as JSON on one line, in ASCII, so that no character controls a terminal. NaN and infinity are null."""
    typer.echo(output.model_dump_json(ensure_ascii=True))
