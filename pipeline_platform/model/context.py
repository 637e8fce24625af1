"""The context of a run: the class's own, with some fields overridden."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pipeline_platform.model.strict_options import PipelineError, did_you_mean, shown, without_prefix


def overridden(context: BaseModel, values: Mapping[str, Any], path: str) -> BaseModel:
    """A copy of a context with other values in some fields; a `PipelineError` names it by `path`."""
    model = type(context)
    for name in values:
        if name not in model.model_fields:
            raise PipelineError(f"{path}.{name}: there is no such field; {did_you_mean(str(name), model.model_fields)}")
    try:
        return model.model_validate({**context.model_dump(), **values})
    except ValidationError as error:
        refused = error.errors(include_url=False)
    raise PipelineError("; ".join(_refusal(model, each, path) for each in refused))


def _refusal(model: type[BaseModel], refused: ErrorDetails, path: str) -> str:
    """Say on one line what pydantic refused, without a value that the model keeps to itself."""
    place, why = ".".join([path, *map(str, refused["loc"])]), without_prefix(refused["msg"])
    field = model.model_fields.get(str(refused["loc"][0])) if refused["loc"] else None
    if field is None or not field.repr or "Secret" in str(field.annotation):
        return f"{place}: {why}"
    return f"{place} is {shown(refused['input'])}: {why}"
