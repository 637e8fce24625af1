"""What is installed here, and what brought it."""

import importlib.metadata
import re
from collections.abc import Collection, Sequence

from packaging.requirements import Requirement


def needed_by(requirements: Sequence[str]) -> set[str]:
    """The names of what these requirements bring here, and of all that it requires itself."""
    needed: set[str] = set()
    waiting, seen = [Requirement(text) for text in requirements], set()
    while waiting:
        requirement = waiting.pop()
        asked = (plain(requirement.name), frozenset(requirement.extras))
        if asked in seen:
            continue
        seen.add(asked)
        try:
            told = importlib.metadata.requires(requirement.name) or []
        except importlib.metadata.PackageNotFoundError:  # of another platform
            continue
        needed.add(asked[0])
        waiting += [each for each in map(Requirement, told) if _holds(each, asked[1])]
    return needed


def _holds(requirement: Requirement, extras: Collection[str]) -> bool:
    """Whether a requirement is one here, with these extras wanted of who has it."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, ""))


def plain(name: str) -> str:
    """A distribution's name as packaging compares it."""
    return re.sub("[-_.]+", "-", name).lower()
