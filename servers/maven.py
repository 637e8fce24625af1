"""Java libraries, which Maven installs for servers and benchmarks."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from pipeline_platform.spark.jvm import JavaNotFoundError, ensure_java
from servers.server import ServerError

_INSTALL_S = 300
_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>local</groupId>
  <artifactId>libraries</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>{dependencies}
  </dependencies>
</project>
"""
_COORDINATES = ("groupId", "artifactId", "version", "classifier")


def missing() -> str | None:
    """Return what is missing to install libraries, or None."""
    if shutil.which("mvn"):
        return None
    return "mvn not found on PATH; on Debian: apt-get install --no-install-recommends maven, which includes Java"


def install(home: Path, libraries: Sequence[str]) -> list[str]:
    """Install libraries with all that they need, once for all callers, and return a Java command that can use them.

    Args:
        home: Folder of these libraries. Concurrent callers share it. It is not installed again if the list changes.
        libraries: Each as group, artifact, version and optionally classifier, separated by colons.

    Raises:
        ServerError: Java is missing, or Maven fails.
    """
    try:
        java = ensure_java(home.parent)
    except JavaNotFoundError as error:
        raise ServerError(f"no {home.name}: {error}") from error
    home = home.resolve()
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / "lock"):
        if not (home / "installed").exists():
            (home / "pom.xml").write_text(_POM.format(dependencies="".join(map(_dependency, libraries))))
            into = ["-DincludeScope=runtime", f"-DoutputDirectory={home / 'jars'}"]
            installed = subprocess.run(  # noqa: S603
                ["mvn", "--batch-mode", "--quiet", "dependency:copy-dependencies", *into],  # noqa: S607
                cwd=home,
                env={**os.environ, "JAVA_HOME": str(java)},
                capture_output=True,
                text=True,
                timeout=_INSTALL_S,
                check=False,
            )
            if installed.returncode:
                raise ServerError(f"Maven cannot install {home.name} into {home}: {installed.stdout[-1_000:]}")
            (home / "installed").touch()
    return [str(java / "bin" / "java"), "-cp", f"{home / 'jars'}/*"]


def _dependency(library: str) -> str:
    tags = zip(_COORDINATES, library.split(":"), strict=False)
    return f"\n    <dependency>{''.join(f'<{name}>{value}</{name}>' for name, value in tags)}</dependency>"
