"""Check of the installed packages: versions within the bounds of the package `pipeline-platform`."""

import platform
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import groupby

from packaging.requirements import Requirement

from pipeline_platform.cli.doctor.check import Finding, error, ok

_PACKAGE = "pipeline-platform"
_SHOWN = ("dagster", "pyspark", "deltalake")


def packages() -> Finding:
    """Check the versions of required packages, and of extras that are installed completely."""
    requirements = [Requirement(text) for text in requires(_PACKAGE) or ()]
    wrong = [problem for each in _needed(requirements) if (problem := _problem(each))]
    if wrong:
        install = " ".join(f"'{requirement.name}{requirement.specifier}'" for requirement, _ in wrong)
        return error(", ".join(text for _, text in wrong), f"Install supported versions: pip install {install}")
    shown = ", ".join(f"{name} {version(name)}" for name in (_PACKAGE, *_SHOWN))
    return ok(f"Python {platform.python_version()}, {shown}")


def _needed(requirements: list[Requirement]) -> list[Requirement]:
    """Return the requirements without an extra, and those of extras whose packages are all installed."""
    by_extra = sorted(requirements, key=_extra)
    needed = []
    for extra, group in groupby(by_extra, _extra):
        mine = [each for each in group if each.marker is None or each.marker.evaluate({"extra": extra})]
        if not extra or all(_installed(each.name) for each in mine):
            needed += mine
    return needed


def _extra(requirement: Requirement) -> str:
    """Return the extra of a requirement; empty without one."""
    text = str(requirement.marker or "")
    return text.rpartition("extra == ")[2].strip("\"'") if "extra == " in text else ""


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _problem(requirement: Requirement) -> tuple[Requirement, str] | None:
    found = _installed(requirement.name)
    if found is None:
        return requirement, f"{requirement.name} is not installed"
    if requirement.specifier.contains(found, prereleases=True):
        return None
    return requirement, f"{requirement.name} {found} is not supported ({requirement.specifier})"
