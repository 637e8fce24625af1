"""The processes of a demo: each in a session of its own, so that all of it can be ended, now or by the next demo."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline_platform.process import born, group_lives
from pipelines.demo.place import PROJECT, Place

MARK = "PIPELINE_PLATFORM_DEMO"
"""A variable that only the processes of a demo have: nobody else's are ever ended."""
_PATIENCE_S = 10
"""Dagster's daemon waits for its threads; what is not gone by then is killed."""


class Processes:
    """What was started for a demo, written down before anything depends on it.

    Args:
        place: Whose.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a process in a new session; what it says goes to a log named after it."""
        self._place.logs.mkdir(parents=True, exist_ok=True)
        with self._log(name).open("ab") as log:
            child = subprocess.Popen(  # noqa: S603 - our own commands
                command,
                env={**environment, MARK: str(self._place.home)},
                cwd=PROJECT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children.append(child)
        self._write([*self._written(), {"name": name, "pid": child.pid, "born": born(child.pid)}])
        return child

    def says(self, name: str, lines: int = 15) -> str:
        """The end of a process's log."""
        with contextlib.suppress(FileNotFoundError):
            return "\n".join(self._log(name).read_text(errors="replace").splitlines()[-lines:])
        return ""

    def running(self) -> list[str]:
        """Names of those that were started, by this or an earlier demo, and live."""
        return [entry["name"] for entry in self._written() if entry["born"] and born(entry["pid"]) == entry["born"]]

    def stop(self) -> None:
        """End all that were started here, by this or an earlier demo, with what they started; and nothing else."""
        groups = {entry["pid"] for entry in self._written() if entry["born"] and born(entry["pid"]) == entry["born"]}
        # A group outlives its first process; its members are known by the mark. Looked for twice: what is just being
        # started when it is asked to end may have missed the first look.
        for _ in range(2):
            _end(groups, _with_variable(MARK, str(self._place.home)))
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1)
        self._children.clear()
        self._record().unlink(missing_ok=True)

    def _record(self) -> Path:
        return self._place.home / "processes.json"

    def _log(self, name: str) -> Path:
        return self._place.logs / f"{name}.log"

    def _written(self) -> list[dict[str, Any]]:
        try:
            entries: list[dict[str, Any]] = json.loads(self._record().read_text())
        except (FileNotFoundError, ValueError):
            return []
        return entries

    def _write(self, entries: Sequence[Mapping[str, Any]]) -> None:
        aside = self._record().with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(entries))
        aside.replace(self._record())


def web_server(port: int) -> list[str]:
    """The command of Dagster's web server, on loopback only."""
    return [sys.executable, "-m", "dagster_webserver", "-h", "127.0.0.1", "-p", str(port), "-w", "workspace.yaml"]


def daemon() -> list[str]:
    """The command of Dagster's daemon."""
    return [sys.executable, "-m", "pipelines.demo.daemon", "run", "-w", "workspace.yaml"]


def spark(command: str) -> list[str]:
    """The command that starts or stops the warm Spark."""
    return [sys.executable, "-m", "pipeline_platform.cli.main", "spark", command]


def free_port() -> int:
    """A port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end(groups: set[int], strays: set[int]) -> None:
    for sent in (signal.SIGTERM, signal.SIGKILL):
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, sent)
        for pid in strays:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, sent)
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            if not any(group_lives(group) for group in groups) and not any(born(pid) for pid in strays):
                return
            time.sleep(0.05)


def _with_variable(name: str, value: str) -> set[int]:
    """The processes that were started with a variable of this value; empty on systems that do not tell."""
    wanted, found = f"{name}={value}".encode(), set()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in environ.read_bytes().split(b"\0"):
                found.add(int(environ.parent.name))
    return found
