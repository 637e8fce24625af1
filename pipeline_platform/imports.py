"""Importing what takes long, so that a request to end the run is not lost meanwhile."""

from __future__ import annotations

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor


def import_apart(*modules: str) -> None:
    """Import modules in a thread of their own, and wait for it.

    A signal's handler runs between two steps of the main thread. An import is full of callbacks of weak references,
    and what is raised in one of those Python drops: a run that was told to end while it loaded Spark's client would
    go on as if nothing had been said. Here the main thread waits, but for moments, and a wait can be interrupted.

    Args:
        modules: Names; those that are loaded already, or are being loaded, are passed over.

    Raises:
        ImportError: One cannot be found; or whatever it raises.
    """
    missing = [module for module in modules if module not in sys.modules]
    if missing:
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="import") as thread:
            for module in missing:
                thread.submit(importlib.import_module, module).result()
