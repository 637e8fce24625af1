"""Installation of servers from npm."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from servers.server import InMemory, ServerError, in_memory

_INSTALL_S = 300


def missing() -> str | None:
    """Return what is missing to run a server from npm, or None."""
    lacks = [program for program in ("node", "npm") if shutil.which(program) is None]
    return f"{' and '.join(lacks)} not found on PATH; install Node 20 or newer" if lacks else None


def version(locked: Path) -> str:
    """Return the version of a package that a folder locks."""
    dependencies: dict[str, str] = json.loads((locked / "package.json").read_text())["dependencies"]
    return dependencies[locked.name]


@contextmanager
def serve(folder: Path, locked: Path, script: Path, *ports: int) -> Iterator[InMemory]:
    """Run a server on loopback until the block or this process ends; yield it. Its address is an endpoint.

    Args:
        folder: Folder of all servers.
        locked: Folder of the package, see `install`.
        script: Program for Node that runs the server. Its arguments are the installed package and the ports.
        ports: Free ports.

    Raises:
        ServerError: Node is missing, or the server cannot be installed or does not start.
    """
    with in_memory(["node", str(script), str(install(folder, locked)), *map(str, ports)], "http://") as server:
        yield server


def install(folder: Path, locked: Path) -> Path:
    """Install a package, once for all callers, and return its folder.

    Args:
        folder: Folder of all servers.
        locked: Folder with `package.json` and `package-lock.json`, which contains the hash of each package. Its name is
            the name of the package.

    Raises:
        ServerError: npm is missing, or fails.
    """
    if lack := missing():
        raise ServerError(f"no {locked.name} server: {lack}")
    home = folder / f"{locked.name}-{version(locked)}"
    home.mkdir(parents=True, exist_ok=True)
    # The engines field of fauxqs requires Node 22 for persistence, which sqs.mjs does not use.
    options = ["--no-audit", "--no-fund", "--ignore-scripts", "--engine-strict=false", "--prefix", str(home)]
    with FileLock(home / "lock"):
        if not (home / "installed").exists():
            for name in ("package.json", "package-lock.json"):
                shutil.copy(locked / name, home)
            npm = ["npm", "ci", *options]
            installed = subprocess.run(npm, capture_output=True, text=True, timeout=_INSTALL_S, check=False)  # noqa: S603
            if installed.returncode:
                raise ServerError(f"npm cannot install {locked.name} into {home}: {installed.stderr[-1_000:]}")
            (home / "installed").touch()
    return home / "node_modules" / locked.name
