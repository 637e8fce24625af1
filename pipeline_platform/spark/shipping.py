"""The project's code as Spark's workers get it: one zip, the same bytes for the same code.

Workers must run the code that the run was started with. The zip's digest names it, and names the Spark Connect session
that runs share (see `session_id`).
"""

import hashlib
import importlib.util
import io
import os
import sys
import uuid
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from types import ModuleType

PLATFORM = "pipeline_platform"
"""What tasks import whatever they do."""

_NAMESPACE = uuid.UUID("5b0f2f0e-6a57-4c52-9d5e-0c4f3b1d7a11")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time a zip can hold
_READABLE = 0o100644 << 16
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_LIBRARY = Path(os.__file__).parent


def pack(packages: Iterable[str], folder: Path) -> Path:
    """Write the zip of packages or single modules, byte for byte the same for the same files.

    Args:
        packages: Importable top-level names. All files of a package's folder go along but caches and hidden ones, so
            that `importlib.resources` finds its data as well.
        folder: Where the zip is written; nobody else writes there.

    Returns:
        The zip. Its name holds its digest, so one name never stands for two contents.

    Raises:
        ValueError: A name cannot be imported, is not top-level, or has no files (a built-in module).
    """
    files = {inside: path for name in packages for inside, path in _files(name).items()}
    packed = io.BytesIO()
    # Stored, not compressed: another zlib would give other bytes.
    # Up to Python 3.12, a package without `__init__.py` is only found in a zip that lists its folder.
    folders = {f"{parent}/" for inside in files for parent in PurePosixPath(inside).parents if parent.name}
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for inside in sorted({*folders, *files}):
            entry = zipfile.ZipInfo(inside, _EPOCH)
            entry.external_attr = _READABLE  # neither times nor modes of a checkout may reach the bytes
            entry.create_system = 3
            archive.writestr(entry, files[inside].read_bytes() if inside in files else b"")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve() / f"code-{hashlib.sha256(packed.getvalue()).hexdigest()[:32]}.zip"
    path.write_bytes(packed.getvalue())
    return path


def packages_of(classes: Iterable[type]) -> set[str]:
    """The top-level packages that classes are from, and those of the project that they import as they are loaded.

    What is installed stays: workers have their own.

    Raises:
        ValueError: Workers could not import a class; the message says which, why, and what to do.
    """
    waiting = [_module_of(one) for one in classes]
    packages, seen = {module.__name__.partition(".")[0] for module in waiting}, {PLATFORM}
    while waiting:
        for value in list(vars(waiting.pop()).values()):
            name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(name, str) and name not in seen and (module := sys.modules.get(name)):
                seen.add(name)
                if (top := name.partition(".")[0]) in packages or _is_of_project(top):
                    packages.add(top)
                    waiting.append(module)
    return packages


def session_id(code: str, server: str, generation: int = 0) -> str:
    """Name the Spark Connect session that all runs of one code share on one server.

    A fresh session starts fresh Python workers, which costs seconds; an old one may hold workers with old code. A
    session named after the code is warm for the second run and never stale.

    Args:
        code: Name of the shipped zip.
        server: Tells one life of a server from the next: its start time, or its address if that is all that is known.
        generation: Counts up when a server has closed this session: a closed id never comes back.

    Returns:
        A UUID in its usual spelling, as Spark Connect wants it.
    """
    return str(uuid.uuid5(_NAMESPACE, f"{code}\n{server}\n{generation}"))


def _module_of(one: type) -> ModuleType:
    """The module that workers import a class from."""
    module = sys.modules.get(one.__module__)
    if one.__module__ == "__main__":
        why = "it is in the script that was started"
    elif module is None or getattr(module, one.__qualname__, None) is not one:
        why = f"the module {one.__module__} has no {one.__qualname__}"
    else:
        return module
    raise ValueError(f"Spark's workers cannot import {one.__qualname__}: {why}. Define it at the top of a module.")


def _is_of_project(name: str) -> bool:
    """Whether a package or module lies in files, and not where packages are installed."""
    spec = None if name == "__main__" else importlib.util.find_spec(name)
    places = (spec.submodule_search_locations or filter(None, [spec.origin])) if spec else ()
    return any(
        Path(place).exists() and _INSTALLED.isdisjoint(Path(place).parts) and _LIBRARY not in Path(place).parents
        for place in places
    )


def _files(name: str) -> dict[str, Path]:
    """Files of a package or module by their name inside the zip."""
    if "." in name:
        raise ValueError(f"cannot ship {name!r}: name the whole package, {name.partition('.')[0]!r}.")
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ValueError(f"cannot ship {name!r}: no such package or module can be imported here.")
    if spec.submodule_search_locations:
        return {
            f"{name}/{path.relative_to(root).as_posix()}": path
            for root in map(Path, reversed(list(spec.submodule_search_locations)))
            for path in root.rglob("*")
            if path.is_file() and not _is_left_out(path.relative_to(root))
        }
    if spec.origin and Path(spec.origin).is_file():
        return {Path(spec.origin).name: Path(spec.origin)}
    raise ValueError(f"cannot ship {name!r}: it has no files (origin {spec.origin!r}).")


def _is_left_out(path: Path) -> bool:
    return path.suffix == ".pyc" or any(part == "__pycache__" or part.startswith(".") for part in path.parts)
