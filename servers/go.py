"""Go toolchain, which builds two of the servers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from servers.server import ServerError

_GO = "1.24.13"
_INSTALL_S = 600


def missing() -> str | None:
    """Return what is missing to build a program, or None."""
    if shutil.which("go"):
        return None
    return "go not found on PATH; on Debian: apt-get install --no-install-recommends golang-go"


def run(folder: Path, *command: str, **environment: str) -> None:
    """Run a command of Go in a folder.

    Raises:
        ServerError: The command fails.
    """
    _run(folder, _go(), *command, **environment)


def _go() -> str:
    """Return a Go that can build programs for a newer Go.

    Since 1.21 Go downloads the release that a program requires. Debian 12's Go is older. It downloads a release as a
    module, in a folder without a go.mod, because it cannot read the go.mod of these programs.
    """
    elsewhere = Path(tempfile.gettempdir())
    version, system, machine = _run(elsewhere, "go", "env", "GOVERSION", "GOOS", "GOARCH").split()
    known = re.match(r"go1\.(\d+)", version)
    if known is None or int(known[1]) >= 21:
        return "go"
    module = f"golang.org/toolchain@v0.0.1-go{_GO}.{system}-{machine}"
    home = Path(json.loads(_run(elsewhere, "go", "mod", "download", "-json", module))["Dir"])
    for program in (*home.glob("bin/*"), *home.glob("pkg/tool/*/*")):
        program.chmod(0o755)  # files of modules are not executable
    return str(home / "bin" / "go")


def _run(folder: Path, *command: str, **environment: str) -> str:
    done = subprocess.run(  # noqa: S603
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=_INSTALL_S,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise ServerError(f"{' '.join(command[:2])} failed in {folder}: {done.stderr[-1_000:]}")
    return done.stdout
