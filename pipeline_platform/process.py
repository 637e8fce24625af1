"""Which process an id means: ids come round again, and a process that waits to be reaped has one still."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path


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
    stats = Path("/proc").glob("[0-9]*/stat")
    if not Path("/proc/self/stat").exists():
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, 0)
            return True
        return False
    for stat in stats:
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] not in "ZX":
                return True
    return False


def _born_by_ps(pid: int) -> str | None:
    """The same on systems without /proc."""
    answer = subprocess.run(  # noqa: S603
        ["/bin/ps", "-o", "state=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    return " ".join(answer[1:]) if answer and not answer[0].startswith("Z") else None
