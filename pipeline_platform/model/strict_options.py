"""Options: strict values, the types of options with their rules, and errors that name the option, value and fix."""

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_core.core_schema import CoreSchema, no_info_plain_validator_function

from pipeline_platform.model.windows import CRON_FIX, is_cron


class PipelineError(ValueError):
    """A pipeline is not valid. The message names the class, the option or callback, its value, and the fix."""


class Requirement(NamedTuple):
    """A rule for the value of an option. In the `Annotated` type of an option it refuses a value that is not valid.

    Attributes:
        must_be: End of a sentence `must be ...`.
        fix: How to fix a value that is not valid.
        is_valid: Whether a value is valid. All values are valid by default: the caller has found an invalid value.
    """

    must_be: str
    fix: str = ""
    is_valid: Callable[[Any], object] = lambda _: True

    def error(self, value: object) -> str:
        """Return the error for a value, without the name of the option."""
        return f"must be {self.must_be}, got {shown(value)}.{self.fix and f' {self.fix}'}"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of a field that has this rule."""

        def checked(value: Any) -> Any:
            if not self.is_valid(value):
                raise RequirementError(self)
            return value

        return no_info_plain_validator_function(checked)


class RequirementError(ValueError):
    """A value breaks the rule of an option. Raised by validators; `Options` adds the option and the value."""

    def __init__(self, requirement: Requirement) -> None:
        self.requirement = requirement
        super().__init__(f"must be {requirement.must_be}")


def nearest(name: str, known: Iterable[str], cutoff: float = 0.8) -> str | None:
    """Return the known name that a misspelt name most likely means; None if it resembles no known name."""
    return next(iter(difflib.get_close_matches(name, list(known), 1, cutoff)), None)


def did_you_mean(name: str, known: Iterable[str], kind: str) -> str:
    """Return a sentence that suggests the nearest known name, or lists all valid `kind`, such as `options`."""
    known = list(known)
    meant = nearest(name, known, 0.6)
    return f"Did you mean {meant!r}?" if meant else f"Valid {kind}: {', '.join(known)}."


def refusal_reason(refused: ErrorDetails) -> str:
    """Return the reason for which pydantic refused a value, as the end of a sentence."""
    reason = refused["msg"].removeprefix("Value error, ")
    for start in ("Input should ", "String should "):
        if reason.startswith(start):
            return f"must {reason.removeprefix(start)}"
    return reason


def shown(value: object) -> str:
    """Return a value for an error: on one line, cut after 200 characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # it must not hide the error of the option
        text = f"a {type(value).__name__}, whose repr raises {type(error).__name__}"
    return text if len(text) <= 200 else f"{text[:200]} (...)"


class Options(BaseModel):
    """Base class of options: unknown names are refused, values are not converted, instances are immutable.

    Raises:
        PipelineError: An option is unknown, missing or has an invalid value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True)

    def __init__(self, /, *unnamed: Any, **options: Any) -> None:
        kind = type(self)
        if unnamed:
            raise PipelineError(
                f"{kind.__name__}: takes keyword arguments only, got {shown(unnamed[0])}. "
                f"Valid options: {', '.join(_by_name(kind))}."
            )
        try:
            super().__init__(**options)
        except ValidationError as error:
            by_option = groupby(
                error.errors(include_url=False), lambda each: str(each["loc"][0]) if each["loc"] else ""
            )
            raise PipelineError(" ".join(_error(kind, option, list(each)) for option, each in by_option)) from None


def call_of(options: type[Options]) -> str:
    """Return the call that creates options, with the names of the required options."""
    required = [f"{name}=..." for name, field in _by_name(options).items() if field.is_required()]
    return f"{options.__name__}({', '.join(required) or '...'})"


_BY_TYPE = {
    "string_type": Requirement("a str"),
    "string_too_short": Requirement("a str that is not empty"),
    "bool_type": Requirement("True or False"),
    "callable_type": Requirement("callable"),
}
"""Requirements by pydantic's type of an error."""


def _by_name(model: type[Options]) -> dict[str, FieldInfo]:
    """Return the fields by the names that authors use."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _error(model: type[Options], option: str, refused: Sequence[ErrorDetails]) -> str:
    """Return the error for an option on one line; pydantic gives a reason for each type that an option accepts."""
    kind, value, fields = refused[0]["type"], refused[0]["input"], _by_name(model)
    path = f"{model.__name__}.{option}"
    if kind == "extra_forbidden":
        return f"{path}: is not a valid option, got {shown(value)}. {did_you_mean(option, fields, 'options')}"
    if kind == "missing":
        return f"{path}: is required. Set it: {fields[option].description}"
    if not option:  # the validator of several options together names the option itself
        return f"{path}{refusal_reason(refused[0])}"
    requirements = [_requirement(fields[option], each) for each in refused]
    if not all(requirements):
        return f"{path}: {refusal_reason(refused[0])}, got {shown(value)}."
    must_be = " or ".join(requirement.must_be for requirement in requirements if requirement)
    fixes = dict.fromkeys(requirement.fix for requirement in requirements if requirement and requirement.fix)
    return f"{path}: {Requirement(must_be, ' '.join(fixes)).error(value)}"


def _requirement(field: FieldInfo, refused: ErrorDetails) -> Requirement | None:
    least = next((bound.ge for bound in field.metadata if isinstance(bound, Ge)), None)
    most = next((bound.le for bound in field.metadata if isinstance(bound, Le)), None)
    if least is not None and most is not None:
        number = "a number" if field.annotation is float else "an int"
        return Requirement(f"{number} from {least:,} to {most:,}")
    if refused["type"] == "model_type":
        return Requirement(f"a {refused['ctx']['class_name']}(...)")
    error = refused.get("ctx", {}).get("error")
    return error.requirement if isinstance(error, RequirementError) else _BY_TYPE.get(refused["type"])


_LONGEST = timedelta(days=36_500)
"""A century. Adding it to the present time stays within the range of `datetime`."""
_OWNER = re.compile(r"team:.+|[\w.%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,7}")  # Dagster's own rule


def _is_owner(value: object) -> bool:
    return isinstance(value, str) and _OWNER.fullmatch(value) is not None


NAME = Requirement(
    "1 to 63 lower-case letters, digits and _, starting with a letter",
    is_valid=lambda value: isinstance(value, str) and re.fullmatch("[a-z][a-z0-9_]{0,62}", value),
)
Name = Annotated[str, NAME._replace(fix="Change it: tables and assets are named after it.")]
Duration = Annotated[
    timedelta,
    Requirement(
        f"a positive timedelta of at most {_LONGEST.days:,} days",
        "Use, for example, timedelta(seconds=30).",
        lambda value: isinstance(value, timedelta) and timedelta(0) < value <= _LONGEST,
    ),
]
Cron = Annotated[str, Requirement("a cron schedule", CRON_FIX, is_cron)]
ZonedDatetime = Annotated[
    datetime,
    Requirement(
        "a datetime with a time zone",
        "Use, for example, datetime(2026, 1, 1, tzinfo=UTC).",
        lambda value: isinstance(value, datetime) and value.utcoffset() is not None,
    ),
]
Context = Annotated[
    BaseModel,
    Requirement(
        "an instance of a pydantic model",
        "Use, for example, Settings().",
        lambda value: isinstance(value, BaseModel),
    ),
]
Share = Annotated[
    float,
    Requirement(
        "a share of failed messages (0.0 to 1.0)",
        is_valid=lambda value: type(value) in (int, float) and 0 <= value <= 1,
    ),
]
SourceKey = Annotated[
    str,
    Requirement(
        "the key of a source",
        "Use the key of a resource, for example 'orders_dead'.",
        lambda value: type(value) is str and value,
    ),
]
Owners = Annotated[
    Sequence[str],
    Requirement(
        "a tuple of e-mail addresses and 'team:<name>'",
        "Use, for example, ('team:data',).",
        lambda value: isinstance(value, list | tuple) and all(map(_is_owner, value)),
    ),
]


def requirements_of(cls: type) -> Mapping[str, Requirement]:
    """Return the rules of the options that a class declares as `ClassVar`, by name."""
    return {name: requirement_of(get_args(hint)[0]) for name, hint in inspect.get_annotations(cls).items()}


def requirement_of(type_: Any) -> Requirement:
    """Return the rule of an option: the rule in its `Annotated` type, or to be a bool, options, or options by name."""
    if get_origin(type_) is Annotated:
        return next(each for each in get_args(type_) if isinstance(each, Requirement))
    if NoneType in get_args(type_):
        must_be, fix, is_valid = requirement_of(get_args(type_)[0])
        return Requirement(f"{must_be} or None", fix, lambda value: value is None or is_valid(value))
    if get_origin(type_) is Mapping:
        of = get_args(type_)[1]
        must_be = f"a dict of {' and '.join(map(call_of, get_args(of) or [of]))} by name"
        return Requirement(must_be, is_valid=lambda value: isinstance(value, Mapping))
    must_be = "True or False" if type_ is bool else f"a {call_of(type_)}"
    return Requirement(must_be, is_valid=lambda value: isinstance(value, type_))
