"""Types of options with the rules for their values."""

import inspect
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel

from pipeline_platform.model.strict_options import Requirement, call_of
from pipeline_platform.model.windows import CRON_FIX, is_cron

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
