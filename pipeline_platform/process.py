"""Processes that outlive their starter, and which one an id means.

Ids come round again, and a process that waits to be reaped has one still.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import IO


def born(pid: int) -> str | None:
    """When a living process was started; None if there is none or it is only waiting to be reaped."""
    try:
        # The name may hold blanks and brackets, so count from its end: state is field 3, start time 22.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return None
        return _born_by_ps(pid)
    if fields[0] in "ZX":
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{fields[19]}"


def group_lives(group: int) -> bool:
    """Whether any process of a group works still; those that only wait to be reaped do not count."""
    if not Path("/proc/self/stat").exists():
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, 0)
            return True
        return False
    return any(fields[0] not in "ZX" for fields in _members(group))


def worked(pid: int) -> object:
    """The processor time that the group of a process has taken: another value as soon as it has taken more."""
    try:
        group = os.getpgid(pid)
    except ProcessLookupError:
        return None
    if not Path("/proc/self/stat").exists():
        told = subprocess.run(["/bin/ps", "-Ao", "pgid=,time="], capture_output=True, text=True, check=False).stdout
        return sorted(line.split()[1] for line in told.splitlines() if line.split()[0] == str(group))
    return sum(int(ticks) for fields in _members(group) for ticks in fields[11:15])  # children that ended included


def detach(
    command: Sequence[str],
    cwd: Path,
    *,
    stdin: int | IO[bytes] = DEVNULL,
    output: int | IO[bytes] = DEVNULL,
    env: Mapping[str, str] | None = None,
) -> int:
    """Start a process that outlives this one; return its id.

    By way of a shell that ends at once, so that it is nobody's child and leaves no zombie; in a session of its own, so
    that Ctrl-C in the starter's terminal does not reach it.
    """
    script = ["/bin/sh", "-c", 'exec 3<&0; "$@" <&3 3<&- >&2 & echo $!', "sh", *command]
    started = subprocess.run(  # noqa: S603
        script, cwd=cwd, env=env, stdin=stdin, stdout=PIPE, stderr=output, start_new_session=True, check=True
    )
    return int(started.stdout)


def _members(group: int) -> Iterator[list[str]]:
    """What Linux says of each process of a group, from its state on."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                yield fields


def _born_by_ps(pid: int) -> str | None:
    """The same on systems without /proc."""
    answer = subprocess.run(  # noqa: S603
        ["/bin/ps", "-o", "state=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    return " ".join(answer[1:]) if answer and not answer[0].startswith("Z") else None
