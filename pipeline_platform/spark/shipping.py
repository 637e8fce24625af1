"""The project's code as Spark's workers get it: one zip, the same bytes for the same code.

Workers must run the code that the run was started with, not whatever lies in some folder of theirs. The zip's
digest names it, and names the Spark Connect session that runs share (see `session_id`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import uuid
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("pipeline_platform", "pipelines", "resources")
"""What tasks import. Dagster's side (`assets`, `sensors`) stays home: an edit there needs no new session."""

_NAMESPACE = uuid.UUID("5b0f2f0e-6a57-4c52-9d5e-0c4f3b1d7a11")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time a zip can hold
_READABLE = 0o100644 << 16


@dataclass(frozen=True)
class Code:
    """A zip of the code to ship.

    Attributes:
        path: The zip. Its name holds the digest, so one name never stands for two contents.
        digest: SHA-256 of the zip, in hex.
    """

    path: Path
    digest: str


def pack(packages: Iterable[str], folder: Path) -> Code:
    """Write the zip of some packages or single modules, byte for byte the same for the same files.

    Args:
        packages: Importable top-level names. Everything in a package's folder goes along but caches and
            hidden files, so that `importlib.resources` finds a package's data as well.
        folder: Where the zip is put. One that is already there is left alone.

    Returns:
        Where it is and its digest.

    Raises:
        ValueError: A name cannot be imported, is not top-level, or has no files (a built-in module).
    """
    files: dict[str, Path] = {}
    for name in packages:
        files.update(_files(name))
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".code-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        # Stored, not compressed: another zlib would give other bytes.
        with zipfile.ZipFile(aside, "w", zipfile.ZIP_STORED) as archive:
            for inside in sorted(files):
                entry = zipfile.ZipInfo(inside, _EPOCH)
                entry.external_attr = _READABLE  # neither times nor modes of a checkout may reach the bytes
                entry.create_system = 3
                archive.writestr(entry, files[inside].read_bytes())
        digest = hashlib.sha256(aside.read_bytes()).hexdigest()
        path = folder / f"code-{digest[:16]}.zip"
        # Moved even if it is there: whoever reads it sees the same bytes under the old or the new name.
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return Code(path.resolve(), digest)


def session_id(digest: str, server: str, generation: int = 0) -> str:
    """Name the Spark Connect session that all runs of one code share on one server.

    A fresh session starts fresh Python workers, which costs seconds; an old one may hold workers with old
    code. A session named after the code is warm for the second run and never stale.

    Args:
        digest: Of the shipped zip.
        server: What tells one life of a server from the next: its start time, or its address if that is
            all that is known.
        generation: Counts up when a server has closed this session: a closed id never comes back.

    Returns:
        A UUID in its usual spelling, as Spark Connect wants it.
    """
    return str(uuid.uuid5(_NAMESPACE, f"{digest}\n{server}\n{generation}"))


def _files(name: str) -> dict[str, Path]:
    """Files of a package or module by their name inside the zip."""
    if "." in name:
        raise ValueError(f"cannot ship {name!r}: name the whole package, {name.partition('.')[0]!r}.")
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a script run as __main__ has no spec
        spec = None
    if spec is None:
        raise ValueError(f"cannot ship {name!r}: no such package or module can be imported here.")
    if spec.submodule_search_locations:
        return {
            f"{name}/{path.relative_to(root).as_posix()}": path
            for root in map(Path, reversed(list(spec.submodule_search_locations)))
            for path in _walk(root)
        }
    if spec.origin and Path(spec.origin).is_file():
        return {Path(spec.origin).name: Path(spec.origin)}
    raise ValueError(f"cannot ship {name!r}: it has no files (origin {spec.origin!r}).")


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [inner for inner in folders if inner != "__pycache__" and not inner.startswith(".")]
        yield from (Path(folder, file) for file in files if not file.startswith(".") and not file.endswith(".pyc"))
