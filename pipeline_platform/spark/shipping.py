"""Shipping of the project's code to Spark's workers in a reproducible zip.

Workers must run the code of the run. The digest of the zip is part of its name, and of the id of the Spark Connect
session that runs share (see `session_id`).
"""

import ast
import hashlib
import importlib.util
import inspect
import io
import os
import sys
import uuid
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from types import ModuleType

PLATFORM = "pipeline_platform"
"""The package that all tasks import."""

_NAMESPACE = uuid.UUID("5b0f2f0e-6a57-4c52-9d5e-0c4f3b1d7a11")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time in a zip
_READABLE = 0o100644 << 16
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_LIBRARY = Path(os.__file__).parent


def pack(packages: Iterable[str], folder: Path) -> Path:
    """Write a zip of packages or modules, with the same bytes for the same files.

    Args:
        packages: Importable top-level names. The zip contains all files of a package's folder except caches and hidden
            files, so `importlib.resources` finds its data.
        folder: Folder for the zip, without other writers.

    Returns:
        Path of the zip. Its name contains the digest of its content.

    Raises:
        ValueError: A name cannot be imported, is not top-level, or has no files (a built-in module).
    """
    files = {inside: path for name in packages for inside, path in _files(name).items()}
    packed = io.BytesIO()
    # Stored, because the bytes of a compressed zip depend on the version of zlib.
    # Up to Python 3.12, a package without `__init__.py` is only found in a zip that lists its folder.
    folders = {f"{parent}/" for inside in files for parent in PurePosixPath(inside).parents if parent.name}
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for inside in sorted({*folders, *files}):
            entry = zipfile.ZipInfo(inside, _EPOCH)
            entry.external_attr = _READABLE  # times and modes of a checkout must not change the bytes
            entry.create_system = 3
            archive.writestr(entry, files[inside].read_bytes() if inside in files else b"")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve() / f"code-{hashlib.sha256(packed.getvalue()).hexdigest()[:32]}.zip"
    path.write_bytes(packed.getvalue())
    return path


def packages_of(classes: Iterable[type]) -> set[str]:
    """Return the top-level packages of classes, and the project's packages that their modules import.

    Installed packages are omitted, because workers have them.

    Raises:
        ValueError: Workers cannot import a class. The message contains the class, the reason and a fix.
    """
    waiting = [_module_of(class_) for class_ in classes]
    packages, seen = {module.__name__.partition(".")[0] for module in waiting}, {PLATFORM}
    while waiting:
        for name in {*_named_in(waiting.pop())} - seen:
            seen.add(name)
            if (top := name.partition(".")[0]) in packages or _is_of_project(top):
                packages.add(top)
                waiting += [module] if (module := sys.modules.get(name)) else []
    return packages


def session_id(code: str, server: str, generation: int = 0) -> str:
    """Return the id of the Spark Connect session that all runs with the same code share on one server.

    A new session starts new Python workers, which takes seconds. An old session may have workers with old code. A
    session whose id depends on the code is warm for the second run, and never outdated.

    Args:
        code: Name of the shipped zip.
        server: Start time of the server, which differs after a restart, or its address if the time is unknown.
        generation: Number that increases when a server has closed this session, because a closed id is not reusable.

    Returns:
        A UUID as text, as Spark Connect requires.
    """
    return str(uuid.uuid5(_NAMESPACE, f"{code}\n{server}\n{generation}"))


def _module_of(class_: type) -> ModuleType:
    """Return the module that workers import a class from."""
    module, name = sys.modules.get(class_.__module__), class_.__qualname__
    if class_.__module__ == "__main__":
        why = "it is defined in the script that was started"
    elif module is None or getattr(module, name, None) is not class_:
        why = f"the module {class_.__module__} has no {name}"
    else:
        return module
    raise ValueError(f"Spark's workers cannot import {name}: {why}. Define it at the top level of a module.")


def _named_in(module: ModuleType) -> Iterator[str]:
    """Yield the names that a module imports, also in functions, and the modules that define its values.

    A constant does not name its module, and a value may be made by a function of a module that is not imported.
    """
    with suppress(OSError, TypeError):  # it has no source
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and (module.__package__ or not node.level):
                name = importlib.util.resolve_name("." * node.level + (node.module or ""), module.__package__)
                yield from (name, *(f"{name}.{alias.name}" for alias in node.names))
    for value in list(vars(module).values()):
        home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(home, str):
            yield home


def _is_of_project(name: str) -> bool:
    """Whether a package or module has files outside the folders of installed packages."""
    spec = None if name == "__main__" else importlib.util.find_spec(name)
    places = (spec.submodule_search_locations or filter(None, [spec.origin])) if spec else ()
    return any(
        Path(place).exists() and _INSTALLED.isdisjoint(Path(place).parts) and _LIBRARY not in Path(place).parents
        for place in places
    )


def _files(name: str) -> dict[str, Path]:
    """Return the files of a package or module by their names in the zip."""
    if "." in name:
        raise ValueError(f"Cannot ship {name!r}: it is not a top-level name. Use {name.partition('.')[0]!r}.")
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ValueError(f"Cannot ship {name!r}: it cannot be imported. Install it, or add its folder to sys.path.")
    if spec.submodule_search_locations:
        return {
            f"{name}/{path.relative_to(root).as_posix()}": path
            for root in map(Path, reversed(list(spec.submodule_search_locations)))
            for path in root.rglob("*")
            if path.is_file() and not _is_left_out(path.relative_to(root))
        }
    if spec.origin and Path(spec.origin).is_file():
        return {Path(spec.origin).name: Path(spec.origin)}
    raise ValueError(f"Cannot ship {name!r}: it has no files (origin {spec.origin!r}).")


def _is_left_out(path: Path) -> bool:
    return path.suffix == ".pyc" or any(part == "__pycache__" or part.startswith(".") for part in path.parts)
