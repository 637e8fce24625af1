"""A process that has loaded a code location and waits for its run: both sides of it.

`Standby` starts `python -m pipeline_platform.launcher.standby` and speaks to it in lines of JSON through the socket
that is its standard input. The first is a location to load, or null; then `check` asks whether what was loaded is what
a new process would load; anything else is the arguments of the run that the process becomes. It ends when the other
side closes the socket before that.
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
"""What a run of a pipeline needs that its code location loads late."""

_LOAD_S = 30
"""A process that has not loaded by then is given up; the run gets one that begins with it."""

_CHECK = "check"

_OF_THE_SYSTEM = ("/dev/", "/proc/", "/sys/")
"""Where files are as new as the moment in which they are looked at."""


class Standby:
    """A process that loads `location`, if there is one, and becomes a run.

    Args:
        location: What to load ahead; None for the process of a run that begins now.
    """

    def __init__(self, location: internals.Location | None = None) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "pipeline_platform.launcher.standby"]
            self.process = subprocess.Popen(command, stdin=theirs.fileno())  # noqa: S603
        self._say(location and asdict(location))

    def is_ready(self) -> bool:
        """Whether it has loaded what a new process would load; waits until it has loaded."""
        try:
            self._say(_CHECK)
            self._channel.settimeout(_LOAD_S)
            return self._channel.recv(1) == b"y"
        except OSError:  # it died, or takes too long
            return False

    def run(self, arguments: str) -> None:
        """Make it the process of a run. Returns at once."""
        self._say(arguments)

    def dismiss(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()

    def _say(self, what: Any) -> None:
        self._channel.sendall(json.dumps(what).encode() + b"\n")


class _Loaded:
    """What this process has loaded, and whether a new process would load the same."""

    def __init__(self, location: internals.Location) -> None:
        self._started_ns = time.time_ns()
        self._location = location
        self._variables = location.variables()
        os.environ.update(self._variables)
        with _noting_what_is_read() as (read, listed):
            location.load()
            for module in MODULES:
                importlib.import_module(module)
        files = [getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())]
        files += [file for file in read if os.path.isfile(file) and not file.startswith(_OF_THE_SYSTEM)]
        self._files = {file: _state(file) for file in files if isinstance(file, str)}
        # Where modules are found, such as the working directory, anything may come and go.
        roots = {"/proc", *map(os.path.abspath, sys.path)}
        self._folders = {folder: names for folder, names in listed.items() if folder not in roots}

    def is_fresh(self) -> bool:
        """Whether files that were loaded or read, and folders that were listed, are as they were; and so `.env`."""
        # A file that was edited while it was being loaded may have been read before or after.
        return (
            self._location.variables() == self._variables
            and all(known[0] <= self._started_ns and _state(file) == known for file, known in self._files.items())
            and all(_names(folder) == known for folder, known in self._folders.items())
        )


@contextmanager
def _noting_what_is_read() -> Iterator[tuple[set[str], dict[str, set[str]]]]:
    """The files that are opened meanwhile to be read, such as YAML, and what lay in the folders that are listed.

    Compiled modules are not among them: their source counts.
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
                listed[folder] = set()  # to list it is such an event, too
                listed[folder] = _names(folder)

    sys.addaudithook(note)  # for good: there is no way to take it back
    yield read, listed
    is_loading = False


def _state(file: str) -> tuple[int, int, int]:
    """When it was modified, in ns; its size and inode. Of the future if it is gone: nothing loads it again."""
    try:
        stat = os.stat(file)
    except OSError:
        return sys.maxsize, 0, 0
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _names(folder: str) -> set[str]:
    """What lies in a folder, but for what is hidden and what Python compiles; nothing if it is gone."""
    with suppress(OSError):
        return {name for name in os.listdir(folder) if not name.startswith((".", "__pycache__"))}
    return set()


def main() -> None:
    """Load, wait for a run, then be that run."""
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # From the first moment on, a request to end the run is kept until the run can take notice of it.
    with internals.capture_interrupts():
        arguments = None
        with suppress(ConnectionError), channel, channel.makefile(encoding="utf-8") as lines:
            location = json.loads(lines.readline() or "null")
            loaded = _Loaded(internals.Location(**location)) if location else None
            for line in lines:
                if (arguments := json.loads(line)) != _CHECK:
                    break
                arguments = None
                channel.sendall(b"y" if loaded and loaded.is_fresh() else b"n")
        if arguments:
            internals.execute(arguments)


if __name__ == "__main__":
    main()
