"""Checks of each attribute of a pipeline's class: its name, and the signature of a callback."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

from pipeline_platform.model.options import Batcher, Processors, Producer, RateLimiting, Retention, Retry, TableBatcher
from pipeline_platform.model.strict_options import PipelineError, nearest, shown

_Class = type[Any]
"""A subclass of `Pipeline` whose attributes are not checked yet."""
_WITHIN = {
    field.alias or name: model.__name__
    for model in (Retry, Retention, TableBatcher, Batcher, RateLimiting, Processors, Producer)
    for name, field in model.model_fields.items()
}
"""Options of other options, and the class that each belongs to: as attributes of a pipeline they have no effect."""
_FORMER: Mapping[str, str] = {"fail_run_on": "max_failed_share", "redrive": "retry_schedule"}
"""Options that resemble their names of release 0.2 in nothing."""
_DEFERRED: Mapping[Callable[[Any], bool], str] = {
    inspect.iscoroutinefunction: "an async function",
    inspect.isasyncgenfunction: "an async generator",
    inspect.isgeneratorfunction: "a generator",
}
"""Functions that do not return their result directly."""


def check_names(cls: _Class, base: _Class, options: Sequence[str], callbacks: Sequence[str]) -> None:
    """Refuse attributes whose names resemble an option or a callback; `base` is `Pipeline` itself."""
    classes = [parent for parent in cls.__mro__ if parent not in base.__mro__]
    for owner, name, value in ((parent, *item) for parent in classes for item in vars(parent).items()):
        if name.startswith("_") or name in options or name in callbacks:
            continue
        rename = f"or rename your attribute to _{name}."
        if name in _WITHIN and not callable(value) and not hasattr(type(value), "__get__"):
            why = f"is an option of {_WITHIN[name]}(...), not of the class. Set it there, {rename}"
        elif meant := _meant_within(name, value):
            why = f"is not an option. Did you mean {meant!r} of {_WITHIN[meant]}(...)? Set it there, {rename}"
        elif name in vars(base):
            why = "overrides a method of Pipeline that is not a callback. Rename yours."
        elif meant := _FORMER.get(name) or nearest(name, [*options, *callbacks]):
            kind = "option" if meant in options else "callback"
            why = f"is not an option or callback. Did you mean the {kind} {meant!r}? Use that name, {rename}"
        else:
            continue
        raise PipelineError(f"{owner.__qualname__}.{name}: {why}")


def _meant_within(name: str, value: object) -> str | None:
    """Return the option of other options that an int or a timedelta is meant for; None for other values."""
    meant = nearest(name, [option for option in _WITHIN if "_" in option], 0.9)
    is_meant = meant and type(value) in (int, timedelta) and name.count("_") <= meant.count("_")
    return meant if is_meant else None


def check_shape(cls: _Class, name: str, arguments: Sequence[str]) -> None:
    """Refuse a callback that is not a method with these arguments, or does not return its result directly."""
    path, written = f"{cls.__qualname__}.{name}", inspect.getattr_static(cls, name)
    fix = f"Write def {name}({', '.join(('self', *arguments))})."
    if isinstance(written, property | cached_property):
        getter = written.fget if isinstance(written, property) else written.func
        if getter and _misfit(getter, ["self"]):
            raise PipelineError(f"{path}: must be a method, got a property. {fix}")
        return  # only an instance can return its value
    try:
        # Bind it to an instance whose __init__ did not run: no code of the author runs here.
        called = written.__get__(object.__new__(cls), cls) if hasattr(type(written), "__get__") else written
    except Exception:  # a custom descriptor that needs a real instance
        return
    if not callable(called):
        raise PipelineError(f"{path}: must be a method, got {shown(called)}. {fix}")
    check_called(path, called, arguments)


def check_called(path: str, called: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Refuse a function that cannot be called with these arguments, or does not return its result directly."""
    of = called if inspect.isroutine(called) else type(called).__call__
    for is_kind, kind in _DEFERRED.items():
        if is_kind(called) or is_kind(of):
            fix = "Write a plain function, without async and yield."
            raise PipelineError(f"{path}: must return its result directly, got {kind}. {fix}")
    if misfit := _misfit(called, arguments):
        wanted = f"be callable with ({', '.join(arguments)})" if arguments else "be callable without arguments"
        raise PipelineError(f"{path}: must {wanted}, got the parameters {misfit}. Change its signature.")


def _misfit(called: Callable[..., Any], arguments: Sequence[str]) -> str | None:
    """Return the parameters of a function that cannot be called with these arguments; None if it can."""
    try:
        # The outermost function is called; a wrapped function may get more arguments.
        signature = inspect.signature(called, follow_wrapped=False)
    except ValueError:  # a function in C without a signature
        return None
    try:
        signature.bind(*arguments)
    except TypeError:
        return str(signature)
    return None
