"""Checks of processes that consider reused process ids and zombies."""

import os
from collections.abc import Iterator
from contextlib import suppress

import psutil


def born(pid: int) -> str | None:
    """Return the start time of a process, in seconds since the boot; None if it has ended or is a zombie."""
    with suppress(psutil.NoSuchProcess):
        # Since the boot, because a change of the clock moves both times. Boot time first: psutil 6 caches it.
        boot = psutil.boot_time()
        process = psutil.Process(pid)
        if _works(process):
            return f"{process.create_time() - boot:.2f}"
    return None


def is_hidden(pid: int) -> bool:
    """Whether a process exists that this process cannot see, as in another unit of systemd with `ProtectProc`."""
    if not os.path.exists("/proc/self") or os.path.exists(f"/proc/{pid}"):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def group_lives(group: int) -> bool:
    """Whether a process group has a process that is not a zombie."""
    return any(True for _ in _members(group))


def worked(pid: int) -> float:
    """Return the CPU seconds of a process's group, including its children that have ended."""
    taken = 0.0
    with suppress(ProcessLookupError):
        for process in _members(os.getpgid(pid)):
            with suppress(psutil.NoSuchProcess):
                taken += sum(process.cpu_times()[:4])
    return taken


def _members(group: int) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and _works(process):
                yield process


def _works(process: psutil.Process) -> bool:
    return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
