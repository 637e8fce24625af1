"""Check of the installed packages: versions within the bounds of the package `pipeline-platform`."""

import platform
from importlib.metadata import PackageNotFoundError, metadata, requires, version

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
    needed = [each for each in requirements if _applies(each, "")]
    for extra in metadata(_PACKAGE).get_all("Provides-Extra") or ():
        mine = [each for each in requirements if each not in needed and _applies(each, extra)]
        if all(_installed(each.name) for each in mine):
            needed += mine
    return needed


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


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
