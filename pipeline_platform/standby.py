"""The process of a run, which may have loaded the project before there is a run.

Most of what passes before a run's first step is spent on imports: of Dagster, the project, Spark's client. A process
that has done all this and stands by starts a run at once.

`run_launcher` starts it, as `python -m pipeline_platform.standby`, and speaks to it through the socket that is its
standard input, in lines of JSON. `load` imports a code location and is answered when that is done. `check` asks whether
what was loaded is still what a new process would load. `run` makes it the process of a run, as the command
`dagster api execute_run` would. It ends when the other side closes the socket before that.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from dagster import DagsterInstance
from dagster._cli.api import execute_run_command
from dagster._core.instance import InstanceRef
from dagster._core.origin import RepositoryPythonOrigin
from dagster._serdes import deserialize_value
from dagster._utils.hosted_user_process import recon_repository_from_origin
from dagster._utils.interrupts import capture_interrupts, pop_captured_interrupt


class Loaded:
    """What this process has loaded, and whether a new process would load the same.

    Args:
        origin: Of the code location's repository, serialized.
        modules: More to import: what runs need that loading the location does not.
        instance: Reference of the Dagster instance, serialized. It knows variables to set before loading.
        location: Name of the code location.
    """

    def __init__(self, origin: str, modules: Sequence[str], instance: str, location: str) -> None:
        self._started_ns = time.time_ns()
        self._instance = DagsterInstance.from_ref(deserialize_value(instance, InstanceRef))
        self._location = location
        self._inject_variables()
        recon_repository_from_origin(deserialize_value(origin, RepositoryPythonOrigin)).get_definition()
        for module in modules:
            importlib.import_module(module)
        self._files = {file: _state(file) for file in _source_files()}

    def is_fresh(self) -> bool:
        """Whether no loaded file was edited since this process began, and the instance's variables are the same."""
        for file, known in self._files.items():
            # Edited while it was being loaded, it may have been read before or after.
            if known is None or known[0] > self._started_ns or _state(file) != known:
                return False
        return not self._inject_variables()

    def _inject_variables(self) -> bool:
        """Set the variables that the instance has for the location, and say whether that changed anything."""
        before = dict(os.environ)
        self._instance.inject_env_vars(self._location)
        return dict(os.environ) != before


def _source_files() -> set[str]:
    files = (getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values()))
    return {file for file in files if isinstance(file, str)}


def _state(file: str) -> tuple[int, int, int] | None:
    """When it was modified, in ns; its size and inode. None if it is gone."""
    with suppress(OSError):
        stat = os.stat(file)
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
    return None


def main() -> None:
    """Do as told until there is a run, then be that run."""
    channel = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # From the first moment on, a request to end a run is kept until the run can take notice of it.
    with capture_interrupts():
        if arguments := _arguments_of_the_run(channel):
            execute_run_command.main([arguments], standalone_mode=False)


def _arguments_of_the_run(channel: socket.socket) -> str | None:
    """Do as told until there is a run; None if there will be none."""
    loaded: Loaded | None = None
    with channel, channel.makefile("rw", encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            match request.pop("do"):
                case "load":
                    loaded = Loaded(**request)
                    answer = True
                case "check":
                    pop_captured_interrupt()  # meant for a run, and there was none
                    answer = loaded is not None and loaded.is_fresh()
                case _:
                    return str(request["arguments"])
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
    return None


if __name__ == "__main__":
    main()
