"""The option `--set`: fields of a pipeline's context, changed for the launched runs only."""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from pipeline_platform.cli.terminal import say
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.strict_options import PipelineError

_SETTING = (
    "Field of the pipeline's context, changed for these runs only, such as cancelled_is_valid=true. The value is JSON, "
    "or text. Repeat the option for others."
)
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help=_SETTING)]

_PLAIN = (bool, int, float, str)
"""Types that Dagster checks in the run config, so that `3` for a float must be `3.0`."""


def settings_of(pipeline: type[Pipeline], given: Sequence[str] | None) -> dict[str, Any]:
    """Return the values of fields of a pipeline's context by name, as JSON.

    Raises:
        BadParameter: The pipeline has no context or no such field, or a value is not valid.
    """
    settings = {}
    for text in given or ():
        name, is_set, value = text.partition("=")
        if not name or not is_set:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE.", param_hint="--set")
        settings[name] = _value(pipeline, name, value)
    if settings:
        shown = ", ".join(f"{name} {json.dumps(value)}" for name, value in settings.items())
        say(f"Set for these runs only: {shown}.", err=True)
    return settings


def _value(pipeline: type[Pipeline], name: str, text: str) -> Any:
    if pipeline.context is None:
        known = f"{pipeline.name} has no context whose fields could be set. Add `context` to its class."
        raise typer.BadParameter(known, param_hint="--set")
    values: list[Any] = [text]
    with suppress(ValueError):
        values.insert(0, json.loads(text))
    for value in values:
        try:
            valid = getattr(pipeline.context_of({name: value}), name)
        except PipelineError as error:
            reason = str(error)
        else:
            return valid if type(valid) in _PLAIN else value
    raise typer.BadParameter(reason, param_hint="--set")
