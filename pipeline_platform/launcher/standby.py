"""Standby process: it loads a code location, waits, and then executes a run.

`Standby` starts `python -m pipeline_platform.launcher.standby` and sends it lines of JSON through a socket, its
standard input. The first line is the location to load, or null. The line `check` asks whether a new process would load
the same files. Any other line contains the arguments of the run to execute. The process ends if the socket is closed.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from pipeline_platform.launcher import internals

MODULES = ("dagster_pyspark", "pyspark.sql.connect.dataframe", "pyspark.sql.connect.session", "pyarrow.dataset")
"""Modules that a run needs and that its code location does not import."""

_LOAD_S = 30
"""Seconds to wait until a standby process has loaded; after that the run gets a new process."""

_CHECK = "check"

_OF_THE_SYSTEM = ("/dev/", "/proc/", "/sys/")
"""Folders whose files change on every read, so that their times mean nothing."""


class Standby:
    """A process that loads a location and then executes a run.

    Args:
        location: The location to load; None if the run starts now.
    """

    def __init__(self, location: internals.SerialisedLocation | None = None) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "pipeline_platform.launcher.standby"]
            self.process = subprocess.Popen(command, stdin=theirs.fileno())  # noqa: S603
        self._say(location and asdict(location))

    def is_ready(self) -> bool:
        """Whether it has loaded the same files as a new process would. Waits until it has loaded."""
        try:
            self._say(_CHECK)
            self._channel.settimeout(_LOAD_S)
            return self._channel.recv(1) == b"y"
        except OSError:  # it crashed or timed out
            return False

    def run(self, arguments: str) -> None:
        """Let it execute a run. Returns at once."""
        self._say(arguments)

    def dismiss(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()

    def _say(self, what: Any) -> None:
        self._channel.sendall(json.dumps(what).encode() + b"\n")


class _Loaded:
    """Files that this process has loaded, and a check whether a new process would load the same."""

    def __init__(self, location: internals.SerialisedLocation) -> None:
        self._started_ns = time.time_ns()
        self._location = location
        self._variables = location.variables()
        os.environ.update(self._variables)
        with _noting_what_is_read() as (read, listed):
            location.load()
            for module in MODULES:
                importlib.import_module(module)
        local_worker = sys.modules.get("pipeline_platform.run.work.local_worker")  # only if the location has pipelines
        if local_worker and not os.environ.get("PIPELINE_PLATFORM_SPARK", "").startswith("sc://"):
            local_worker.prepare()
        files = [getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())]
        files += [file for file in read if os.path.isfile(file) and not file.startswith(_OF_THE_SYSTEM)]
        self._files = {file: _state(file) for file in files if isinstance(file, str)}
        # Changes in folders of sys.path, such as the working directory, do not count.
        roots = {"/proc", *map(os.path.abspath, sys.path)}
        self._folders = {folder: names for folder, names in listed.items() if folder not in roots}

    def is_fresh(self) -> bool:
        """Whether loaded files, listed folders and environment variables are unchanged."""
        # A file that was edited during the load may have been read before or after the edit.
        return (
            self._location.variables() == self._variables
            and all(known[0] <= self._started_ns and _state(file) == known for file, known in self._files.items())
            and all(_names(folder) == known for folder, known in self._folders.items())
        )


@contextmanager
def _noting_what_is_read() -> Iterator[tuple[set[str], dict[str, set[str]]]]:
    """Record the files that are opened for reading inside the context, such as YAML, and the listed folders.

    Compiled modules are excluded: their source counts.
    """
    read: set[str] = set()
    listed: dict[str, set[str]] = {}
    is_loading = True

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if is_loading and event == "open":
            file, mode, _ = arguments
            if isinstance(file, str) and "r" in (mode or "") and not file.endswith(".pyc"):
                read.add(os.path.abspath(file))
        elif is_loading and event in ("os.listdir", "os.scandir") and isinstance(arguments[0], str | os.PathLike):
            folder = os.path.abspath(os.fsdecode(arguments[0]))
            if folder not in listed:
                listed[folder] = set()  # prevents a recursion: listing it is an audit event, too
                listed[folder] = _names(folder)

    sys.addaudithook(note)  # permanent: Python cannot remove an audit hook
    yield read, listed
    is_loading = False


def _state(file: str) -> tuple[int, int, int]:
    """Return modification time in ns, size and inode of a file; a deleted file gets a time in the future."""
    try:
        stat = os.stat(file)
    except OSError:
        return sys.maxsize, 0, 0
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _names(folder: str) -> set[str]:
    """Return the names in a folder without hidden and compiled files; empty if the folder is missing."""
    with suppress(OSError):
        return {name for name in os.listdir(folder) if not name.startswith((".", "__pycache__"))}
    return set()


def main() -> None:
    """Load a location, wait for a run, and execute it."""
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # An early request to end the run is kept until the run can handle it.
    with internals.capture_interrupts():
        arguments = None
        with suppress(ConnectionError), channel, channel.makefile(encoding="utf-8") as lines:
            location = json.loads(lines.readline() or "null")
            loaded = _Loaded(internals.SerialisedLocation(**location)) if location else None
            for line in lines:
                if (arguments := json.loads(line)) != _CHECK:
                    break
                arguments = None
                channel.sendall(b"y" if loaded and loaded.is_fresh() else b"n")
        if arguments:
            internals.execute(arguments)


if __name__ == "__main__":
    main()
