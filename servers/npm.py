"""Servers from npm, installed from a locked list of packages, each with its hash."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from filelock import FileLock

from servers.server import ServerError

_INSTALL_S = 300


def missing() -> str | None:
    """Return what is missing to run a server, or None."""
    lacks = [program for program in ("node", "npm") if shutil.which(program) is None]
    return f"{' and '.join(lacks)} not found on PATH; install Node 20 or newer" if lacks else None


def install(locked: Path, folder: Path) -> Path:
    """Install the package of `locked/package.json`, once for all callers; return the folder of the modules.

    Raises:
        ServerError: npm fails.
    """
    ((name, version),) = json.loads((locked / "package.json").read_text())["dependencies"].items()
    home = folder / f"{name}-{version}"
    home.mkdir(parents=True, exist_ok=True)
    # fauxqs requires Node 22 for persistence, which sqs.mjs does not use.
    options = ["--no-audit", "--no-fund", "--ignore-scripts", "--engine-strict=false", "--prefix", str(home)]
    with FileLock(home / "lock"):
        if not (home / "installed").exists():
            for file in ("package.json", "package-lock.json"):
                shutil.copy(locked / file, home)
            npm = ["npm", "ci", *options]
            installed = subprocess.run(npm, capture_output=True, text=True, timeout=_INSTALL_S, check=False)  # noqa: S603
            if installed.returncode:
                raise ServerError(f"npm cannot install {name} {version} into {home}: {installed.stderr[-1_000:]}")
            (home / "installed").touch()
    return home / "node_modules"
