"""Which process an id means: ids are used again, and a process that waits to be reaped still has one."""

import os
from collections.abc import Iterator
from contextlib import suppress

import psutil


def born(pid: int) -> str | None:
    """When a living process was started; None if there is none or it waits to be reaped."""
    with suppress(psutil.NoSuchProcess):
        # Since the boot: a step of the clock moves both times alike. That of the boot first: psutil 6 keeps it.
        boot = psutil.boot_time()
        process = psutil.Process(pid)
        if _works(process):
            return f"{process.create_time() - boot:.2f}"
    return None


def group_lives(group: int) -> bool:
    """Whether a process of a group works. One that waits to be reaped does not count."""
    return any(True for _ in _members(group))


def worked(pid: int) -> float:
    """Seconds of processor time that the group of a process has taken, children that ended included."""
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
