"""Names of the previous release, which work for one more release. A warning gives the new name."""

import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

_LOG = logging.getLogger(__name__)
_Class = type[Any]


class Renamed(NamedTuple):
    """The new name of a class attribute, and the conversion of its value."""

    name: str
    convert: Callable[[Any], Any] = lambda value: value


def _share(value: Any) -> Any:
    """Return the share for a value of `fail_run_on`; a value that was not valid stays invalid."""
    return {"never": None, "any": 0.0}.get(value, value) if isinstance(value, str) else value


OPTIONS: Mapping[str, Renamed] = {
    "redrive": Renamed("retry_schedule"),
    "fail_run_on": Renamed("max_failed_share", _share),
}
"""Class attributes of pipelines by their old names."""

SOURCE_MEMBERS: Mapping[str, str] = {"words": "ack_actions", "whereabouts": "location"}
"""Properties and methods of sources by their old names."""


def warn(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that an old name is used, by a `DeprecationWarning` and once in the log.

    Python hides a `DeprecationWarning` outside the started script; a deployment is never the started script.

    Args:
        old: The deprecated name.
        new: What to use instead.
        stacklevel: Of `warnings.warn`, counted from here.
    """
    text = f"{old} is deprecated and will be removed in the next release. Use {new}."
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)
    _log_once(text)


@cache
def _log_once(text: str) -> None:
    _LOG.warning(text)


def rename_options(cls: _Class, base: _Class) -> None:
    """Set the new options of a pipeline from the old options that the class, or a mixin of it, sets.

    Args:
        cls: The class that is being created, abstract or not.
        base: `Pipeline`.

    Raises:
        ValueError: The class sets an option by both names; the text names them.
    """
    for old, (new, convert) in OPTIONS.items():
        for owner in cls.__mro__:
            attributes = vars(owner)
            if new in attributes and old not in attributes:
                break  # this class overrides what classes after it set
            if old in attributes:
                if new in attributes:
                    raise ValueError(
                        f"{owner.__qualname__} has both {old} and {new}. Remove {old}, which is deprecated."
                    )
                warn(f"{owner.__qualname__}.{old}", f"{new} = {convert(attributes[old])!r}", stacklevel=4)
                setattr(cls, new, convert(attributes[old]))
                if issubclass(owner, base):  # a mixin may serve other classes
                    delattr(owner, old)
                break


def rename_members(cls: _Class, members: Mapping[str, str] = SOURCE_MEMBERS) -> None:
    """Make members of a class available by their old and their new names, whichever the class defines.

    A subclass that overrides the old name overrides the new name, and `super()` works with either name.
    """
    for old, new in members.items():
        own = vars(cls)
        if old in own and new not in own:
            warn(f"{cls.__qualname__}.{old}", new, stacklevel=5)
            setattr(cls, new, own[old])
        elif new in own and old not in own:
            setattr(cls, old, _alias(old, new, own[new]))


def _alias(old: str, new: str, member: Any) -> Any:
    """Return a member that warns, then does what the renamed member does."""
    if isinstance(member, property):

        def get(self: Any) -> Any:
            warn(f"{type(self).__qualname__}.{old}", new)
            return member.__get__(self, type(self))

        return property(get)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        warn(f"{type(self).__qualname__}.{old}", new)
        return member(self, *args, **kwargs)

    return call


def renamed_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module that finds renamed names by their old names.

    Args:
        module: `__name__` of the module.
        names: New names by old names.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn(f"{module}.{name}", f"{module}.{names[name]}")
        return getattr(sys.modules[module], names[name])

    return find
