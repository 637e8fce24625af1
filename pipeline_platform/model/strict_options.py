"""What all options share: strict values, and refusals that name the option, its value and the way out."""

import difflib
import re
from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import groupby
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from pipeline_platform.model import cron

_LONGEST = timedelta(days=36_500)
"""A century: times that far from now can still be reckoned with."""


class PipelineError(ValueError):
    """A pipeline cannot work so: names the class, the option or callback, its value, and what is allowed."""


def nearest(name: str, known: Iterable[str], cutoff: float = 0.8) -> str | None:
    """The known name that a name is most likely meant to be; None if it resembles no known name."""
    return next(iter(difflib.get_close_matches(name, list(known), 1, cutoff)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Name the known name that is meant, or all there are."""
    known = list(known)
    meant = nearest(name, known, 0.6)
    return f"did you mean {meant!r}?" if meant else f"there is {', '.join(known)}"


def without_prefix(said: str) -> str:
    """What pydantic says of a value, as the end of a sentence."""
    return re.sub("^(Input|String) should ", "it should ", said).removeprefix("Value error, ")


def shown(value: object) -> str:
    """Show a value in an error: on one line, and not the whole of a long one."""
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # it must not hide what is wrong with the option
        text = f"a {type(value).__name__}, whose repr raises {type(error).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."


DURATION = (
    f"it must be a timedelta, such as timedelta(seconds=30), longer than nothing and at most {_LONGEST.days:,} days"
)


def is_duration(value: object) -> bool:
    """Whether a value is a length of time that an option may have."""
    return isinstance(value, timedelta) and timedelta(0) < value <= _LONGEST


def _duration(span: timedelta) -> timedelta:
    if not is_duration(span):
        raise ValueError(DURATION)
    return span


Duration = Annotated[timedelta, AfterValidator(_duration)]


def _cron(schedule: str) -> str:
    if not cron.is_cron(schedule):
        raise ValueError(f"it is not a cron schedule: {cron.WAY_OUT}")
    return schedule


Cron = Annotated[str, AfterValidator(_cron)]


class Options(BaseModel):
    """What all options share: unknown names are refused, no value is converted, nothing changes once built.

    What is refused raises a `PipelineError`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True)

    def __init__(self, /, *unnamed: Any, **options: Any) -> None:
        kind = type(self)
        if unnamed:
            there_is = ", ".join(_by_name(kind))
            raise PipelineError(f"{kind.__name__} is given {shown(unnamed[0])} without a name; there is {there_is}")
        try:
            super().__init__(**options)
        except ValidationError as error:
            refused = groupby(error.errors(include_url=False), lambda each: str(each["loc"][0]) if each["loc"] else "")
            said = [_refusal(kind, option, list(each)) for option, each in refused]
            raise PipelineError("; ".join(said)) from None


_ALLOWED = {
    "string_type": "it must be text",
    "string_too_short": "it must be text that is not empty",
    "time_delta_type": DURATION,
}
"""What an option must be, by what pydantic calls its refusal."""


def _by_name(model: type[Options]) -> dict[str, FieldInfo]:
    """The options as authors name them."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _refusal(model: type[Options], option: str, refused: Sequence[ErrorDetails]) -> str:
    """Say on one line why pydantic refused an option: for one reason, or one for each kind of value that it takes."""
    kind, value, fields = refused[0]["type"], shown(refused[0]["input"]), _by_name(model)
    path = f"{model.__name__}.{option}"
    if kind == "extra_forbidden":
        return f"{path} is {value}: there is no such option; {did_you_mean(option, fields)}"
    if kind == "missing":
        return f"{path} is missing: {fields[option].description}"
    if not option:  # of several options together, which it names itself
        return f"{path}{without_prefix(refused[0]['msg'])}"
    why, *others = (_why(fields[option], each) for each in refused)
    return f"{path} is {value}: {', or '.join([why, *(other.removeprefix('it must be ') for other in others)])}"


def _why(field: FieldInfo, refused: ErrorDetails) -> str:
    least = next((bound.ge for bound in field.metadata if isinstance(bound, Ge)), None)
    most = next((bound.le for bound in field.metadata if isinstance(bound, Le)), None)
    if least is not None and most is not None:
        number = "number" if field.annotation is float else "whole number"
        return f"it must be a {number} from {least:,} to {most:,}"
    if refused["type"] == "model_type":
        return f"it must be a {refused['ctx']['class_name']}(...)"
    return _ALLOWED.get(refused["type"]) or without_prefix(refused["msg"])
