"""Go, which builds the servers that are written in it."""

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
    """Say what this machine lacks to build a program, or None."""
    if shutil.which("go"):
        return None
    return "go not found on PATH; on Debian: apt-get install --no-install-recommends golang-go"


def run(folder: Path, *command: str, **environment: str) -> None:
    """Run a command of Go's in a folder.

    Raises:
        ServerError: It fails.
    """
    _run(folder, _go(), *command, **environment)


def _go() -> str:
    """Return a Go that can build what asks for a newer one.

    Since 1.21 Go fetches the release that a program asks for. Debian 12's is older: it fetches one as a module, in a
    folder without a go.mod, for it cannot read those of programs.
    """
    elsewhere = Path(tempfile.gettempdir())
    version, system, machine = _run(elsewhere, "go", "env", "GOVERSION", "GOOS", "GOARCH").split()
    known = re.match(r"go1\.(\d+)", version)
    if known is None or int(known[1]) >= 21:
        return "go"
    module = f"golang.org/toolchain@v0.0.1-go{_GO}.{system}-{machine}"
    home = Path(json.loads(_run(elsewhere, "go", "mod", "download", "-json", module))["Dir"])
    for program in (*home.glob("bin/*"), *home.glob("pkg/tool/*/*")):
        program.chmod(0o755)  # modules come without
    return str(home / "bin" / "go")


def _run(folder: Path, *command: str, **environment: str) -> str:
    done = subprocess.run(  # noqa: S603
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=_INSTALL_S,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise ServerError(f"{' '.join(command[:2])} failed in {folder}: {done.stderr[-1_000:]}")
    return done.stdout
