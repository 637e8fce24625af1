"""The process of a run, which may have loaded the project before there is a run.

Most of what passes before a run's first step is spent on imports: of Dagster, the project, Spark's client. A process
that has done all this and stands by starts a run at once.

`run_launcher` starts it, as `python -m pipeline_platform.launcher.standby`, and speaks to it through the socket that
is its standard input, in lines of JSON. `load` imports a code location and is answered when that is done. `check` asks
whether what was loaded is still what a new process would load. `run` makes it the process of a run, as the command
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
from dagster._core.secrets.env_file import get_env_var_dict
from dagster._serdes import deserialize_value
from dagster._utils.hosted_user_process import recon_repository_from_origin
from dagster._utils.interrupts import capture_interrupts, pop_captured_interrupt


class Loaded:
    """What this process has loaded, and whether a new process would load the same.

    Args:
        origin: Of the code location's repository, serialized.
        modules: More to import: what runs need that loading the location does not.
        instance: Reference of the Dagster instance, serialized. It may have variables for the location.
        location: Name of the code location.
    """

    def __init__(self, origin: str, modules: Sequence[str], instance: str, location: str) -> None:
        self._started_ns = time.time_ns()
        self._instance = deserialize_value(instance, InstanceRef)
        self._location = location
        self._variables = self._variables_now()
        os.environ.update(self._variables)
        with DagsterInstance.from_ref(self._instance):  # imports what its storage needs
            recon_repository_from_origin(deserialize_value(origin, RepositoryPythonOrigin)).get_definition()
        for module in modules:
            importlib.import_module(module)
        self._files = {file: _state(file) for file in _source_files()}

    def is_fresh(self) -> bool:
        """Whether no loaded file was edited since this process began, and `.env` says the same."""
        for file, known in self._files.items():
            # Edited while it was being loaded, it may have been read before or after.
            if known is None or known[0] > self._started_ns or _state(file) != known:
                return False
        return self._variables_now() == self._variables

    def _variables_now(self) -> dict[str, str]:
        """What a run sets before it loads anything: `.env` in the working directory, and the instance's for it."""
        loader = self._instance.secrets_loader
        of_instance = loader.get_secrets_for_environment(self._location) if loader else {}
        return {**get_env_var_dict(os.getcwd()), **of_instance}


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
    with suppress(ConnectionError), channel, channel.makefile("rw", encoding="utf-8") as lines:
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
